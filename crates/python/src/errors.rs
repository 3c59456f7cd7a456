//! Errors across the language border: kind, message, hint and fields survive in both directions.

use kvbaton::layout::ModelSpec;
use kvbaton::{Error, ErrorKind};
use pyo3::exceptions::{PyImportError, PyKeyboardInterrupt, PyRuntimeError};
use pyo3::prelude::*;

/// The exception of `kvbaton.errors` for an error.
pub(crate) fn to_python(error: Error) -> PyErr {
    Python::attach(|py| {
        let fields = serde_json::Value::Object(error.fields().clone()).to_string();
        let made = py.import("kvbaton.errors").and_then(|module| {
            module.call_method1("make", (error.kind().name(), error.to_string(), error.get_hint(), fields))
        });
        match made {
            Ok(exception) => PyErr::from_value(exception),
            Err(_) => PyRuntimeError::new_err(error.to_string()),
        }
    })
}

/// The error that an exception of the host stands for.
pub(crate) fn from_python(py: Python<'_>, exception: &PyErr) -> Error {
    let value = exception.value(py);
    if exception.is_instance_of::<PyKeyboardInterrupt>(py) {
        return Error::new(ErrorKind::Interrupted, "interrupted");
    }
    let attribute = |name: &str| value.getattr(name).ok().and_then(|a| a.extract::<String>().ok());
    let message = value.str().map_or_else(|_| "unknown failure".to_owned(), |s| s.to_string());
    if let Some(kind) = attribute("kind").and_then(|k| ErrorKind::from_name(&k)) {
        let mut error = Error::new(kind, message);
        if let Some(hint) = attribute("hint") {
            error = error.hint(hint);
        }
        let fields = py
            .import("json")
            .and_then(|json| json.call_method1("dumps", (value.getattr("fields")?,)))
            .and_then(|text| text.extract::<String>())
            .ok()
            .and_then(|text| serde_json::from_str::<serde_json::Map<_, _>>(&text).ok());
        for (name, field) in fields.into_iter().flatten() {
            error = error.field(&name, field);
        }
        return error;
    }
    if exception.is_instance_of::<PyImportError>(py) {
        return Error::new(ErrorKind::Unavailable, message).hint("pip install 'kvbaton[mlx,export]'");
    }
    let name = value.get_type().name().map_or_else(|_| "exception".to_owned(), |n| n.to_string());
    Error::new(ErrorKind::Internal, format!("{name}: {message}"))
}

/// A model's facts from the JSON that the Python side writes.
pub(crate) fn model(json: &str) -> PyResult<ModelSpec> {
    serde_json::from_str(json).map_err(|e| {
        to_python(Error::new(ErrorKind::Model, format!("the model's facts cannot be read: {e}")))
    })
}
