//! Results of single operations, shown while a function runs.

use std::ops::Range;

use kvbaton_kernels::rows::Isa;
use kvbaton_mil::program::DataType;
use rayon::prelude::*;

use crate::tensor::{Tensor, is_float};

/// The largest finite fp16 value.
pub const HALF_MAX: f32 = 65504.0;
/// From here on, a value rounds to infinity in fp16.
const BEYOND_HALF: f32 = 65520.0;

/// A result of an operation.
#[derive(Debug)]
pub struct Observed<'a> {
    pub(crate) op: &'a str,
    pub(crate) output: &'a str,
    pub(crate) tensor: &'a Tensor,
    pub(crate) isa: Isa,
}

/// What the values of a result are like.
#[derive(Clone, Debug, PartialEq)]
pub struct Statistics {
    /// Values looked at.
    pub count: usize,
    /// The finite value of the largest magnitude, the first of several; `None` if there is none.
    pub largest: Option<f32>,
    /// Where it is in the result, one index a dimension.
    pub index: Vec<usize>,
    /// Values that are infinite.
    pub infinite: u64,
    /// Values that are no number.
    pub nan: u64,
    /// Finite values that fp16 cannot hold: they would be infinite there.
    pub beyond_half: u64,
}

impl Observed<'_> {
    /// MIL's name of the operation.
    pub fn op(&self) -> &str {
        self.op
    }

    /// The name of the result.
    pub fn output(&self) -> &str {
        self.output
    }

    /// The result's shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    /// The type its values were computed in: the program's, but for fp16 values of a run in `f32`.
    pub fn dtype(&self) -> DataType {
        self.tensor.dtype
    }

    /// The values in order, as `f32`; `None` of integers and truth values.
    pub fn values(&self) -> Option<Vec<f32>> {
        is_float(self.tensor.dtype).then(|| self.tensor.float_values(self.isa).ok()).flatten()
    }

    /// What the values inside `ranges` (one a dimension, cut to the shape) are like; `None` of integers and truth
    /// values.
    pub fn statistics(&self, ranges: &[Range<usize>]) -> Option<Statistics> {
        let mut view = self.tensor.clone();
        let mut starts = vec![0; view.rank()];
        for (d, range) in ranges.iter().enumerate().take(view.rank()) {
            let (start, end) = (range.start.min(view.shape[d]), range.end.min(view.shape[d]));
            view = view.narrowed(d, start, end.saturating_sub(start), 1);
            starts[d] = start;
        }
        if !is_float(view.dtype) {
            return None;
        }
        let found = scan(&view.float_values(self.isa).ok()?);
        let mut index = starts;
        if found.largest.is_some() {
            let mut rest = found.at;
            for (i, d) in index.iter_mut().zip(&view.shape).rev() {
                *i += rest % d;
                rest /= d;
            }
        }
        Some(Statistics {
            count: view.count(),
            largest: found.largest,
            index,
            infinite: found.infinite,
            nan: found.nan,
            beyond_half: found.beyond_half,
        })
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Found {
    largest: Option<f32>,
    at: usize,
    infinite: u64,
    nan: u64,
    beyond_half: u64,
}

fn scan(values: &[f32]) -> Found {
    const CHUNK: usize = 1 << 16;
    let parts = values.par_chunks(CHUNK).enumerate().map(|(c, values)| {
        let mut found = Found::default();
        for (i, x) in values.iter().enumerate() {
            let size = x.abs();
            if size.is_finite() {
                found.beyond_half += u64::from(size >= BEYOND_HALF);
                if found.largest.is_none_or(|l| size > l.abs()) {
                    (found.largest, found.at) = (Some(*x), c * CHUNK + i);
                }
            } else if x.is_nan() {
                found.nan += 1;
            } else {
                found.infinite += 1;
            }
        }
        found
    });
    parts.reduce(Found::default, |a, b| {
        let later = match (a.largest, b.largest) {
            (Some(x), Some(y)) => y.abs() > x.abs() || (y.abs() == x.abs() && b.at < a.at),
            (None, Some(_)) => true,
            _ => false,
        };
        let (largest, at) = if later { (b.largest, b.at) } else { (a.largest, a.at) };
        Found {
            largest,
            at,
            infinite: a.infinite + b.infinite,
            nan: a.nan + b.nan,
            beyond_half: a.beyond_half + b.beyond_half,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::FloatBuf;

    fn observed(shape: &[usize], values: Vec<f32>) -> Tensor {
        Tensor::floats(DataType::Float32, shape.to_vec(), FloatBuf::owned(values))
    }

    fn statistics(tensor: &Tensor, ranges: &[Range<usize>]) -> Statistics {
        let seen = Observed { op: "add", output: "x", tensor, isa: Isa::best() };
        seen.statistics(ranges).expect("floats have statistics")
    }

    #[test]
    fn the_largest_value_has_its_place() {
        let tensor = observed(&[2, 3], vec![1.0, -7.0, 2.0, f32::NAN, 7.0, f32::NEG_INFINITY]);
        let all = statistics(&tensor, &[]);
        assert_eq!((all.largest, all.index), (Some(-7.0), vec![0, 1]));
        assert_eq!((all.count, all.nan, all.infinite, all.beyond_half), (6, 1, 1, 0));
        let part = statistics(&tensor, &[1..9, 1..3]);
        assert_eq!((part.largest, part.index, part.nan), (Some(7.0), vec![1, 1], 0));
    }

    #[test]
    fn values_beyond_fp16_are_those_that_round_to_infinity() {
        let tensor = observed(&[4], vec![65504.0, 65519.0, 65520.0, -1e9]);
        assert_eq!(statistics(&tensor, &[]).beyond_half, 2);
        assert!(half::f16::from_f32(65519.0).is_finite() && half::f16::from_f32(65520.0).is_infinite());
    }

    #[test]
    fn nothing_to_look_at_has_no_largest_value() {
        let tensor = observed(&[2, 2], vec![f32::NAN; 4]);
        assert_eq!(statistics(&tensor, &[]).largest, None);
        assert_eq!(statistics(&tensor, std::slice::from_ref(&(3..5))).count, 0);
    }

    #[test]
    fn chunks_agree_on_the_first_of_equal_values() {
        let mut values = vec![0.0; 200_000];
        (values[70_000], values[199_999]) = (5.0, -5.0);
        assert_eq!(statistics(&observed(&[200_000], values), &[]).index, [70_000]);
    }
}
