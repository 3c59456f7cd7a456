//! `select`: `a` where the condition holds, else `b`; all three broadcast.

use super::{Form, Op, Reason, broadcast_shape};
use crate::tensor::{Context, Tensor, is_float};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Select {
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    for name in ["cond", "a", "b"] {
        form.operand(name)?;
    }
    Ok(Box::new(Select { dtype: form.dtype()? }))
}

impl Op for Select {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![broadcast_shape(&broadcast_shape(shapes[1], shapes[2])?, shapes[0])?]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape =
            broadcast_shape(&broadcast_shape(&operands[1].shape, &operands[2].shape)?, &operands[0].shape)?;
        let condition = operands[0].broadcast(&shape)?.bool_values()?;
        let n = condition.len();
        // One value stays one: masks choose between two of them, and a mask is as large as the scores.
        let side = |operand: &Tensor| {
            if operand.count() == 1 { Ok(operand.clone()) } else { operand.broadcast(&shape) }
        };
        let (a, b) = (side(&operands[1])?, side(&operands[2])?);
        let (a_step, b_step) = (usize::from(a.count() > 1), usize::from(b.count() > 1));
        let tensor = if is_float(self.dtype) {
            let (a, b) = (a.float_values(cx.isa)?, b.float_values(cx.isa)?);
            let mut values = cx.pool.take(n);
            for (i, v) in values.iter_mut().enumerate() {
                *v = if condition[i] { a[i * a_step] } else { b[i * b_step] };
            }
            Tensor::floats(self.dtype, shape, values)
        } else if self.dtype == DataType::Bool {
            let (a, b) = (a.bool_values()?, b.bool_values()?);
            let pick = |i: usize| if condition[i] { a[i * a_step] } else { b[i * b_step] };
            Tensor::bools(shape, (0..n).map(pick).collect())
        } else {
            let (a, b) = (a.int_values()?, b.int_values()?);
            let pick = |i: usize| if condition[i] { a[i * a_step] } else { b[i * b_step] };
            Tensor::ints(self.dtype, shape, (0..n).map(pick).collect())
        };
        Ok(vec![tensor])
    }
}
