//! `softmax` along one axis.

use super::{Form, Op, Reason, axis_of, half};
use crate::tensor::{Context, Tensor};
use crate::tile::{self, Step};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Softmax {
    axis: i64,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(Softmax { axis: form.int("axis")?.unwrap_or(-1), dtype: form.float_dtype()? }))
}

/// A softmax along `axis`.
pub(super) fn softmax(axis: i64, dtype: DataType) -> impl Op {
    Softmax { axis, dtype }
}

impl Op for Softmax {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        axis_of(self.axis, shapes[0].len())?;
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let rank = operands[0].rank();
        let axis = axis_of(self.axis, rank)?;
        // The axis goes last and comes back.
        let mut order: Vec<usize> = (0..rank).collect();
        order.swap(axis, rank - 1);
        let x = operands[0].permuted(&order);
        let (lead, len) = super::split_last(&x.shape);
        let values = tile::single(
            cx,
            Step::Softmax { half: half(self.dtype) },
            std::slice::from_ref(&x),
            &[len],
            lead,
            len,
        )?;
        Ok(vec![Tensor::floats(self.dtype, x.shape, values).permuted(&order)])
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let axis = axis_of(self.axis, shapes[0].len()).ok()?;
        (axis + 1 == shapes[0].len()).then(|| vec![Step::Softmax { half: half(self.dtype) }])
    }
}
