//! Caches that somebody wrote to a file: tensors by name, laid out as the caller says.

use std::path::Path;
use std::sync::Arc;

use kvbaton_layout::{DType, Layout, LiveRows, ModelSpec, Placement, TensorInfo};
use kvbaton_memory::{Bytes, Mapped};
use safetensors::{Dtype as FileType, SafeTensors};

use crate::{CacheView, Error, ErrorKind, Tensor};

/// Opens a safetensors file as a cache of `model`. The file is mapped; nothing is copied.
///
/// # Errors
///
/// When the file cannot be read, or does not fit the layout, the model or the live rows.
pub fn open_dump(path: &Path, layout: Layout, model: ModelSpec, live: LiveRows) -> Result<CacheView, Error> {
    check_said(&layout, &live)?;
    let unreadable = |why: String| {
        Error::new(ErrorKind::Usage, format!("cannot read the dump `{}`: {why}", path.display()))
    };
    let map = Arc::new(Mapped::open(path).map_err(|e| unreadable(e.source.to_string()))?);
    let file = SafeTensors::deserialize(&map).map_err(|e| unreadable(format!("no safetensors file: {e}")))?;
    let mut tensors = Vec::new();
    for (name, tensor) in file.tensors() {
        let dtype = match tensor.dtype() {
            FileType::F16 => DType::Float16,
            FileType::BF16 => DType::BFloat16,
            FileType::F32 => DType::Float32,
            FileType::I8 => DType::Int8,
            FileType::U32 => DType::UInt32,
            _ => continue,
        };
        let info = TensorInfo::contiguous(name, dtype, tensor.shape());
        let start = tensor.data().as_ptr() as usize - map.as_ptr() as usize;
        let bytes = Bytes::new(Part { map: map.clone(), start, len_bytes: tensor.data().len() });
        tensors.push(Tensor { info, bytes });
    }
    Ok(CacheView::new(layout, model.cache.clone(), tensors, live)?.with_model(Some(model)))
}

/// What is said of rows must be what the layout asks for: it would be passed over, and other slots read.
fn check_said(layout: &Layout, live: &LiveRows) -> Result<(), Error> {
    let said: [(_, _, &[Placement], _); 2] = [
        ("pad", live.pad, &[Placement::LeftPadded], "padded on the left"),
        (
            "ring start",
            live.ring_start,
            &[Placement::RingIndexed, Placement::RingFrom],
            "in a ring with an index",
        ),
    ];
    for (what, value, placements, are) in said {
        if let Some(slot) = value.filter(|&slot| slot > 0 && !layout.places(placements)) {
            let message =
                format!("a {what} of {slot} is for rows that are {are}: layout `{}` has none", layout.name);
            return Err(Error::new(ErrorKind::Usage, message)
                .hint("name a layout that places its rows so, or leave that out")
                .field("layout", layout.name.clone()));
        }
    }
    Ok(())
}

/// A part of a mapped file.
struct Part {
    map: Arc<Mapped>,
    start: usize,
    len_bytes: usize,
}

impl std::ops::Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[self.start..self.start + self.len_bytes]
    }
}
