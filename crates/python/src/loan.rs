//! Memory of a cache lent out whole, to a consumer that will write there.

use kvbaton::layout::{DType, Part};
use kvbaton::{Bytes, Error, ErrorKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::to_python;
use crate::view::{NativeView, part_called};

/// Where Metal wants memory to start that it is to take over.
const PAGE_BYTES: usize = 16_384;

/// Keys or values of one layer, `[1, kv_head, row, head_dim]` in float16, where their producer left them. As long as
/// it lives, the producer does not get its buffer back, nor before a barrier after that.
#[pyclass(frozen, module = "kvbaton._native")]
pub(crate) struct NativeLoan {
    bytes: Bytes,
    offset: usize,
    shape: [usize; 4],
}

#[pymethods]
impl NativeLoan {
    /// The address of the first element.
    #[getter]
    fn address(&self) -> usize {
        self.bytes.as_ptr() as usize + self.offset
    }

    /// Rows that it can hold.
    #[getter]
    fn capacity(&self) -> usize {
        self.shape[2]
    }

    /// What numpy makes an array of without copying.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", "<f2")?;
        interface.set_item("shape", (self.shape[0], self.shape[1], self.shape[2], self.shape[3]))?;
        interface.set_item("data", (self.address(), false))?;
        Ok(interface)
    }
}

/// Lends `wanted`, pairs of a layer and `key` or `value`, out of a view that nobody else holds a part of. The view must
/// not be read afterwards.
///
/// Raises `UsageError`, with what speaks against it, unless every one of them is packed float16, starts on a page, and
/// has more than `rows` rows.
#[pyfunction]
pub(crate) fn view_lend(
    view: &NativeView,
    wanted: Vec<(usize, String)>,
    rows: usize,
) -> PyResult<Vec<NativeLoan>> {
    let named = wanted.into_iter().map(|(layer, name)| Ok((layer, part_called(&name)?)));
    let wanted = named.collect::<PyResult<Vec<_>>>()?;
    lend(view, &wanted, rows).map_err(to_python)
}

fn lend(view: &NativeView, wanted: &[(usize, Part)], rows: usize) -> Result<Vec<NativeLoan>, Error> {
    let refuse = |because: String| Err(Error::new(ErrorKind::Usage, because));
    if let Some(shared) = view.0.tensors().iter().find(|t| t.bytes.handles() > 1) {
        return refuse(format!("`{}` is held by another view too", shared.info.name));
    }
    let resolved = view.0.resolve()?;
    let mut loans = Vec::new();
    for (layer, part) in wanted {
        let place = format!("the {}s of layer {layer}", if *part == Part::Key { "key" } else { "value" });
        let mut blocks = resolved.blocks.iter().filter(|b| b.layer == *layer && b.part == *part);
        let (Some(block), None) = (blocks.next(), blocks.next()) else {
            return refuse(format!("{place} do not lie in one piece"));
        };
        let [heads, _, lanes] = block.extents();
        let [by_head, by_row, by_lane] = block.strides_bytes;
        let row_bytes = lanes * 2;
        if block.dtype != DType::Float16 || by_lane != 2 || by_row != row_bytes {
            return refuse(format!("{place} are not packed float16"));
        }
        let bytes = view.0.tensors()[block.tensor].bytes.clone();
        let capacity = by_head / by_row.max(1);
        if by_head == 0 || !by_head.is_multiple_of(by_row) || !block.offset_bytes.is_multiple_of(by_head) {
            return refuse(format!("{place} do not start with the first row of their buffer"));
        }
        if capacity <= rows {
            return refuse(format!("{place} have {capacity} rows, {rows} and one more are needed"));
        }
        if block.offset_bytes + heads * capacity * row_bytes > bytes.len() {
            return refuse(format!("{place} reach beyond their buffer"));
        }
        let loan = NativeLoan { bytes, offset: block.offset_bytes, shape: [1, heads, capacity, lanes] };
        if !loan.address().is_multiple_of(PAGE_BYTES) {
            return refuse(format!("{place} start {} bytes into a page", loan.address() % PAGE_BYTES));
        }
        loans.push(loan);
    }
    for loan in &loans {
        loan.bytes.leave_unsettled();
    }
    Ok(loans)
}
