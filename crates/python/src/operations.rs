//! What a cache view can become: shorter, of another type, quantised, or tensors of another layout.

use kvbaton::layout::{DType, Sizes};
use kvbaton::{Error, ErrorKind, HandoffOptions, HandoffReport, Memcpy, Threads, Wanted, hand_off_to};
use pyo3::prelude::*;

use crate::arrays::{Named, Targets};
use crate::errors::to_python;
use crate::view::{NativeView, cache_spec, live_rows, overflow, part_called, read_layout};

/// Adds the functions to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(view_prefix, module)?)?;
    module.add_function(wrap_pyfunction!(view_trim, module)?)?;
    module.add_function(wrap_pyfunction!(view_cast, module)?)?;
    module.add_function(wrap_pyfunction!(view_quantize, module)?)?;
    module.add_function(wrap_pyfunction!(view_scan, module)?)?;
    module.add_function(wrap_pyfunction!(view_rows, module)?)?;
    module.add_function(wrap_pyfunction!(view_encoding, module)?)?;
    module.add_function(wrap_pyfunction!(view_fill, module)?)?;
    module.add_function(wrap_pyfunction!(memcpy_seconds, module)?)?;
    module.add_function(wrap_pyfunction!(layout_tensors, module)?)
}

pub(crate) fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|e| pyo3::exceptions::PyRuntimeError::new_err(e.to_string()))
}

fn dtype(name: &str) -> PyResult<DType> {
    name.parse().map_err(|e: kvbaton::layout::LayoutError| to_python(e.into()))
}

/// The view as it was after its first `tokens` tokens.
#[pyfunction]
fn view_prefix(view: &NativeView, tokens: usize) -> PyResult<NativeView> {
    view.0.prefix(tokens).map(NativeView).map_err(to_python)
}

/// The view without its last `tokens` tokens.
#[pyfunction]
fn view_trim(view: &NativeView, tokens: usize) -> PyResult<NativeView> {
    view.0.trim(tokens).map(NativeView).map_err(to_python)
}

/// A copy of another element type, and how many values did not fit.
#[pyfunction]
fn view_cast(
    py: Python<'_>,
    view: &NativeView,
    dtype_name: &str,
    on_overflow: &str,
) -> PyResult<(NativeView, u64)> {
    let (dtype, on_overflow) = (dtype(dtype_name)?, overflow(on_overflow)?);
    let done = py.detach(|| view.0.cast(dtype, on_overflow, &Threads::new(0)));
    let (copy, stats) = done.map_err(to_python)?;
    Ok((NativeView(copy), stats.overflow))
}

/// A copy with keys and values of full layers in affine codes.
#[pyfunction]
fn view_quantize(py: Python<'_>, view: &NativeView, bits: u8, group_size: usize) -> PyResult<NativeView> {
    let done = py.detach(|| view.0.quantize(bits, group_size, &Threads::new(0)));
    done.map(|(copy, _)| NativeView(copy)).map_err(to_python)
}

/// Unusual values, as JSON.
#[pyfunction]
fn view_scan(py: Python<'_>, view: &NativeView, dtype_name: &str, limit: usize) -> PyResult<String> {
    let dtype = dtype(dtype_name)?;
    json(&py.detach(|| view.0.scan(dtype, limit)).map_err(to_python)?)
}

/// Runs of positions, `(first, end)`, of one part of one layer.
#[pyfunction]
fn view_rows(view: &NativeView, layer: usize, part: &str) -> PyResult<Vec<(i64, i64)>> {
    let runs = view.0.rows(layer, part_called(part)?).map_err(to_python)?;
    Ok(runs.into_iter().map(|r| (r.start, r.end)).collect())
}

/// How the rows of a layer are encoded.
#[pyfunction]
fn view_encoding(view: &NativeView, layer: usize) -> PyResult<String> {
    view.0.encoding(layer).map(|e| e.to_string()).map_err(to_python)
}

