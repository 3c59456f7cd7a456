//! Cache views for Python.

use kvbaton::layout::{CacheSpec, LiveRows, Part};
use kvbaton::{CacheView, Error, ErrorKind, OnOverflow, Tensor, layout};
use kvbaton_memory::{Bytes, Foreign};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::{Exported, Named};
use crate::errors::{model, to_python};

/// A cache somewhere in memory.
#[pyclass(frozen, module = "kvbaton._native")]
pub(crate) struct NativeView(pub(crate) CacheView);

/// Reads a layout by preset name or TOML text.
pub(crate) fn read_layout(text: &str) -> PyResult<layout::Layout> {
    let layout = if layout::presets::text(text).is_some() || !text.contains('\n') {
        layout::presets::get(text)
    } else {
        layout::Layout::from_toml(text)
    };
    layout.map_err(|e| to_python(e.into()))
}

pub(crate) fn live_rows(json: &str) -> PyResult<LiveRows> {
    serde_json::from_str(json)
        .map_err(|e| to_python(Error::new(ErrorKind::Usage, format!("the live rows cannot be read: {e}"))))
}

/// What is done with values that a type cannot hold.
pub(crate) fn overflow(name: &str) -> PyResult<OnOverflow> {
    match name {
        "error" => Ok(OnOverflow::Error),
        "clamp" => Ok(OnOverflow::Clamp),
        "count" => Ok(OnOverflow::Count),
        other => {
            let message = format!("on_overflow is `error`, `clamp` or `count`, not `{other}`");
            Err(to_python(Error::new(ErrorKind::Usage, message)))
        }
    }
}

/// What each layer keeps, from JSON.
pub(crate) fn cache_spec(json: &str) -> PyResult<CacheSpec> {
    serde_json::from_str(json)
        .map_err(|e| to_python(Error::new(ErrorKind::Usage, format!("the cache spec cannot be read: {e}"))))
}

/// A part of a layer by its name.
pub(crate) fn part_called(name: &str) -> PyResult<Part> {
    match name {
        "key" => Ok(Part::Key),
        "value" => Ok(Part::Value),
        "conv" => Ok(Part::Conv),
        "state" => Ok(Part::State),
        other => {
            let message = format!("`{other}` is no part of a cache");
            Err(to_python(Error::new(ErrorKind::Usage, message)))
        }
    }
}

#[pymethods]
impl NativeView {
    /// A view of arrays that stay where they are. `cache` and `live` are JSON; without `cache`, sizes are taken
    /// from the shapes where the layout leaves none open.
    #[staticmethod]
    #[pyo3(signature = (arrays, layout, cache, live, tokens=None, model_json=None))]
    fn from_arrays(
        arrays: Vec<Named<'_>>,
        layout: &str,
        cache: Option<&str>,
        live: &str,
        tokens: Option<Vec<u32>>,
        model_json: Option<&str>,
    ) -> PyResult<NativeView> {
        let layout = read_layout(layout)?;
        let mut tensors = Vec::new();
        for array in &arrays {
            let exported = Exported::new(array)?;
            let (start, Exported { info, buffer }) = (exported.start(), exported);
            // SAFETY: the buffer protocol keeps `len_bytes` bytes from its first element readable until the buffer
            // is released, and it is released with the owner. That nobody writes meanwhile is the contract of
            // `CacheView.from_arrays`, stated in its docstring.
            let foreign = unsafe { Foreign::new(start, info.len_bytes, Box::new(buffer)) };
            tensors.push(Tensor { info, bytes: Bytes::new(foreign) });
        }
        let cache: CacheSpec = match cache {
            Some(json) => cache_spec(json)?,
            None => {
                let infos: Vec<_> = tensors.iter().map(|t| t.info.clone()).collect();
                layout.infer_cache(&infos).map_err(|e| to_python(e.into()))?
            }
        };
        let mut view = CacheView::new(layout, cache, tensors, live_rows(live)?).map_err(to_python)?;
        if let Some(json) = model_json {
            view = view.with_model(Some(model(json)?));
        }
        if let Some(tokens) = tokens {
            view = view.with_tokens(tokens);
        }
        Ok(NativeView(view))
    }

    /// Tokens the cache has seen.
    #[getter]
    fn tokens_seen(&self) -> usize {
        self.0.tokens_seen()
    }

    /// Ids of those tokens, where they are known.
    #[getter]
    fn tokens(&self) -> Option<Vec<u32>> {
        self.0.tokens().map(<[u32]>::to_vec)
    }

    /// The layout as TOML.
    #[getter]
    fn layout(&self) -> String {
        self.0.layout().to_toml()
    }

    /// What each layer keeps, as JSON.
    #[getter]
    fn cache(&self) -> String {
        serde_json::to_string(self.0.cache()).unwrap_or_default()
    }

    /// The model's facts as JSON, where they are known.
    #[getter]
    fn model(&self) -> Option<String> {
        self.0.model().and_then(|m| serde_json::to_string(m).ok())
    }

    /// `(name, dtype, shape, byte strides)` of every tensor.
    #[getter]
    fn tensors(&self) -> Vec<(String, &'static str, Vec<usize>, Vec<usize>)> {
        let describe = |t: &Tensor| {
            let i = &t.info;
            (i.name.clone(), i.dtype.name(), i.shape.clone(), i.strides_bytes.clone())
        };
        self.0.tensors().iter().map(describe).collect()
    }

    /// A copy of one part of one layer in canonical order: packed `[kv_head, row, head_dim]` bytes, with the
    /// element type, the shape and the first row's position.
    fn canonical<'py>(
        &self,
        py: Python<'py>,
        layer: usize,
        part: &str,
    ) -> PyResult<(Bound<'py, PyBytes>, &'static str, [usize; 3], i64)> {
        let part = part_called(part)?;
        let (bytes, dtype, shape, first) = self.0.canonical(layer, part).map_err(to_python)?;
        Ok((PyBytes::new(py, &bytes), dtype.name(), shape, first))
    }
}
