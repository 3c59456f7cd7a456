//! Tensors as their producers describe them.

use crate::DType;

/// A tensor as its producer describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name. Of several packages (or managers) that use the same names, `package/tensor`.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Elements along each dimension, outermost first.
    pub shape: Vec<usize>,
    /// Bytes from one element to the next along each dimension. 0 repeats; more than packed is padding.
    pub strides_bytes: Vec<usize>,
    /// Bytes that may be accessed from the first element on.
    pub len_bytes: usize,
}

impl TensorInfo {
    /// A packed row-major tensor.
    pub fn contiguous(name: impl Into<String>, dtype: DType, shape: &[usize]) -> TensorInfo {
        let strides_bytes = contiguous_strides(shape, dtype);
        let len_bytes = shape.iter().product::<usize>() * dtype.size_bytes();
        TensorInfo { name: name.into(), dtype, shape: shape.to_vec(), strides_bytes, len_bytes }
    }

    /// Whether distinct elements have distinct bytes: every stride steps over all that lies below it.
    pub(crate) fn is_injective(&self) -> bool {
        let mut axes: smallvec::SmallVec<[(usize, usize); 6]> = self
            .shape
            .iter()
            .zip(&self.strides_bytes)
            .filter(|(n, _)| **n > 1)
            .map(|(n, s)| (*s, *n))
            .collect();
        axes.sort_unstable();
        let mut span = self.dtype.size_bytes();
        axes.into_iter().all(|(stride, n)| {
            let clear = stride >= span;
            span = stride.saturating_mul(n - 1).saturating_add(span);
            clear
        })
    }
}

/// Byte strides of a packed row-major tensor.
pub fn contiguous_strides(shape: &[usize], dtype: DType) -> Vec<usize> {
    let mut strides = vec![dtype.size_bytes(); shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i].max(1);
    }
    strides
}
