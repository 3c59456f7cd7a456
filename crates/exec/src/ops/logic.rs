//! `logical_and`, `logical_or`, `logical_xor`, `logical_not`.

use super::{Form, Op, Reason, broadcast_shape};
use crate::tensor::{Context, Tensor};

#[derive(Debug)]
enum Logic {
    Not,
    Of(fn(bool, bool) -> bool),
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let f: fn(bool, bool) -> bool = match form.op.kind.as_str() {
        "logical_and" => |x, y| x && y,
        "logical_or" => |x, y| x || y,
        "logical_xor" => |x, y| x != y,
        _ => return Ok(Box::new(Logic::Not)),
    };
    form.operand("y")?;
    Ok(Box::new(Logic::Of(f)))
}

impl Op for Logic {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![match shapes {
            [x, y] => broadcast_shape(x, y)?,
            _ => shapes[0].to_vec(),
        }]))
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        Ok(vec![match self {
            Logic::Not => {
                let x = operands[0].bool_values()?;
                Tensor::bools(operands[0].shape.clone(), x.into_iter().map(|x| !x).collect())
            }
            Logic::Of(f) => {
                let shape = broadcast_shape(&operands[0].shape, &operands[1].shape)?;
                let x = operands[0].broadcast(&shape)?.bool_values()?;
                let y = operands[1].broadcast(&shape)?.bool_values()?;
                Tensor::bools(shape, x.into_iter().zip(y).map(|(x, y)| f(x, y)).collect())
            }
        }])
    }
}
