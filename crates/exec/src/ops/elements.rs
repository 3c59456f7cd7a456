//! Elements of any type moved about: what gather, pad, stack, reverse and others share.

use kvbaton_kernels::rows::{self, Source};
use kvbaton_mil::program::DataType;

use super::Reason;
use crate::tensor::{Context, Data, Tensor, count};

/// A tensor of `shape`, made of runs of `run` elements of `x`: each from where `starts` says (in `x`'s own order), or
/// of the value `fill` where it says nothing. Both have one type.
pub(super) fn runs(
    cx: &Context,
    x: &Tensor,
    shape: Vec<usize>,
    run: usize,
    fill: f64,
    starts: impl Iterator<Item = Option<usize>>,
) -> Result<Tensor, Reason> {
    // Large fp16 tables are constants, packed, and read in place.
    let x = if x.is_packed() { x.clone() } else { x.to_packed(cx)? };
    let at = x.offset;
    let total = count(&shape);
    if total == 0 {
        return Ok(filled(cx, x.dtype, shape, fill));
    }
    Ok(match &x.data {
        Data::Int(v) =>
        {
            #[expect(clippy::cast_possible_truncation, reason = "the fill value is one of the type")]
            Tensor::ints(x.dtype, shape, collected(v, at, total, run, fill as i32, starts))
        }
        Data::Bool(v) => Tensor::bools(shape, collected(v, at, total, run, fill != 0.0, starts)),
        Data::Compressed(weight) => {
            let mut values = cx.pool.take(total);
            for (out, start) in values.chunks_mut(run).zip(starts) {
                match start {
                    Some(s) => weight.copy_to(cx.isa, s, out),
                    #[expect(clippy::cast_possible_truncation, reason = "the fill value is one of the type")]
                    None => out.fill(fill as f32),
                }
            }
            Tensor::floats(x.dtype, shape, values)
        }
        Data::Float(_) | Data::Weights(_) | Data::Half(_) | Data::Given(_) | Data::State(_) => {
            let mut values = cx.pool.take(total);
            let source = x.source()?;
            for (out, start) in values.chunks_mut(run).zip(starts) {
                match (source, start.map(|s| s + at)) {
                    (Source::Singles(v), Some(s)) => out.copy_from_slice(&v[s..s + run]),
                    (Source::Halves(v), Some(s)) => rows::widen(cx.isa, &v[s..s + run], out),
                    #[expect(clippy::cast_possible_truncation, reason = "the fill value is one of the type")]
                    _ => out.fill(fill as f32),
                }
            }
            Tensor::floats(x.dtype, shape, values)
        }
    })
}

fn collected<T: Copy>(
    values: &[T],
    at: usize,
    total: usize,
    run: usize,
    fill: T,
    starts: impl Iterator<Item = Option<usize>>,
) -> Vec<T> {
    let mut out = Vec::with_capacity(total);
    for start in starts {
        match start {
            Some(s) => out.extend_from_slice(&values[s + at..][..run]),
            None => out.extend(std::iter::repeat_n(fill, run)),
        }
    }
    out
}

/// A tensor of one value.
#[expect(clippy::cast_possible_truncation, reason = "the value is one of the type")]
pub(super) fn filled(cx: &Context, dtype: DataType, shape: Vec<usize>, value: f64) -> Tensor {
    let n = count(&shape);
    match dtype {
        DataType::Bool => Tensor::bools(shape, vec![value != 0.0; n]),
        dtype if crate::tensor::is_float(dtype) => {
            let mut values = cx.pool.take(n);
            values.fill(value as f32);
            Tensor::floats(dtype, shape, values)
        }
        dtype => Tensor::ints(dtype, shape, vec![value as i32; n]),
    }
}

/// Every index of `shape`, the last dimension fastest.
pub(super) fn indices(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> + '_ {
    (0..count(shape)).map(move |mut i| {
        let mut index = vec![0; shape.len()];
        for (d, size) in shape.iter().enumerate().rev() {
            index[d] = i % size;
            i /= size;
        }
        index
    })
}
