//! The same values under another shape: nothing is copied, but by a reshape that strides cannot express.

use super::strides::{packed_strides, reshaped_strides};
use super::{Context, Tensor, count};

impl Tensor {
    /// The same values in another shape of as many elements; copies only when strides forbid a view.
    pub(crate) fn reshaped(&self, cx: &Context, shape: &[usize]) -> Result<Tensor, String> {
        if count(shape) != self.count() {
            return Err(format!("cannot reshape {:?} to {shape:?}", self.shape));
        }
        if let Some(strides) = reshaped_strides(&self.shape, &self.strides, shape) {
            return Ok(Tensor { shape: shape.to_vec(), strides, ..self.clone() });
        }
        let packed = self.to_packed(cx)?;
        Ok(Tensor { shape: shape.to_vec(), strides: packed_strides(shape), ..packed })
    }

    /// The view with its dimensions reordered.
    pub(crate) fn permuted(&self, order: &[usize]) -> Tensor {
        Tensor {
            shape: order.iter().map(|d| self.shape[*d]).collect(),
            strides: order.iter().map(|d| self.strides[*d]).collect(),
            ..self.clone()
        }
    }

    /// `len` indices of dimension `d` from `start` on, each `step`-th.
    pub(crate) fn narrowed(&self, d: usize, start: usize, len: usize, step: usize) -> Tensor {
        let mut view = self.clone();
        view.offset += if len == 0 { 0 } else { start * self.strides[d] };
        view.shape[d] = len;
        view.strides[d] *= step;
        view
    }

    /// The view repeated along dimensions of size 1, and with new outer dimensions, to `shape`.
    pub(crate) fn broadcast(&self, shape: &[usize]) -> Result<Tensor, String> {
        let new = shape.len().checked_sub(self.rank());
        let fits = new.is_some_and(|n| self.shape.iter().zip(&shape[n..]).all(|(a, b)| a == b || *a == 1));
        let Some(new) = new.filter(|_| fits) else {
            return Err(format!("cannot broadcast {:?} to {shape:?}", self.shape));
        };
        let mut strides = vec![0; new];
        strides.extend(self.shape.iter().zip(&self.strides).map(|(d, s)| if *d == 1 { 0 } else { *s }));
        Ok(Tensor { shape: shape.to_vec(), strides, ..self.clone() })
    }
}
