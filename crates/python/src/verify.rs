//! Verification for Python: the rungs that need no model, and the verdict.

use kvbaton::layout::DType;
use kvbaton::verify::{PromptReport, Rung, Thresholds, VerifyReport, compare_bytes, compare_values};
use kvbaton::{Error, ErrorKind};
use pyo3::prelude::*;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::errors::to_python;
use crate::view::NativeView;

/// Adds the functions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(usual_thresholds, module)?)?;
    module.add_function(wrap_pyfunction!(verify_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(verify_values, module)?)?;
    module.add_function(wrap_pyfunction!(verify_report, module)?)
}

/// Reads JSON that a caller wrote; `what` is named where it is wrong.
fn parse<T: DeserializeOwned>(json: &str, what: &str) -> PyResult<T> {
    serde_json::from_str(json)
        .map_err(|e| to_python(Error::new(ErrorKind::Usage, format!("the {what} cannot be read: {e}"))))
}

fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))
}

/// What is usual for a decoder of a type, as JSON.
#[pyfunction]
fn usual_thresholds(dtype_name: &str) -> PyResult<String> {
    json(&Thresholds::usual(parsed(dtype_name)?))
}

fn parsed(dtype_name: &str) -> PyResult<DType> {
    dtype_name.parse().map_err(|e: kvbaton::layout::LayoutError| to_python(e.into()))
}

/// The rung *bytes*, as JSON.
#[pyfunction]
fn verify_bytes(py: Python<'_>, source: &NativeView, arrived: &NativeView) -> PyResult<String> {
    json(&py.detach(|| compare_bytes(&source.0, &arrived.0)).map_err(to_python)?)
}

/// The rung *values*, as JSON.
#[pyfunction]
fn verify_values(
    py: Python<'_>,
    reference: &NativeView,
    found: &NativeView,
    thresholds: &str,
    dtype_name: &str,
) -> PyResult<String> {
    let thresholds: Thresholds = parse(thresholds, "thresholds")?;
    let dtype = parsed(dtype_name)?;
    json(&py.detach(|| compare_values(&reference.0, &found.0, &thresholds, dtype)).map_err(to_python)?)
}

/// The whole document from the prompts' rungs and facts, `[[rungs, facts], …]`, as JSON.
#[pyfunction]
fn verify_report(prompts: &str, thresholds: &str, facts: &str) -> PyResult<String> {
    let prompts: Vec<(Vec<Rung>, Map<String, Value>)> = parse(prompts, "prompts' results")?;
    let prompts = prompts.into_iter().map(|(rungs, facts)| PromptReport::new(rungs, facts)).collect();
    let (thresholds, facts) = (parse(thresholds, "thresholds")?, parse(facts, "facts")?);
    json(&VerifyReport::new(prompts, thresholds, facts))
}
