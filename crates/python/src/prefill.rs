//! Prefill for Python.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use kvbaton::fake::{FakePrefill, Habits};
use kvbaton::layout::CacheSpec;
use kvbaton::runtime::Units;
use kvbaton::{EngineOptions, Error, ErrorKind, Prefill, open_prefill};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::to_python;
use crate::view::NativeView;

/// A package, ready to run.
#[pyclass(frozen, module = "kvbaton._native")]
pub(crate) struct NativePrefill(Mutex<Box<dyn Prefill>>);

impl NativePrefill {
    fn engine_mut(&self) -> std::sync::MutexGuard<'_, Box<dyn Prefill>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[pymethods]
impl NativePrefill {
    /// Opens the package at `path`.
    #[new]
    #[pyo3(signature = (path, threads=0, engine=None, compute_units=None, engine_timeout=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        threads: usize,
        engine: Option<&str>,
        compute_units: Option<&str>,
        engine_timeout: Option<f64>,
    ) -> PyResult<NativePrefill> {
        let usage = |message: String| to_python(Error::new(ErrorKind::Usage, message));
        let engine = engine.map(str::parse).transpose().map_err(to_python)?;
        let units = compute_units.map(str::parse::<Units>).transpose().map_err(usage)?;
        let timeout = engine_timeout.map(Duration::try_from_secs_f64).transpose();
        let timeout =
            timeout.map_err(|e| usage(format!("engine_timeout {}: {e}", engine_timeout.unwrap_or(0.0))))?;
        let options = EngineOptions { engine, units, threads, timeout, ..EngineOptions::default() };
        let engine = py.detach(|| open_prefill(&path, options)).map_err(to_python)?;
        Ok(NativePrefill(Mutex::new(engine)))
    }

    /// An engine that computes nothing and has Core ML's habits; `cache` is JSON.
    #[staticmethod]
    fn fake(
        cache: &str,
        lengths: Vec<usize>,
        row_align_bytes: usize,
        ignores_backings: bool,
        fails_at: Vec<usize>,
    ) -> PyResult<NativePrefill> {
        let cache: CacheSpec = serde_json::from_str(cache).map_err(|e| {
            to_python(Error::new(ErrorKind::Usage, format!("the cache spec cannot be read: {e}")))
        })?;
        let habits = Habits { row_align_bytes, ignores_backings, fails_at, ..Habits::default() };
        let engine = FakePrefill::new(cache, &lengths, habits).map_err(to_python)?;
        Ok(NativePrefill(Mutex::new(Box::new(engine))))
    }

    /// `cpu` or `coreml`.
    #[getter]
    fn engine(&self) -> &'static str {
        self.engine_mut().engine()
    }

    /// `(name, tokens)` of every function, shortest first.
    #[getter]
    fn functions(&self) -> Vec<(String, usize)> {
        self.engine_mut().functions().iter().map(|f| (f.name.clone(), f.tokens)).collect()
    }

    /// The model's facts as JSON.
    #[getter]
    fn model(&self) -> Option<String> {
        self.engine_mut().model().and_then(|m| serde_json::to_string(m).ok())
    }

    /// Loads what a prompt of `tokens` tokens needs.
    fn prepare(&self, py: Python<'_>, tokens: usize) -> PyResult<()> {
        py.detach(|| self.engine_mut().prepare(tokens)).map_err(to_python)
    }

    /// Runs the prompt: the cache, the logits as float32 bytes, and the report as JSON.
    fn prefill<'py>(
        &self,
        py: Python<'py>,
        tokens: Vec<u32>,
    ) -> PyResult<(NativeView, Option<Bound<'py, PyBytes>>, String)> {
        let done = py.detach(|| self.engine_mut().prefill(&tokens)).map_err(to_python)?;
        let logits = done.logits.map(|l| {
            let bytes: Vec<u8> = l.values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            PyBytes::new(py, &bytes)
        });
        let report = serde_json::to_string(&done.report)
            .map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))?;
        Ok((NativeView(done.cache), logits, report))
    }
}
