//! Which block of a tensor an element belongs to.

use std::ops::Range;

use crate::tensor::packed_strides;

/// A tensor cut into equal blocks, each with a parameter of its own. Dimensions are merged where blocks allow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    /// Sizes and blocks of the outer dimensions: `(size, elements of a block, parameters from one block to the next)`.
    outer: Vec<(usize, usize, usize)>,
    /// Size of the last dimension.
    row: usize,
    /// Elements of a block along it.
    block: usize,
}

/// Elements of one row that lie in consecutive blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Where they are in the run that was asked for.
    pub(crate) at: Range<usize>,
    /// The parameter of the first one's block.
    pub(crate) parameter: usize,
    /// Elements of that block before the first one.
    pub(crate) skip: usize,
}

impl Grid {
    /// `coarse` blocks along the dimensions of `shape`.
    ///
    /// # Errors
    ///
    /// When they do not divide it.
    pub(crate) fn new(shape: &[usize], coarse: &[usize]) -> Result<Grid, String> {
        let divides = shape.len() == coarse.len()
            && shape.iter().zip(coarse).all(|(d, c)| *c > 0 && d.is_multiple_of(*c));
        if !divides {
            return Err(format!("blocks {coarse:?} of a tensor of shape {shape:?}"));
        }
        let mut merged: Vec<(usize, usize)> = vec![];
        for (d, c) in shape.iter().copied().zip(coarse.iter().copied()) {
            match merged.last_mut() {
                // One block along the inner dimension, or one element a block along the outer one.
                Some((size, blocks)) if c == 1 || *blocks == *size => {
                    *size *= d;
                    *blocks *= c;
                }
                _ => merged.push((d, c)),
            }
        }
        let (row, blocks) = merged.pop().unwrap_or((1, 1));
        let counts: Vec<usize> = merged.iter().map(|(_, c)| *c).chain([blocks]).collect();
        let steps = packed_strides(&counts);
        let outer = merged.iter().zip(steps).map(|((d, c), step)| (*d, (d / c).max(1), step)).collect();
        Ok(Grid { outer, row, block: (row / blocks).max(1) })
    }

    /// Elements of a block along a row.
    pub(crate) fn block(&self) -> usize {
        self.block
    }

    /// The segments of elements `start..start + len`, in order.
    pub(crate) fn segments(&self, start: usize, len: usize) -> impl Iterator<Item = Segment> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            if at >= len {
                return None;
            }
            let (mut row, column) = ((start + at) / self.row, (start + at) % self.row);
            let mut parameter = column / self.block;
            for (size, block, step) in self.outer.iter().rev() {
                parameter += row % size / block * step;
                row /= size;
            }
            let n = (self.row - column).min(len - at);
            at += n;
            Some(Segment { at: at - n..at, parameter, skip: column % self.block })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The parameter of every element, from the definition.
    fn definition(shape: &[usize], coarse: &[usize]) -> Vec<usize> {
        let mut places = vec![0];
        for ((d, c), stride) in shape.iter().zip(coarse).zip(packed_strides(coarse)) {
            places =
                places.into_iter().flat_map(|p| (0..*d).map(move |i| p + i / (d / c) * stride)).collect();
        }
        places
    }

    #[test]
    fn segments_equal_the_definition_of_blocks() {
        let cases: &[(&[usize], &[usize])] = &[
            (&[2, 4], &[2, 2]),
            (&[2, 4], &[1, 1]),
            (&[2, 4], &[1, 4]),
            (&[6, 8], &[3, 2]),
            (&[4, 3, 6], &[2, 3, 2]),
            (&[4, 6, 1, 1], &[2, 1, 1, 1]),
            (&[4, 6, 3, 3], &[4, 6, 1, 1]),
            (&[4, 6, 3, 3], &[2, 2, 1, 3]),
            (&[5], &[5]),
            (&[], &[]),
        ];
        for (shape, coarse) in cases {
            let grid = Grid::new(shape, coarse).unwrap();
            let want = definition(shape, coarse);
            for start in 0..want.len() {
                for len in 0..=want.len() - start {
                    let mut got = Vec::new();
                    for s in grid.segments(start, len) {
                        assert_eq!(s.at.start, got.len());
                        got.extend((0..s.at.len()).map(|i| s.parameter + (s.skip + i) / grid.block()));
                    }
                    assert_eq!(got, want[start..start + len], "{shape:?} {coarse:?} {start} {len}");
                }
            }
        }
    }

    #[test]
    fn blocks_that_do_not_divide_are_refused() {
        assert_eq!(Grid::new(&[3, 4], &[2, 2]).unwrap_err(), "blocks [2, 2] of a tensor of shape [3, 4]");
        assert!(Grid::new(&[3, 4], &[3]).is_err());
        assert!(Grid::new(&[3, 4], &[0, 1]).is_err());
    }
}
