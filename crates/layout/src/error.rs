//! What can be wrong with a layout, or with tensors that claim to follow one.

use crate::{Axis, DType, Part};

/// A layout that cannot be read, or that does not fit the tensors, the model or the rows.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name every field")]
pub enum LayoutError {
    #[error("`{name}` is no element type kvbaton knows")]
    UnknownDType { name: String },
    #[error("axes `{pattern}`: {problem}")]
    BadPattern { pattern: String, problem: String },
    #[error("layout `{layout}`: {problem}")]
    BadLayout { layout: String, problem: String },
    #[error("not a layout: {problem}")]
    BadToml { problem: String },
    #[error("layout `{layout}` does not say what the model keeps: {problem}")]
    Open { layout: String, problem: String },
    #[error("no layout is called `{name}`")]
    UnknownLayout { name: String },
    #[error("tensor `{tensor}` of layout `{layout}` is missing; there are: {have}")]
    MissingTensor { layout: String, tensor: String, have: String },
    #[error("tensor `{tensor}` has {have} dimensions, `{pattern}` has {want}")]
    Rank { tensor: String, pattern: String, want: usize, have: usize },
    #[error("tensor `{tensor}`, axis {axis}: the layout needs {want}, the tensor has {have}")]
    AxisSize { tensor: String, axis: String, want: usize, have: usize },
    #[error("tensor `{tensor}` is declared {want}, it holds {have}")]
    DTypeMismatch { tensor: String, want: DType, have: DType },
    #[error("tensor `{tensor}` must hold floats, it holds {have}")]
    NotFloats { tensor: String, have: DType },
    #[error("tensor `{tensor}` reaches byte {end_bytes}, its buffer holds {have_bytes}")]
    OutOfBounds { tensor: String, end_bytes: usize, have_bytes: usize },
    #[error("tensor `{tensor}`: the shape is too large to address")]
    TooLarge { tensor: String },
    #[error("tensor `{tensor}` stacks layers of different {axis}: {first} and {other}")]
    MixedLayers { tensor: String, axis: Axis, first: usize, other: usize },
    #[error("layer {layer}: {want} live rows do not fit the capacity of {capacity}")]
    Capacity { layer: usize, want: usize, capacity: usize },
    #[error("layer {layer}: {problem}")]
    LiveRows { layer: usize, problem: String },
    #[error("layer {layer}: the layout has no tensor for its {part}")]
    Uncovered { layer: usize, part: Part },
}
