//! `range_1d`: `start`, `start + step`, … below `end`.

use super::{Form, Op, Reason};
use crate::tensor::{Context, Data, Tensor};

#[derive(Debug)]
struct Range;

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    for name in ["start", "end", "step"] {
        form.operand(name)?;
    }
    match form.dtype()? {
        kvbaton_mil::program::DataType::Int32 => Ok(Box::new(Range)),
        dtype => Err(format!("on {dtype} values")),
    }
}

/// A longer range is a mistake, not a mask.
const LIMIT: usize = 1 << 28;

impl Op for Range {
    fn infer(&self, _: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(None)
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let one = |t: &Tensor| match &t.data {
            Data::Int(_) => {
                t.int_values()?.first().map(|v| i64::from(*v)).ok_or_else(|| "no value".to_owned())
            }
            _ => Err("not integers".to_owned()),
        };
        let (start, end, step) = (one(&operands[0])?, one(&operands[1])?, one(&operands[2])?);
        if step == 0 {
            return Err("with step 0".to_owned());
        }
        let mut values = Vec::new();
        let mut v = start;
        while if step > 0 { v < end } else { v > end } {
            if values.len() == LIMIT {
                return Err(format!("from {start} to {end} by {step} has more than {LIMIT} values"));
            }
            values.push(i32::try_from(v).map_err(|e| e.to_string())?);
            v += step;
        }
        Ok(vec![Tensor::ints(kvbaton_mil::program::DataType::Int32, vec![values.len()], values)])
    }
}
