//! `shape`: a tensor's dimensions as integers.

use super::{Form, Op, Reason};
use crate::tensor::{Context, Tensor};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Shape;

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(Shape))
}

impl Op for Shape {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![vec![shapes[0].len()]]))
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let dims = operands[0].shape.iter().map(|d| i32::try_from(*d).map_err(|e| e.to_string()));
        let dims = dims.collect::<Result<Vec<i32>, Reason>>()?;
        Ok(vec![Tensor::ints(DataType::Int32, vec![dims.len()], dims)])
    }
}
