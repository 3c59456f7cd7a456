//! `concat`: tensors side by side along one axis.

use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Data, Tensor, count, is_float};
use crate::tile::Step;
use kvbaton_kernels::rows;
use kvbaton_memory::Buffer;
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Concat {
    axis: i64,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand_list("values")?;
    if form.flag("interleave")? {
        return Err("with `interleave`".to_owned());
    }
    let axis = form.int("axis")?.ok_or("`axis` is missing")?;
    Ok(Box::new(Concat { axis, dtype: form.dtype()? }))
}

impl Concat {
    fn shape(&self, shapes: &[&[usize]]) -> Result<(usize, Vec<usize>), Reason> {
        let first = shapes.first().ok_or("no values")?;
        let axis = axis_of(self.axis, first.len())?;
        let mut shape = first.to_vec();
        shape[axis] = 0;
        for s in shapes {
            let alike = s.len() == shape.len() && (0..s.len()).all(|d| d == axis || s[d] == shape[d]);
            if !alike {
                return Err(format!("shapes {first:?} and {s:?} along axis {axis}"));
            }
            shape[axis] += s[axis];
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
        let inner = count(&shape[axis + 1..]);
        let outer = count(&shape[..axis]);
        let row = shape[axis] * inner;
        if self.dtype == DataType::Float16 && axis == 0 && shape.len() > 1 {
            return Ok(vec![stacked(cx, operands, shape)?]);
        }
        if is_float(self.dtype) {
            let mut values = cx.pool.take(count(&shape));
            if outer == 1 {
                let mut rest: &mut [f32] = &mut values;
                for t in operands {
                    let (part, later) = rest.split_at_mut(t.count());
                    t.copy_to(cx.isa, part)?;
                    rest = later;
                }
            } else {
                let mut at = 0;
                for t in operands {
                    let packed = t.to_packed(cx)?;
                    let from = packed.packed_singles().ok_or("not packed")?;
                    let width = t.shape[axis] * inner;
                    for o in 0..outer {
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
        let mut values = Vec::with_capacity(count(&shape));
        for o in 0..outer {
            for (t, v) in operands.iter().zip(&ints) {
                let width = t.shape[axis] * inner;
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
        is_float(self.dtype).then(|| self.shape(shapes).ok()).flatten().map(|(axis, _)| axis)
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let axis = axis_of(self.axis, shapes.first()?.len()).ok()?;
        (is_float(self.dtype) && axis + 1 == shapes[0].len()).then(|| vec![Step::Concat])
    }
}

/// Tensors stacked along their outermost axis: how a cache leaves a program, so the result is stored as it leaves.
fn stacked(cx: &Context, operands: &[Tensor], shape: Vec<usize>) -> Result<Tensor, Reason> {
    let mut buffer = Buffer::zeroed(count(&shape) * 2);
    let mut rest = rows::as_halves_mut(&mut buffer).ok_or("the buffer is not aligned")?;
    for t in operands {
        let (part, later) = rest.split_at_mut(t.count());
        let packed = t.to_packed(cx)?;
        crate::executable::narrow(cx.isa, packed.packed_singles().ok_or("not packed")?, part);
        rest = later;
    }
    Ok(Tensor::halves(shape, buffer))
}
