//! A runtime's output in memory that Python owns.

use kvbaton::selftest;
use kvbaton_memory::ForeignMut;
use pyo3::prelude::*;

use crate::arrays::{Exported, Named, Targets};
use crate::errors::to_python;
use crate::operations::json;

/// Lets this Mac's Core ML, or the fake of it elsewhere, write an output into the start of `array`; what became of it, as
/// JSON. The array must be packed and nobody may use it during the call.
#[pyfunction]
pub(crate) fn write_into(py: Python<'_>, array: Named<'_>) -> PyResult<String> {
    // The checks of a fill's targets: it can be written.
    Targets::new(std::slice::from_ref(&array), None)?;
    let exported = Exported::new(&array)?;
    let (start, Exported { info, buffer }) = (exported.start(), exported);
    // SAFETY: the buffer protocol keeps `len_bytes` bytes from the first element writable until the buffer is released,
    // and it is released with the owner. Nobody else uses them during the call, as the function demands; after it, only
    // the owner of the array does.
    let memory = unsafe { ForeignMut::new(start, info.len_bytes, Box::new(buffer)) };
    let found = py.detach(|| selftest::write_into(Box::new(memory))).map_err(to_python)?;
    json(&found)
}
