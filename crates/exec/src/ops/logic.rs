//! `logical_and`, `logical_or`, `logical_not`.

use super::{Form, Op, Reason, broadcast_shape};
use crate::tensor::{Context, Tensor};

#[derive(Debug)]
enum Logic {
    And,
    Or,
    Not,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let op = match form.op.kind.as_str() {
        "logical_and" => Logic::And,
        "logical_or" => Logic::Or,
        _ => return Ok(Box::new(Logic::Not)),
    };
    form.operand("y")?;
    Ok(Box::new(op))
}

impl Op for Logic {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![match shapes {
            [x, y] => broadcast_shape(x, y)?,
            _ => shapes[0].to_vec(),
        }]))
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape = match operands {
            [x, y] => broadcast_shape(&x.shape, &y.shape)?,
            _ => operands[0].shape.clone(),
        };
        let x = operands[0].broadcast(&shape)?.bool_values()?;
        let values = match self {
            Logic::Not => x.into_iter().map(|x| !x).collect(),
            Logic::And | Logic::Or => {
                let y = operands[1].broadcast(&shape)?.bool_values()?;
                let and = matches!(self, Logic::And);
                x.into_iter().zip(y).map(|(x, y)| if and { x && y } else { x || y }).collect()
            }
        };
        Ok(vec![Tensor::bools(shape, values)])
    }
}