/// Fills `targets`, which are laid out as `layout` and keep what `cache` says: the view's layers when absent. With
/// `rows`, only those positions are copied, but all of the layers `whole`. `fresh` targets hold nothing yet. Returns the
/// report as JSON; `seconds` in it are those of planning and filling.
#[pyfunction]
#[pyo3(signature = (view, targets, layout, live, cache=None, rows=None, whole=Vec::new(), on_overflow="error", threads=0, fresh=false))]
#[expect(clippy::too_many_arguments, reason = "Python calls it with keywords")]
fn view_fill(
    py: Python<'_>,
    view: &NativeView,
    targets: Vec<Named<'_>>,
    layout: &str,
    live: &str,
    cache: Option<&str>,
    rows: Option<(i64, i64)>,
    whole: Vec<usize>,
    on_overflow: &str,
    threads: usize,
    fresh: bool,
) -> PyResult<String> {
    let (layout, live) = (read_layout(layout)?, live_rows(live)?);
    let cache = cache.map_or_else(|| Ok(view.0.cache().clone()), cache_spec)?;
    let options = HandoffOptions { on_overflow: overflow(on_overflow)?, fresh };
    let rows = rows.map(|(first, end)| first..end);
    let mut targets = Targets::new(&targets, Some(&view.0))?;
    let mut slices = targets.slices();
    let wanted = Wanted { layout: &layout, cache: &cache, live: &live, rows, whole: &whole };
    let count = wanted.rows.as_ref().map(|r| usize::try_from(r.end - r.start).unwrap_or(0));
    let done = py.detach(|| hand_off_to(&view.0, &wanted, &mut slices, &Threads::new(threads), options));
    let rows = count.unwrap_or(live.tokens_seen);
    json(&HandoffReport::of_fill(&done.map_err(to_python)?, rows))
}

/// Seconds of a memcpy that moves as many bytes, read and written, on the same threads: the middle one of three, into
/// memory that was touched before, or (`cold`) was not.
#[pyfunction]
#[pyo3(signature = (bytes_moved, threads=0, cold=false))]
fn memcpy_seconds(py: Python<'_>, bytes_moved: usize, threads: usize, cold: bool) -> f64 {
    py.detach(|| {
        let threads = Threads::new(threads);
        let mut memcpy = Memcpy::new(bytes_moved / 2);
        memcpy.seconds(&threads);
        let mut once = || if cold { memcpy.cold_seconds(&threads) } else { memcpy.seconds(&threads) };
        let mut seconds = [once(), once(), once()];
        seconds.sort_by(f64::total_cmp);
        seconds[1]
    })
}

/// Name, type, shape, byte strides and bytes of the tensors that a layout wants.
#[pyfunction]
#[pyo3(signature = (layout, cache, capacity, dtype_name, block_rows=None, row_stride_bytes=None))]
#[expect(clippy::type_complexity, reason = "a tuple becomes a Python tuple")]
fn layout_tensors(
    layout: &str,
    cache: &str,
    capacity: usize,
    dtype_name: &str,
    block_rows: Option<usize>,
    row_stride_bytes: Option<usize>,
) -> PyResult<Vec<(String, &'static str, Vec<usize>, Vec<usize>, usize)>> {
    let dtype = dtype(dtype_name)?;
    let block_rows = block_rows.unwrap_or(16);
    if block_rows == 0 {
        return Err(to_python(Error::new(ErrorKind::Usage, "a block of 0 rows holds nothing")));
    }
    let sizes = Sizes { capacity, dtype, block_rows, row_stride_bytes };
    let infos = read_layout(layout)?.tensors(&cache_spec(cache)?, &sizes).map_err(|e| to_python(e.into()))?;
    Ok(infos.into_iter().map(|i| (i.name, i.dtype.name(), i.shape, i.strides_bytes, i.len_bytes)).collect())
}
