//! Decoding with a package, for Python.

use std::path::PathBuf;
use std::sync::Mutex;

use kvbaton::runtime::Units;
use kvbaton::{CpuOptions, Decode, EngineOptions, Threads, open_decode};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::to_python;
use crate::prefill::engine_options;
use crate::view::NativeView;

/// A decode package, ready to run.
#[pyclass(frozen, module = "kvbaton._native")]
pub(crate) struct NativeDecode(Mutex<Box<dyn Decode>>);

impl NativeDecode {
    fn engine_mut(&self) -> std::sync::MutexGuard<'_, Box<dyn Decode>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

#[pymethods]
impl NativeDecode {
    /// Opens the package at `path`.
    #[new]
    #[pyo3(signature = (
        path, threads=0, engine=None, compute_units=None, engine_timeout=None, prediction_timeout=None,
        on_wait=None
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
    ) -> PyResult<NativeDecode> {
        let options = EngineOptions {
            cpu: CpuOptions::with_threads(threads),
            ..engine_options(engine, compute_units, engine_timeout, prediction_timeout, on_wait)?
        };
        let engine = py.detach(|| open_decode(&path, options)).map_err(to_python)?;
        Ok(NativeDecode(Mutex::new(engine)))
    }

    /// `cpu`, `coreml`, …
    #[getter]
    fn engine(&self) -> &'static str {
        self.engine_mut().engine()
    }

    /// The compute units that it was loaded for, where the engine has them.
    #[getter]
    fn compute_units(&self) -> Option<&'static str> {
        self.engine_mut().compute_units().map(Units::name)
    }

    /// What the user should know of how it runs.
    #[getter]
    fn notes(&self) -> Vec<String> {
        self.engine_mut().notes().to_vec()
    }

    /// The model's facts as JSON.
    #[getter]
    fn model(&self) -> PyResult<String> {
        serde_json::to_string(self.engine_mut().model())
            .map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))
    }

    /// The layout of the states as TOML.
    #[getter]
    fn layout(&self) -> String {
        self.engine_mut().layout().to_toml()
    }

    /// Rows that the states hold.
    #[getter]
    fn capacity(&self) -> usize {
        self.engine_mut().capacity()
    }

    /// Tokens that the states have seen.
    #[getter]
    fn tokens_seen(&self) -> usize {
        self.engine_mut().tokens_seen()
    }

    /// Forgets every token.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.engine_mut().clear()).map_err(to_python)
    }

    /// Takes a cache over; the report as JSON.
    fn receive(&self, py: Python<'_>, view: &NativeView, threads: usize) -> PyResult<String> {
        let done = py.detach(|| self.engine_mut().receive(&view.0, &Threads::new(threads)));
        serde_json::to_string(&done.map_err(to_python)?)
            .map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))
    }

    /// Runs one token; the logits of the next as float32 bytes.
    fn step<'py>(&self, py: Python<'py>, token: u32) -> PyResult<Bound<'py, PyBytes>> {
        let logits = py.detach(|| self.engine_mut().step(token)).map_err(to_python)?;
        let bytes: Vec<u8> = logits.values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    /// The states as a cache.
    fn cache(&self, py: Python<'_>) -> PyResult<NativeView> {
        py.detach(|| self.engine_mut().cache()).map(NativeView).map_err(to_python)
    }
}
