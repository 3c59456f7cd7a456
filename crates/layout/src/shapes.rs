//! The tensors that a layout wants.

use crate::bind::{Bound, RuleTensor};
use crate::live::LiveRows;
use crate::{Axis, CacheSpec, DType, LayerSpec, Layout, LayoutError, Placement, TensorInfo};

/// Sizes that a layout leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Slots of a layer that keeps the whole context.
    pub capacity: usize,
    /// Element type where a rule names none.
    pub dtype: DType,
    /// Slots of a block, for paged layouts.
    pub block_rows: usize,
    /// Bytes from one innermost line to the next; packed when absent.
    pub row_stride_bytes: Option<usize>,
}

impl Layout {
    /// The tensors this layout wants for a model, packed unless `sizes` pads them.
    ///
    /// # Errors
    ///
    /// When a rule does not fit the model.
    pub fn tensors(&self, cache: &CacheSpec, sizes: &Sizes) -> Result<Vec<TensorInfo>, LayoutError> {
        let mut tensors: Vec<TensorInfo> = Vec::new();
        for rule in &self.tensors {
            let bound = Bound::new(self, rule, cache)?;
            for tensor in bound.tensors(|_, rest| Ok(rest.len()))? {
                tensors.push(packed(&bound, tensor, sizes)?);
            }
        }
        Ok(tensors)
    }

    /// The names of the tensors this layout reads or writes for a model. Where shapes decide how layers are
    /// grouped, as many as there can be.
    ///
    /// # Errors
    ///
    /// When a rule names a layer that the model does not have.
    pub fn tensor_names(&self, cache: &CacheSpec) -> Result<Vec<String>, LayoutError> {
        let mut names = Vec::new();
        for rule in &self.tensors {
            let bound = Bound::new(self, rule, cache)?;
            names.extend(bound.tensors(|_, _| Ok(1))?.into_iter().map(|t| t.name));
        }
        Ok(names)
    }
}

/// A packed tensor of a rule.
fn packed(bound: &Bound<'_>, tensor: RuleTensor, sizes: &Sizes) -> Result<TensorInfo, LayoutError> {
    let RuleTensor { name, layers, parts, .. } = tensor;
    let stacked = &bound.layers[layers];
    let dtype = bound.rule.element_type().unwrap_or(sizes.dtype);
    let mut info = TensorInfo::contiguous(name, dtype, &[]);
    for dimension in bound.rule.axes.dimensions() {
        let mut size = 1usize;
        for &axis in &dimension.0 {
            let of_axis = match axis {
                Axis::Row => stacked.iter().map(|&l| slots(bound, &bound.cache.layers[l], sizes)).max(),
                Axis::Block if bound.rule.axes.has(Axis::Row) => {
                    Some(sizes.capacity.div_ceil(sizes.block_rows.max(1)))
                }
                Axis::Block => Some(sizes.capacity),
                _ => bound.axis_size(axis, stacked, parts, &LiveRows::default(), &info.name)?,
            };
            size = size
                .checked_mul(of_axis.unwrap_or(1))
                .ok_or_else(|| LayoutError::TooLarge { tensor: info.name.clone() })?;
        }
        info.shape.push(size);
    }
    let too_large = || LayoutError::TooLarge { tensor: info.name.clone() };
    let mut stride = dtype.size_bytes();
    let mut strides = Vec::new();
    for (i, &size) in info.shape.iter().rev().enumerate() {
        strides.push(stride);
        stride = stride.checked_mul(size.max(1)).ok_or_else(too_large)?;
        if let (0, Some(pitch)) = (i, sizes.row_stride_bytes) {
            if pitch < stride || pitch % dtype.size_bytes() != 0 {
                return Err(bound.problem(format!(
                    "a row stride of {pitch} bytes does not hold the {stride} bytes of a row of tensor `{}`",
                    info.name
                )));
            }
            stride = pitch;
        }
    }
    strides.reverse();
    let len_bytes = if info.shape.contains(&0) { 0 } else { stride };
    Ok(TensorInfo { strides_bytes: strides, len_bytes, ..info })
}

/// Slots along the row axis for a layer.
fn slots(bound: &Bound<'_>, spec: &LayerSpec, sizes: &Sizes) -> usize {
    let needed = match spec {
        LayerSpec::Recurrent { conv_steps, .. } => *conv_steps,
        LayerSpec::Sliding { window, .. } => match bound.placement(spec) {
            // A window that moves has its own size; one that does not holds the whole context.
            Placement::Right | Placement::Ring | Placement::RingIndexed | Placement::RingFrom => window.size,
            Placement::Left | Placement::LeftPadded => sizes.capacity,
            Placement::Paged => sizes.block_rows,
        },
        _ if bound.rule.axes.has(Axis::Block) => sizes.block_rows,
        _ => sizes.capacity,
    };
    needed.saturating_add(bound.rule.extra_rows)
}
