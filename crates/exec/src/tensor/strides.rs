//! Strides: of packed tensors, of the same elements under another shape, and of rows.

use super::count;

pub(crate) fn packed_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// Strides that show `shape` in place of `old`, if there are any.
pub(super) fn reshaped_strides(old: &[usize], old_strides: &[usize], shape: &[usize]) -> Option<Vec<usize>> {
    // Dimensions of size 1 have no say.
    let dims: Vec<(usize, usize)> =
        old.iter().zip(old_strides).filter(|(d, _)| **d != 1).map(|(d, s)| (*d, *s)).collect();
    if count(old) == 0 {
        return Some(packed_strides(shape));
    }
    let mut strides = vec![1; shape.len()];
    let (mut i, mut j) = (0, 0);
    while j < shape.len() {
        if shape[j] == 1 {
            j += 1;
            continue;
        }
        // Groups of old and new dimensions with as many elements.
        let (i0, j0) = (i, j);
        let (mut have, mut want) = (dims[i].0, shape[j]);
        i += 1;
        j += 1;
        while have != want {
            if have < want {
                have *= dims[i].0;
                i += 1;
            } else {
                want *= shape[j];
                j += 1;
            }
        }
        // The old group must be one run with one stride.
        for g in i0..i - 1 {
            if dims[g].1 != dims[g + 1].0 * dims[g + 1].1 {
                return None;
            }
        }
        let mut stride = dims[i - 1].1;
        for g in (j0..j).rev() {
            strides[g] = stride;
            stride *= shape[g];
        }
    }
    Some(strides)
}

/// Stored positions of the rows of a view: its outer dimensions, merged where that is possible.
#[derive(Clone, Debug)]
pub(crate) struct RowOffsets {
    /// Size and stride, innermost first.
    dims: Vec<(usize, usize)>,
    offset: usize,
}

impl RowOffsets {
    pub(crate) fn new(shape: &[usize], strides: &[usize], offset: usize) -> RowOffsets {
        let mut dims: Vec<(usize, usize)> = Vec::new();
        for (d, s) in shape.iter().zip(strides).rev().filter(|(d, _)| **d != 1) {
            match dims.last_mut() {
                Some((size, stride)) if *size * *stride == *s => *size *= d,
                _ => dims.push((*d, *s)),
            }
        }
        RowOffsets { dims, offset }
    }

    pub(crate) fn get(&self, row: usize) -> usize {
        match self.dims.as_slice() {
            [] => self.offset,
            [(_, stride)] => self.offset + row * stride,
            dims => {
                let (mut at, mut rest) = (self.offset, row);
                for (size, stride) in dims {
                    at += rest % size * stride;
                    rest /= size;
                }
                at
            }
        }
    }

    /// The distance of consecutive rows, if it is the same throughout.
    pub(crate) fn stride(&self) -> Option<usize> {
        match self.dims.as_slice() {
            [] => Some(0),
            [(_, stride)] => Some(*stride),
            _ => None,
        }
    }
}
