//! Prefill for Python.

use std::cell::RefCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvbaton::fake::{FakePrefill, Habits, open_on_runtime};
use kvbaton::runtime::{self, Units};
use kvbaton::{
    CpuOptions, EngineOptions, Error, ErrorKind, HandoffReport, Numerics, Prefill, SharedPrefill, Stated,
    StreamOptions, Threads, Wanted, WeightStorage, open_prefill, prefill_into,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::{Named, Targets};
use crate::errors::{model, to_python};
use crate::operations::json;
use crate::view::{NativeView, cache_spec, live_rows, overflow, read_layout};
use crate::waiting::waiting;

/// A package, ready to run.
#[pyclass(frozen, module = "kvbaton._native")]
pub(crate) struct NativePrefill(pub(crate) SharedPrefill);

impl NativePrefill {
    /// Runs `job` on the engine, without the interpreter: a prefill that holds the engine asks it for signals.
    fn detached<T: Send>(&self, py: Python<'_>, job: impl FnOnce(&mut dyn Prefill) -> T + Send) -> T {
        py.detach(|| job(&mut **self.0.lock().unwrap_or_else(|e| e.into_inner())))
    }
}

/// Which engine, where, for how long, and who is told meanwhile.
pub(crate) fn engine_options(
    engine: Option<&str>,
    compute_units: Option<&str>,
    engine_timeout: Option<f64>,
    prediction_timeout: Option<f64>,
    on_wait: Option<Py<PyAny>>,
) -> PyResult<EngineOptions> {
    let usage = |message: String| to_python(Error::new(ErrorKind::Usage, message));
    let limit = |name: &str, seconds: Option<f64>| {
        let wrong = |e: std::time::TryFromFloatSecsError| {
            usage(format!("{name} {}: {e}", seconds.unwrap_or_default()))
        };
        seconds.map(Duration::try_from_secs_f64).transpose().map_err(wrong)
    };
    Ok(EngineOptions {
        engine: engine.map(str::parse).transpose().map_err(to_python)?,
        units: compute_units.map(str::parse::<Units>).transpose().map_err(usage)?,
        timeout: limit("engine_timeout", engine_timeout)?,
        prediction_timeout: limit("prediction_timeout", prediction_timeout)?,
        waiting: on_wait.map(waiting),
        ..EngineOptions::default()
    })
}

/// What a package does not say of itself.
fn stated(layout: Option<&str>, model_json: Option<&str>) -> PyResult<Stated> {
    Ok(Stated { layout: layout.map(read_layout).transpose()?, model: model_json.map(model).transpose()? })
}

fn unknown(what: &str, value: &str, known: &[&str]) -> PyErr {
    let message = format!("{what} `{value}` is not one of {}", known.join(", "));
    to_python(Error::new(ErrorKind::Usage, message).field(what, value))
}

#[pymethods]
impl NativePrefill {
    /// Opens the package at `path`; `numerics` is one of `f32`, `f16-storage`, `f16-accumulate`, `weights` one of
    /// `resident`, `streamed`; `layout` and `model_json` say what a package does not say of itself.
    #[new]
    #[pyo3(signature = (
        path, threads=0, engine=None, compute_units=None, engine_timeout=None, prediction_timeout=None,
        on_wait=None, numerics="f16-storage", weights="resident", max_memory=None, layout=None, model_json=None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        threads: usize,
        engine: Option<&str>,
        compute_units: Option<&str>,
        engine_timeout: Option<f64>,
        prediction_timeout: Option<f64>,
        on_wait: Option<Py<PyAny>>,
        numerics: &str,
        weights: &str,
        max_memory: Option<u64>,
        layout: Option<&str>,
        model_json: Option<&str>,
    ) -> PyResult<NativePrefill> {
        let numerics = Numerics::from_name(numerics)
            .ok_or_else(|| unknown("numerics", numerics, &Numerics::ALL.map(Numerics::name)))?;
        let weights = WeightStorage::from_name(weights)
            .ok_or_else(|| unknown("weights", weights, &WeightStorage::ALL.map(WeightStorage::name)))?;
        let cpu = CpuOptions::with_threads(threads)
            .with_numerics(numerics)
            .with_weights(weights)
            .with_max_memory(max_memory);
        let options = EngineOptions {
            cpu,
            stated: stated(layout, model_json)?,
            ..engine_options(engine, compute_units, engine_timeout, prediction_timeout, on_wait)?
        };
        let engine = py.detach(|| open_prefill(&path, options)).map_err(to_python)?;
        Ok(NativePrefill(Arc::new(Mutex::new(engine))))
    }

    /// An engine that computes nothing and has Core ML's habits; `cache` is JSON.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "Python calls it with keywords")]
    fn fake(
        cache: &str,
        lengths: Vec<usize>,
        row_align_bytes: usize,
        ignores_backings: bool,
        fails_at: Vec<usize>,
        chunk_tokens: usize,
        by_layer: bool,
        fails_after_pieces: Option<usize>,
        panics: bool,
        token_seconds: f64,
    ) -> PyResult<NativePrefill> {
        let habits = Habits {
            row_align_bytes,
            ignores_backings,
            fails_at,
            chunk_tokens,
            by_layer,
            fails_after_pieces,
            panics,
            token_seconds,
        };
        let engine = FakePrefill::new(cache_spec(cache)?, &lengths, habits).map_err(to_python)?;
        Ok(NativePrefill(Arc::new(Mutex::new(Box::new(engine)))))
    }

    /// The package or the chain at `path` on the fake of Core ML, the executor behind its calls.
    #[staticmethod]
    #[expect(clippy::too_many_arguments, reason = "Python calls it with keywords")]
    fn on_fake(
        py: Python<'_>,
        path: PathBuf,
        compute_units: Option<&str>,
        engine_timeout: Option<f64>,
        prediction_timeout: Option<f64>,
        on_wait: Option<Py<PyAny>>,
        layout: Option<&str>,
        model_json: Option<&str>,
        row_align_bytes: usize,
        ignores_backings: bool,
        fails_at: Vec<usize>,
        hangs_at: Vec<usize>,
        hangs_loading: Vec<String>,
        hang_seconds: f64,
    ) -> PyResult<NativePrefill> {
        let usage = |message: String| to_python(Error::new(ErrorKind::Usage, message));
        let hangs_loading =
            hangs_loading.iter().map(|units| units.parse::<Units>()).collect::<Result<_, _>>();
        let habits = runtime::fake::Habits {
            row_align_bytes,
            ignores_backings,
            fails_at,
            hangs_at,
            hangs_loading: hangs_loading.map_err(usage)?,
            hang: Duration::try_from_secs_f64(hang_seconds)
                .map_err(|e| usage(format!("hang_seconds {hang_seconds}: {e}")))?,
            ..runtime::fake::Habits::default()
        };
        let options = EngineOptions {
            stated: stated(layout, model_json)?,
            ..engine_options(None, compute_units, engine_timeout, prediction_timeout, on_wait)?
        };
        let engine = py.detach(|| open_on_runtime(&path, habits, options)).map_err(to_python)?;
        Ok(NativePrefill(Arc::new(Mutex::new(engine))))
    }

    /// `cpu`, `coreml` or `fake`.
    #[getter]
    fn engine(&self, py: Python<'_>) -> &'static str {
        self.detached(py, |e| e.engine())
    }

    /// `(name, tokens)` of every function, shortest first.
    #[getter]
    fn functions(&self, py: Python<'_>) -> Vec<(String, usize)> {
        self.detached(py, |e| e.functions().iter().map(|f| (f.name.clone(), f.tokens)).collect())
    }

    /// The model's facts as JSON.
    #[getter]
    fn model(&self, py: Python<'_>) -> Option<String> {
        self.detached(py, |e| e.model().and_then(|m| serde_json::to_string(m).ok()))
    }

    /// What each layer of its cache keeps, as JSON, where that is known.
    #[getter]
    fn cache(&self, py: Python<'_>) -> Option<String> {
        self.detached(py, |e| e.cache().and_then(|c| serde_json::to_string(c).ok()))
    }

    /// Loads what a prompt of `tokens` tokens needs.
    fn prepare(&self, py: Python<'_>, tokens: usize) -> PyResult<()> {
        self.detached(py, |e| e.prepare(tokens)).map_err(to_python)
    }

    /// Says that all work on GPUs is done that had to do with memory of earlier caches.
    fn settle(&self, py: Python<'_>) {
        self.detached(py, |e| e.settle());
    }

    /// Runs the prompt one operation at a time; what its activations are like, as JSON.
    fn activations(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<String> {
        let found = self.detached(py, |e| e.activations(&tokens)).map_err(to_python)?;
        serde_json::to_string(&found).map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))
    }

    /// Runs the prompt: the cache, the logits as float32 bytes, and the report as JSON.
    fn prefill<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
    ) -> PyResult<(NativeView, Option<Bound<'py, PyBytes>>, String)> {
        let done = self.detached(py, |e| e.prefill(&tokens)).map_err(to_python)?;
        let logits = done.logits.map(|l| {
            let bytes: Vec<u8> = l.values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            PyBytes::new(py, &bytes)
        });
        Ok((NativeView(done.cache), logits, json(&done.report)?))
    }

    /// Runs the prompt and fills `targets`, which hold nothing yet, on the way: as `view_fill` with `fresh`, but rows
    /// move while the prefill runs. Returns the reports of the prefill and of the hand-off as JSON.
    #[pyo3(signature = (tokens, targets, layout, live, cache, on_overflow="error", threads=0))]
    #[expect(clippy::too_many_arguments, reason = "Python calls it with keywords")]
    fn prefill_into(
        &self,
        py: Python<'_>,
        tokens: Vec<u32>,
        targets: Vec<Named<'_>>,
        layout: &str,
        live: &str,
        cache: &str,
        on_overflow: &str,
        threads: usize,
    ) -> PyResult<(String, String)> {
        let (layout, live, cache) = (read_layout(layout)?, live_rows(live)?, cache_spec(cache)?);
        let on_overflow = overflow(on_overflow)?;
        let mut targets = Targets::new(&targets, None)?;
        let mut slices = targets.slices();
        let wanted = Wanted { layout: &layout, cache: &cache, live: &live, rows: None, whole: &[] };
        let run = |engine: &mut dyn Prefill| {
            let signal = RefCell::new(None);
            let cancelled = || {
                *signal.borrow_mut() = Python::attach(|py| py.check_signals()).err();
                signal.borrow().is_some()
            };
            let options = StreamOptions { on_overflow, cancelled: &cancelled, ..StreamOptions::default() };
            let threads = Threads::new(threads);
            let done = prefill_into(engine, &tokens, &wanted, &mut slices, &threads, options);
            // What a signal's handler raised is the cause.
            done.map_err(|error| signal.take().unwrap_or_else(|| to_python(error)))
        };
        let done = self.detached(py, run)?;
        Ok((json(&done.prefilled.report)?, json(&HandoffReport::of_stream(&done, live.tokens_seen))?))
    }
}
