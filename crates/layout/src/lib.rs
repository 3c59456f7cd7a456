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
mod bind;
mod dtype;
mod encoding;
mod error;
mod infer;
mod live;
mod model;
mod names;
mod placement;
pub mod presets;
mod resolve;
mod rules;
mod shapes;
mod tensor;

pub use axes::{Axis, AxisPattern, Dimension};
pub use dtype::DType;
pub use encoding::{Encoding, Role};
pub use error::LayoutError;
pub use live::{LayerRows, LiveRows};
pub use model::{CacheSpec, LayerSpec, Mismatch, ModelSpec, RopeScaling, RopeSpec, Window};
pub use names::NameTemplate;
pub use placement::Placement;
pub use resolve::{Block, BoundTensor, Resolved};
pub use rules::{Inputs, LayerSet, Layout, Outputs, Part, TensorRule};
pub use shapes::Sizes;
pub use tensor::{TensorInfo, contiguous_strides};
