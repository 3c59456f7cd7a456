//! `concat` and `stack`: tensors side by side along one axis, or along a new one.

use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Data, RowOffsets, Tensor, count, is_float};
use crate::tile::Step;
use kvbaton_kernels::rows;
use kvbaton_memory::Buffer;
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Concat {
    axis: i64,
    how: How,
    dtype: DataType,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// One tensor after the other.
    SideBySide,
    /// The first index of every tensor, then the second ones, …
    Interleaved,
    /// Each tensor is one index of a new axis.
    Stacked,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand_list("values")?;
    let axis = form.int("axis")?.ok_or("`axis` is missing")?;
    let how = match (form.op.kind.as_str(), form.flag("interleave")?) {
        ("stack", _) => How::Stacked,
        (_, true) => How::Interleaved,
        (_, false) => How::SideBySide,
    };
    Ok(Box::new(Concat { axis, how, dtype: form.dtype()? }))
}

impl Concat {
    /// The axis and the shape of the result. Scalars are joined to a vector.
    fn shape(&self, shapes: &[&[usize]]) -> Result<(usize, Vec<usize>), Reason> {
        let first = shapes.first().ok_or("no values")?;
        let scalars = first.is_empty() && self.how == How::SideBySide;
        let new = scalars || self.how == How::Stacked;
        let axis = axis_of(self.axis, first.len() + usize::from(new))?;
        let free = if self.how == How::SideBySide { axis } else { usize::MAX };
        for s in shapes {
            let alike = s.len() == first.len() && (0..s.len()).all(|d| d == free || s[d] == first[d]);
            if !alike {
                return Err(format!("shapes {first:?} and {s:?} along axis {axis}"));
            }
        }
        let mut shape = first.to_vec();
        if new {
            shape.insert(axis, shapes.len());
        } else {
            shape[axis] = shapes.iter().map(|s| s[axis]).sum();
        }
        Ok((axis, shape))
    }
}

impl Op for Concat {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![self.shape(shapes)?.1]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shapes: Vec<&[usize]> = operands.iter().map(|t| t.shape.as_slice()).collect();
        let (axis, shape) = self.shape(&shapes)?;
        let total = count(&shape);
        if total == 0 {
            return Ok(vec![super::elements::filled(cx, self.dtype, shape, 0.0)]);
        }
        let side_by_side = self.how == How::SideBySide;
        if side_by_side && self.dtype == DataType::Float16 && axis == 0 && shape.len() > 1 {
            return Ok(vec![stacked(cx, operands, shape)?]);
        }
        // Every operand gives one piece of each round.
        let lead = match self.how {
            How::Interleaved => axis + 1,
            How::SideBySide | How::Stacked => axis,
        };
        let rounds = count(&shapes[0][..lead]);
        if is_float(self.dtype) {
            let mut values = cx.pool.take(total);
            if rounds == 1 {
                let mut rest: &mut [f32] = &mut values;
                for t in operands {
                    let (part, later) = rest.split_at_mut(t.count());
                    t.copy_to(cx.isa, part)?;
                    rest = later;
                }
            } else {
                let (mut at, row) = (0, total / rounds);
                for t in operands {
                    if t.repeats() {
                        // As a packed copy it would be many times what it is, a mask as large as the scores.
                        let starts = RowOffsets::new(&t.shape[..lead], &t.strides[..lead], 0);
                        let width = t.count() / rounds;
                        for o in 0..rounds {
                            let mut one = t.clone();
                            one.offset += starts.get(o);
                            one.shape[..lead].fill(1);
                            one.copy_to(cx.isa, &mut values[o * row + at..][..width])?;
                        }
                        at += width;
                        continue;
                    }
                    let packed = t.to_packed(cx)?;
                    let from = packed.packed_singles().ok_or("not packed")?;
                    let width = t.count() / rounds;
                    for o in 0..rounds {
                        values[o * row + at..][..width].copy_from_slice(&from[o * width..][..width]);
                    }
                    at += width;
                }
            }
            return Ok(vec![Tensor::floats(self.dtype, shape, values)]);
        }
        let ints: Result<Vec<Vec<i32>>, Reason> = operands
            .iter()
            .map(|t| match &t.data {
                Data::Bool(_) => Ok(t.bool_values()?.into_iter().map(i32::from).collect()),
                _ => t.int_values(),
            })
            .collect();
        let ints = ints?;
        let mut values = Vec::with_capacity(total);
        for o in 0..rounds {
            for v in &ints {
                let width = v.len() / rounds;
                values.extend_from_slice(&v[o * width..][..width]);
            }
        }
        Ok(vec![if self.dtype == DataType::Bool {
            Tensor::bools(shape, values.into_iter().map(|v| v != 0).collect())
        } else {
            Tensor::ints(self.dtype, shape, values)
        }])
    }

    fn joins(&self, shapes: &[&[usize]]) -> Option<usize> {
        let joins = is_float(self.dtype) && self.how == How::SideBySide;
        joins.then(|| self.shape(shapes).ok()).flatten().map(|(axis, _)| axis)
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let axis = axis_of(self.axis, shapes.first()?.len()).ok()?;
        let rows = is_float(self.dtype) && self.how == How::SideBySide && axis + 1 == shapes[0].len();
        rows.then(|| vec![Step::Concat])
    }
}

/// Tensors stacked along their outermost axis: how a cache leaves a program, so the result is stored as it leaves.
fn stacked(cx: &Context, operands: &[Tensor], shape: Vec<usize>) -> Result<Tensor, Reason> {
    let mut buffer = Buffer::zeroed(count(&shape) * 2);
    let mut rest = rows::as_halves_mut(&mut buffer).ok_or("the buffer is not aligned")?;
    for t in operands {
        let (part, later) = rest.split_at_mut(t.count());
        let packed = t.to_packed(cx)?;
        crate::exchange::narrow(cx.isa, packed.packed_singles().ok_or("not packed")?, part);
        rest = later;
    }
    Ok(Tensor::halves(shape, buffer))
}
