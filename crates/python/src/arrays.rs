//! Python arrays through the buffer protocol.
//!
//! A buffer does not pin the storage of an MLX array and does not keep MLX from writing in place, so buffers of
//! targets live only as long as one fill.

use std::ptr::NonNull;

use kvbaton::layout::{DType, TensorInfo};
use kvbaton::{CacheView, Error, ErrorKind, Target};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;

use crate::errors::to_python;

/// An array with a name: what Python calls `(name, array, dtype)`. bfloat16 has no buffer format of its own, so
/// the type is always said.
pub(crate) type Named<'py> = (String, Bound<'py, PyAny>, String);

/// The address of an array's first element, to tell whether it has moved. Nothing is kept alive by it.
#[pyfunction]
pub(crate) fn address(array: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(PyUntypedBuffer::get(array)?.buf_ptr() as usize)
}

/// Whether elements of a buffer format may be read as `dtype`: floats only as what they are, integers in this
/// machine's byte order also as the bits of a float.
fn may_hold(format: &str, dtype: DType) -> bool {
    let other_order: &[char] = if cfg!(target_endian = "little") { &['>', '!'] } else { &['<'] };
    if dtype.size_bytes() > 1 && format.starts_with(other_order) {
        return false;
    }
    match format.trim_start_matches(['@', '=', '<', '>', '!']) {
        "e" => dtype == DType::Float16,
        "f" => dtype == DType::Float32,
        // MLX's.
        "bfloat16" => dtype == DType::BFloat16,
        "b" | "B" | "c" | "h" | "H" | "i" | "I" | "l" | "L" => true,
        _ => false,
    }
}

/// A buffer and what it holds.
pub(crate) struct Exported {
    pub(crate) info: TensorInfo,
    pub(crate) buffer: PyUntypedBuffer,
}

impl Exported {
    /// Exports `array`, whose elements are of type `dtype`.
    pub(crate) fn new((name, array, dtype): &Named<'_>) -> PyResult<Exported> {
        let fail =
            |problem: String| to_python(Error::new(ErrorKind::Layout, format!("array `{name}`: {problem}")));
        let dtype: DType = dtype.parse().map_err(|e| to_python(Error::from(e)))?;
        let buffer = PyUntypedBuffer::get(array)
            .map_err(|e| fail(format!("it lends no memory with a shape: {}", e.value(array.py()))))?;
        if buffer.item_size() != dtype.size_bytes() {
            return Err(fail(format!(
                "declared {dtype} of {} bytes, its elements have {}",
                dtype.size_bytes(),
                buffer.item_size()
            )));
        }
        let format = buffer.format().to_string_lossy().into_owned();
        if !may_hold(&format, dtype) {
            return Err(fail(format!("declared {dtype}, its elements are of the buffer format `{format}`")));
        }
        let shape = buffer.shape().to_vec();
        let mut strides_bytes = Vec::with_capacity(shape.len());
        let mut len_bytes = dtype.size_bytes();
        for (&size, &stride) in shape.iter().zip(buffer.strides()) {
            let stride =
                if size <= 1 { stride.unsigned_abs() } else { stride.try_into().unwrap_or(usize::MAX) };
            if stride == usize::MAX {
                return Err(fail("negative strides are not supported".to_owned()));
            }
            strides_bytes.push(stride);
            len_bytes += size.saturating_sub(1) * stride;
        }
        if shape.contains(&0) {
            len_bytes = 0;
        }
        Ok(Exported {
            info: TensorInfo { name: name.clone(), dtype, shape, strides_bytes, len_bytes },
            buffer,
        })
    }

    /// The first element; dangling where there is none.
    pub(crate) fn start(&self) -> NonNull<u8> {
        NonNull::new(self.buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling())
    }
}

/// Arrays to be filled: writable, and none of them shares memory with another or with the view that fills them.
pub(crate) struct Targets(Vec<Exported>);

impl Targets {
    /// `source` is the view that fills them, where there is one already.
    pub(crate) fn new(arrays: &[Named<'_>], source: Option<&CacheView>) -> PyResult<Targets> {
        let usage = |message: String| Err(to_python(Error::new(ErrorKind::Usage, message)));
        let exported: Vec<Exported> = arrays.iter().map(Exported::new).collect::<PyResult<_>>()?;
        let mut spans: Vec<(usize, usize)> = Vec::new();
        for Exported { info, buffer } in &exported {
            if buffer.readonly() {
                return usage(format!("target array `{}` is read-only", info.name));
            }
            spans.push((buffer.buf_ptr() as usize, info.len_bytes));
        }
        for tensor in source.into_iter().flat_map(CacheView::tensors) {
            let (start, len) = (tensor.bytes.as_ptr() as usize, tensor.bytes.len());
            if spans.iter().any(|(at, size)| len > 0 && *size > 0 && *at < start + len && start < at + size) {
                return usage(format!(
                    "a target array shares memory with `{}` of the cache",
                    tensor.info.name
                ));
            }
        }
        spans.retain(|(_, len)| *len > 0);
        spans.sort_unstable();
        if spans.windows(2).any(|w| w[0].0 + w[0].1 > w[1].0) {
            return usage("two target arrays share memory".to_owned());
        }
        Ok(Targets(exported))
    }

    /// The arrays' memory. The caller of the Python function has no other access while a fill runs: the arrays
    /// that are handed in have been seen by nobody else.
    pub(crate) fn slices(&mut self) -> Vec<Target<'_>> {
        let target = |exported: &Exported| {
            // SAFETY: the buffer protocol makes `len_bytes` bytes from the first element writable until the buffer is
            // released, which `&mut self` keeps from happening. No two arrays overlap, and none overlaps the source
            // (checked in `new`).
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(exported.start().as_ptr(), exported.info.len_bytes) };
            Target { info: exported.info.clone(), bytes }
        };
        self.0.iter().map(target).collect()
    }
}
