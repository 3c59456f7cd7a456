//! `transpose`: dimensions in another order, as a view.

use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Tensor};

#[derive(Debug)]
struct Transpose {
    perm: Vec<i64>,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(Transpose { perm: form.ints("perm")?.ok_or("`perm` is missing")? }))
}

impl Transpose {
    fn order(&self, rank: usize) -> Result<Vec<usize>, Reason> {
        let order = self.perm.iter().map(|p| axis_of(*p, rank)).collect::<Result<Vec<_>, _>>()?;
        let mut sorted = order.clone();
        sorted.sort_unstable();
        if sorted != (0..rank).collect::<Vec<_>>() {
            return Err(format!("perm {:?} of a tensor of rank {rank}", self.perm));
        }
        Ok(order)
    }
}

impl Op for Transpose {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let order = self.order(shapes[0].len())?;
        Ok(Some(vec![order.into_iter().map(|d| shapes[0][d]).collect()]))
    }

    fn views(&self) -> bool {
        true
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        Ok(vec![operands[0].permuted(&self.order(operands[0].rank())?)])
    }
}
