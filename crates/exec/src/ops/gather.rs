//! `gather`, `gather_along_axis`, `gather_nd`: slices of a tensor by their indices; each lookup in an embedding.

use super::elements::{self, indices};
use super::places::Check;
use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Tensor, count, is_float, packed_strides};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Gather {
    kind: Kind,
    check: Check,
    dtype: DataType,
}

#[derive(Debug)]
enum Kind {
    /// Slices along an axis, the first dimensions of both operands going together.
    Slices { axis: i64, batch_dims: i64 },
    /// One element for each index, along an axis.
    AlongAxis { axis: i64 },
    /// Slices named by several indices each, the first dimensions of both operands going together.
    Nd { batch_dims: i64 },
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("indices")?;
    let axis = form.int("axis")?.unwrap_or(0);
    let batch_dims = form.int("batch_dims")?.unwrap_or(0);
    let kind = match form.op.kind.as_str() {
        "gather" => Kind::Slices { axis, batch_dims },
        "gather_along_axis" => Kind::AlongAxis { axis },
        _ => Kind::Nd { batch_dims },
    };
    Ok(Box::new(Gather { kind, check: Check::of(form)?, dtype: form.dtype()? }))
}

/// The number of leading dimensions that both shapes share.
fn batch(batch_dims: i64, x: &[usize], indices: &[usize]) -> Result<usize, Reason> {
    let n = usize::try_from(batch_dims).ok().filter(|n| *n <= x.len().min(indices.len()));
    let n = n.filter(|n| x[..*n] == indices[..*n]);
    n.ok_or_else(|| format!("x {x:?} and indices {indices:?} with batch_dims {batch_dims}"))
}

impl Gather {
    fn shape(&self, x: &[usize], indices: &[usize]) -> Result<Vec<usize>, Reason> {
        match self.kind {
            Kind::Slices { axis, batch_dims } => {
                let (axis, b) = (axis_of(axis, x.len())?, batch(batch_dims, x, indices)?);
                if b > axis {
                    return Err(format!("axis {axis} among {b} batch dimensions"));
                }
                Ok([&x[..axis], &indices[b..], &x[axis + 1..]].concat())
            }
            Kind::AlongAxis { axis } => {
                let axis = axis_of(axis, x.len())?;
                let alike = x.len() == indices.len() && (0..x.len()).all(|d| d == axis || x[d] == indices[d]);
                if alike {
                    Ok(indices.to_vec())
                } else {
                    Err(format!("x {x:?} and indices {indices:?} along axis {axis}"))
                }
            }
            Kind::Nd { batch_dims } => {
                let b = batch(batch_dims, x, indices)?;
                match indices.split_last() {
                    Some((depth, lead)) if b + depth <= x.len() && b <= lead.len() => {
                        Ok([lead, &x[b + depth..]].concat())
                    }
                    _ => Err(format!("x {x:?} and indices {indices:?} with batch_dims {b}")),
                }
            }
        }
    }

    /// Where each run of the result starts in `x`, packed, and how long runs are.
    fn starts(&self, x: &[usize], index: &Tensor) -> Result<(Vec<usize>, usize), Reason> {
        let values = index.int_values()?;
        let strides = packed_strides(x);
        match self.kind {
            Kind::Slices { axis, batch_dims } => {
                let axis = axis_of(axis, x.len())?;
                let b = batch(batch_dims, x, &index.shape)?;
                let places: Result<Vec<usize>, Reason> =
                    values.into_iter().map(|i| self.check.place(i, axis, x[axis])).collect();
                let places = places?;
                let (size, inner) = (x[axis], count(&x[axis + 1..]));
                // Batches, what lies between them and the axis, indices of a batch.
                let (batches, middle) = (count(&x[..b]), count(&x[b..axis]));
                let each = count(&index.shape[b..]);
                let mut starts = Vec::with_capacity(batches * middle * each);
                for o in 0..batches * middle {
                    let of = o / middle.max(1) * each;
                    starts.extend(places[of..of + each].iter().map(|p| (o * size + p) * inner));
                }
                Ok((starts, inner))
            }
            Kind::AlongAxis { axis } => {
                let axis = axis_of(axis, x.len())?;
                let starts = indices(&index.shape).zip(values).map(|(mut at, i)| {
                    at[axis] = self.check.place(i, axis, x[axis])?;
                    Ok(at.iter().zip(&strides).map(|(i, s)| i * s).sum())
                });
                Ok((starts.collect::<Result<_, Reason>>()?, 1))
            }
            Kind::Nd { batch_dims } => {
                let b = batch(batch_dims, x, &index.shape)?;
                let (depth, lead) = index.shape.split_last().ok_or("indices are a scalar")?;
                let starts = indices(lead).enumerate().map(|(row, at)| {
                    let first = at[..b].iter().zip(&strides).map(|(i, s)| i * s).sum::<usize>();
                    (0..*depth).try_fold(first, |sum, d| {
                        let place = self.check.place(values[row * depth + d], b + d, x[b + d])?;
                        Ok(sum + place * strides[b + d])
                    })
                });
                Ok((starts.collect::<Result<_, Reason>>()?, count(&x[b + depth..])))
            }
        }
    }
}

impl Op for Gather {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![self.shape(shapes[0], shapes[1])?]))
    }

    fn takes_compressed(&self, index: usize) -> bool {
        index == 0
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let (x, index) = (&operands[0], &operands[1]);
        let shape = self.shape(&x.shape, &index.shape)?;
        let (starts, run) = self.starts(&x.shape, index)?;
        let result = elements::runs(cx, x, shape, run, 0.0, starts.into_iter().map(Some))?;
        // A table may be wider than the result's type.
        if super::half(self.dtype) && is_float(x.dtype) && x.dtype != DataType::Float16 {
            let mut values = cx.pool.take(result.count());
            result.copy_to(cx.isa, &mut values)?;
            super::round(&mut values, self.dtype);
            return Ok(vec![Tensor::floats(self.dtype, result.shape, values)]);
        }
        Ok(vec![Tensor { dtype: self.dtype, ..result }])
    }
}
