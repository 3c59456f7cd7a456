//! `gather`: slices along one axis, by index. Negative indices count from the end.

use half::f16;
use kvbaton_kernels::rows::{self, Source};
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Data, Tensor, count, is_float};

#[derive(Debug)]
struct Gather {
    axis: i64,
    batch_dims: i64,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("indices")?;
    let axis = form.int("axis")?.unwrap_or(0);
    let batch_dims = form.int("batch_dims")?.unwrap_or(0);
    if batch_dims != 0 {
        return Err(format!("with batch_dims {batch_dims}"));
    }
    Ok(Box::new(Gather { axis, batch_dims, dtype: form.dtype()? }))
}

impl Gather {
    fn shape(&self, x: &[usize], indices: &[usize]) -> Result<(usize, Vec<usize>), Reason> {
        debug_assert_eq!(self.batch_dims, 0, "refused in build");
        let axis = axis_of(self.axis, x.len())?;
        Ok((axis, [&x[..axis], indices, &x[axis + 1..]].concat()))
    }
}

impl Op for Gather {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![self.shape(shapes[0], shapes[1])?.1]))
    }

    fn takes_compressed(&self, index: usize) -> bool {
        index == 0
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let (x, indices) = (&operands[0], &operands[1]);
        let (axis, shape) = self.shape(&x.shape, &indices.shape)?;
        let size = x.shape[axis];
        let positions: Result<Vec<usize>, Reason> = indices
            .int_values()?
            .into_iter()
            .map(|i| {
                let wide = i64::from(i);
                let at = if wide < 0 { wide + i64::try_from(size).unwrap_or(i64::MAX) } else { wide };
                let at = usize::try_from(at).ok().filter(|at| *at < size);
                at.ok_or_else(|| format!("index {i} along axis {axis} of size {size}"))
            })
            .collect();
        let positions = positions?;
        // Large fp16 tables are constants, packed, and read in place.
        let x = if x.is_packed() { x.clone() } else { x.to_packed(cx)? };
        let inner = count(&x.shape[axis + 1..]);
        let outer = count(&x.shape[..axis]);
        let starts = (0..outer).flat_map(|o| positions.iter().map(move |p| (o * size + p) * inner));
        let starts = starts.map(|s| s + x.offset);
        if let Data::Compressed(weight) = &x.data {
            let mut values = cx.pool.take(count(&shape));
            for (out, at) in values.chunks_mut(inner.max(1)).zip(starts) {
                weight.copy_to(cx.isa, at, out);
            }
            if super::half(self.dtype) && x.dtype != DataType::Float16 {
                values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32());
            }
            return Ok(vec![Tensor::floats(self.dtype, shape, values)]);
        }
        if is_float(self.dtype) {
            let mut values = cx.pool.take(count(&shape));
            let source = x.source()?;
            for (out, at) in values.chunks_mut(inner.max(1)).zip(starts) {
                match source {
                    Source::Singles(v) => out.copy_from_slice(&v[at..at + inner]),
                    Source::Halves(v) => rows::widen(cx.isa, &v[at..at + inner], out),
                    Source::Scalar(_) | Source::Destination => {}
                }
            }
            // A table may be wider than the result's type.
            if super::half(self.dtype) && x.dtype != DataType::Float16 {
                values.iter_mut().for_each(|v| *v = f16::from_f32(*v).to_f32());
            }
            return Ok(vec![Tensor::floats(self.dtype, shape, values)]);
        }
        Ok(vec![match &x.data {
            Data::Int(v) => {
                Tensor::ints(self.dtype, shape, starts.flat_map(|at| v[at..at + inner].to_vec()).collect())
            }
            Data::Bool(v) => Tensor::bools(shape, starts.flat_map(|at| v[at..at + inner].to_vec()).collect()),
            _ => return Err(format!("{} from a table of {}", self.dtype, x.dtype)),
        }])
    }
}
