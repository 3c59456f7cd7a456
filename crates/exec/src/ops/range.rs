//! `range_1d`: `start`, `start + step`, … below `end`.

use super::{Form, Op, Reason, half};
use crate::tensor::{Context, Tensor, is_float};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Range {
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    for name in ["start", "end", "step"] {
        form.operand(name)?;
    }
    let dtype = form.dtype()?;
    if is_float(dtype) || dtype == DataType::Int32 {
        Ok(Box::new(Range { dtype }))
    } else {
        Err(format!("on {dtype} values"))
    }
}

/// A longer range is a mistake, not a mask.
const LIMIT: usize = 1 << 28;

impl Range {
    /// One operand, exactly.
    fn bound(&self, cx: &Context, tensor: &Tensor) -> Result<f64, Reason> {
        let value = if is_float(self.dtype) {
            tensor.float_values(cx.isa)?.first().copied().map(f64::from)
        } else {
            tensor.int_values()?.first().copied().map(f64::from)
        };
        value.ok_or_else(|| "no value".to_owned())
    }
}

impl Op for Range {
    fn infer(&self, _: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(None)
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let bound = |i: usize| self.bound(cx, &operands[i]);
        let (start, end, step) = (bound(0)?, bound(1)?, bound(2)?);
        // As numpy counts: one value for every whole or begun step. Exact for integers of 32 bits.
        let number = ((end - start) / step).ceil();
        if !number.is_finite() {
            return Err(format!("from {start} to {end} by {step}"));
        }
        #[expect(clippy::cast_precision_loss, reason = "a power of two")]
        if number > LIMIT as f64 {
            return Err(format!("from {start} to {end} by {step} has more than {LIMIT} values"));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and the limit"
        )]
        let number = number.max(0.0) as usize;
        #[expect(clippy::cast_precision_loss, reason = "below the limit")]
        let value = |i: usize| start + i as f64 * step;
        #[expect(clippy::cast_possible_truncation, reason = "between start and end, of the type")]
        if is_float(self.dtype) {
            let mut values = cx.pool.take(number);
            for (i, v) in values.iter_mut().enumerate() {
                *v = value(i) as f32;
                if half(self.dtype) {
                    *v = half::f16::from_f32(*v).to_f32();
                }
            }
            Ok(vec![Tensor::floats(self.dtype, vec![number], values)])
        } else {
            let values = (0..number).map(|i| value(i) as i32).collect();
            Ok(vec![Tensor::ints(self.dtype, vec![number], values)])
        }
    }
}
