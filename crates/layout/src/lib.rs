//! Where every element of a KV cache sits: named axes, byte strides, row placement, per layer.
//!
//! A [`Layout`] says how a whole model's cache is spread over named tensors. Resolved against a model's
//! [`CacheSpec`], the tensors' shapes and strides and the [`LiveRows`], it becomes a list of [`Block`]s: affine
//! maps from (head, row, lane) to bytes. Source and target are both resolved so, and `kvbaton-plan` intersects
//! the two lists. There are no converters from one system to another: a system is a layout.
//!
//! Nothing here reads or writes a buffer.

#![forbid(unsafe_code)]

mod axes;
mod dtype;
mod error;
mod live;
mod model;
pub mod presets;
mod resolve;
mod rules;

pub use axes::{Axis, AxisPattern, Dimension};
pub use dtype::DType;
pub use error::LayoutError;
pub use live::LiveRows;
pub use model::{CacheSpec, LayerSpec, Mismatch, ModelSpec, RopeScaling, RopeSpec, Window};
pub use resolve::{Block, BoundTensor, Resolved, Sizes, TensorInfo, contiguous_strides};
pub use rules::{
    Encoding, Inputs, LayerSet, Layout, NameTemplate, Outputs, Part, Placement, Role, TensorRule,
};
