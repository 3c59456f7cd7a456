//! The native half of the Python package `kvbaton`.
//!
//! What Python code sees is `kvbaton`, not this module: documentation, types and exceptions live there. This
//! module moves bytes: it runs packages, keeps cache views, and fills arrays through the buffer protocol.

mod arrays;
mod decode;
mod errors;
mod host;
mod inverse;
mod loan;
mod operations;
mod prefill;
mod verify;
mod view;
mod waiting;

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;

use errors::to_python;

/// Runs the command line with `argv` (the program's name first) and returns its exit code.
#[pyfunction]
fn main(py: Python<'_>, argv: Vec<OsString>, host: Py<PyAny>) -> u8 {
    py.detach(|| kvbaton_cli::run(argv, Some(&host::PyHost::new(host))))
}

/// BLAKE3 over a model folder's weights, kept in the user's cache folder.
#[pyfunction]
fn weights_digest(py: Python<'_>, folder: PathBuf) -> PyResult<String> {
    py.detach(|| kvbaton::DigestCache::of_user().weights_digest(&folder)).map_err(to_python)
}

/// The layout called `name`, as TOML.
#[pyfunction]
fn layout_toml(name: &str) -> PyResult<String> {
    kvbaton::layout::presets::get(name).map(|l| l.to_toml()).map_err(|e| to_python(e.into()))
}

/// The names of the layouts that ship with kvbaton.
#[pyfunction]
fn layout_names() -> Vec<&'static str> {
    kvbaton::layout::presets::names().collect()
}

/// Raises unless a cache of the model `source` serves a decoder of the model `target` (both as JSON).
#[pyfunction]
fn check_compatible(source: &str, target: &str, weights: bool) -> PyResult<()> {
    let waived = kvbaton::Waived { weights: !weights };
    kvbaton::check_compatible(&errors::model(source)?, &errors::model(target)?, waived).map_err(to_python)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<decode::NativeDecode>()?;
    module.add_class::<prefill::NativePrefill>()?;
    module.add_class::<view::NativeView>()?;
    module.add_class::<loan::NativeLoan>()?;
    module.add_function(wrap_pyfunction!(loan::view_lend, module)?)?;
    module.add_function(wrap_pyfunction!(inverse::write_into, module)?)?;
    module.add_function(wrap_pyfunction!(main, module)?)?;
    module.add_function(wrap_pyfunction!(weights_digest, module)?)?;
    module.add_function(wrap_pyfunction!(layout_toml, module)?)?;
    module.add_function(wrap_pyfunction!(layout_names, module)?)?;
    module.add_function(wrap_pyfunction!(check_compatible, module)?)?;
    operations::add_to(module)?;
    verify::add_to(module)?;
    module.add_function(wrap_pyfunction!(arrays::address, module)?)
}
