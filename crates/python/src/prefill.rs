//! Prefill for Python.

use std::path::PathBuf;
use std::sync::Mutex;

use kvbaton::fake::{FakePrefill, Habits};
use kvbaton::layout::CacheSpec;
use kvbaton::{CpuOptions, CpuPrefill, Error, ErrorKind, Numerics, Prefill};
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
    /// Opens the package at `path`; `numerics` is one of `f32`, `f16-storage`, `f16-accumulate`.
    #[new]
    #[pyo3(signature = (path, threads=0, numerics="f16-storage"))]
    fn new(py: Python<'_>, path: PathBuf, threads: usize, numerics: &str) -> PyResult<NativePrefill> {
        let numerics = Numerics::from_name(numerics).ok_or_else(|| {
            let known = Numerics::ALL.map(Numerics::name).join(", ");
            to_python(
                Error::new(ErrorKind::Usage, format!("numerics `{numerics}` is not one of {known}"))
                    .field("numerics", numerics),
            )
        })?;
        let options = CpuOptions::with_threads(threads).with_numerics(numerics);
        let engine = py.detach(|| CpuPrefill::open(&path, threads)).map_err(to_python)?.with_options(options);
        Ok(NativePrefill(Mutex::new(Box::new(engine))))
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
        let habits = Habits { row_align_bytes, ignores_backings, fails_at };
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

    /// Runs the prompt one operation at a time; what its activations are like, as JSON.
    fn activations(&self, py: Python<'_>, tokens: Vec<u32>) -> PyResult<String> {
        let found = py.detach(|| self.engine_mut().activations(&tokens)).map_err(to_python)?;
        serde_json::to_string(&found).map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))
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
