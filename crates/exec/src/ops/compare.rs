//! `equal`, `not_equal`, `greater`, `greater_equal`, `less`, `less_equal`: two operands, broadcast; truth values.

use super::{Form, Op, Reason, broadcast_shape};
use crate::tensor::{Context, Data, Tensor};

type Relation<T> = fn(T, T) -> bool;

#[derive(Debug)]
struct Compare {
    floats: Relation<f32>,
    ints: Relation<i32>,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("y")?;
    let (floats, ints): (Relation<f32>, Relation<i32>) = match form.op.kind.as_str() {
        "equal" => (|a, b| a == b, |a, b| a == b),
        "not_equal" => (|a, b| a != b, |a, b| a != b),
        "greater" => (|a, b| a > b, |a, b| a > b),
        "greater_equal" => (|a, b| a >= b, |a, b| a >= b),
        "less" => (|a, b| a < b, |a, b| a < b),
        _ => (|a, b| a <= b, |a, b| a <= b),
    };
    Ok(Box::new(Compare { floats, ints }))
}

impl Op for Compare {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![broadcast_shape(shapes[0], shapes[1])?]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape = broadcast_shape(&operands[0].shape, &operands[1].shape)?;
        let (x, y) = (operands[0].broadcast(&shape)?, operands[1].broadcast(&shape)?);
        let values = match (&x.data, &y.data) {
            (Data::Int(_), Data::Int(_)) => {
                x.int_values()?.into_iter().zip(y.int_values()?).map(|(a, b)| (self.ints)(a, b)).collect()
            }
            (Data::Bool(_), Data::Bool(_)) => {
                let pairs = x.bool_values()?.into_iter().zip(y.bool_values()?);
                pairs.map(|(a, b)| (self.ints)(a.into(), b.into())).collect()
            }
            _ => {
                let pairs = x.float_values(cx.isa)?.into_iter().zip(y.float_values(cx.isa)?);
                pairs.map(|(a, b)| (self.floats)(a, b)).collect()
            }
        };
        Ok(vec![Tensor::bools(shape, values)])
    }
}
