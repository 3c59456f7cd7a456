//! Functions of one value: `exp`, `silu`, `gelu`, `sqrt`, `identity`, …
//!
//! On fp16 values, functions without a vector kernel go through a table of all 65,536 results, which is exact.

use kvbaton_kernels::rows::{Table, Unary};
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, half, split_last};
use crate::tensor::{Context, Tensor, is_float};
use crate::tile::{self, Step};

#[derive(Debug)]
struct Elementary {
    /// `None` passes every type through.
    f: Option<Unary>,
    dtype: DataType,
}

/// `x²`, for `pow` with the exponent 2.
pub(super) fn square(dtype: DataType) -> impl Op {
    // `y`, the exponent, stays an operand and is not looked at.
    Elementary { f: Some(Unary::Square), dtype }
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let dtype = form.dtype()?;
    if form.op.kind == "identity" {
        return Ok(Box::new(Elementary { f: None, dtype }));
    }
    let dtype = if dtype == DataType::Int32 { dtype } else { form.float_dtype()? };
    if !is_float(dtype) {
        return Err(format!("on {dtype} values"));
    }
    let f = match form.op.kind.as_str() {
        "exp" => Unary::Exp,
        "silu" => Unary::Silu,
        "sigmoid" => Unary::Sigmoid,
        "square" => Unary::Square,
        "sqrt" => Unary::Sqrt,
        "rsqrt" => Unary::Rsqrt { epsilon: form.float("epsilon", 1e-12)? },
        "inverse" => Unary::Inverse { epsilon: form.float("epsilon", 1e-4)? },
        "abs" => Unary::Scalar(f32::abs),
        "relu" => Unary::Scalar(relu),
        "tanh" => pointwise(dtype, f32::tanh),
        "erf" => pointwise(dtype, erf),
        "sin" => pointwise(dtype, f32::sin),
        "cos" => pointwise(dtype, f32::cos),
        "log" => {
            let epsilon = form.float("epsilon", 1e-45)?;
            if half(dtype) {
                Unary::Table(Table::new(move |x| (x + epsilon).ln()))
            } else if epsilon <= f32::MIN_POSITIVE {
                // Beside any normal value it is nothing.
                Unary::Scalar(|x| (x + 1e-45).ln())
            } else {
                return Err(format!("on fp32 values with epsilon {epsilon}"));
            }
        }
        _ => match form.text("mode")?.unwrap_or("EXACT") {
            "EXACT" => pointwise(dtype, gelu),
            "TANH_APPROXIMATION" => pointwise(dtype, gelu_tanh),
            "SIGMOID_APPROXIMATION" => pointwise(dtype, gelu_sigmoid),
            mode => return Err(format!("mode {mode}")),
        },
    };
    Ok(Box::new(Elementary { f: Some(f), dtype }))
}

fn pointwise(dtype: DataType, f: fn(f32) -> f32) -> Unary {
    if half(dtype) { Unary::Table(Table::new(f)) } else { Unary::Scalar(f) }
}

fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

fn gelu(x: f32) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = (0.5 * f64::from(x) * (1.0 + erf64(f64::from(x) / std::f64::consts::SQRT_2))) as f32;
    // -inf times 0
    if x == f32::NEG_INFINITY { -0.0 } else { y }
}

fn gelu_tanh(x: f32) -> f32 {
    if x == f32::NEG_INFINITY {
        return -0.0;
    }
    let x = f64::from(x);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = (0.5 * x * (1.0 + inner.tanh())) as f32;
    y
}

fn gelu_sigmoid(x: f32) -> f32 {
    if x == f32::NEG_INFINITY {
        return -0.0;
    }
    let x = f64::from(x);
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = (x / (1.0 + (-1.702 * x).exp())) as f32;
    y
}

fn erf(x: f32) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = erf64(f64::from(x)) as f32;
    y
}

/// The error function, to about 1e-15: its Taylor series near 0, the continued fraction of its complement beyond.
fn erf64(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() {
        return x;
    }
    let y = if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > 1e-18 * sum.abs() && n < 100.0 {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else if a < 6.0 {
        let mut fraction = a;
        for n in (1..=60).rev() {
            fraction = a + f64::from(n) / 2.0 / fraction;
        }
        1.0 - (-a * a).exp() / (fraction * std::f64::consts::PI.sqrt())
    } else {
        1.0
    };
    y.copysign(x)
}

impl Op for Elementary {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let Some(f) = &self.f else { return Ok(vec![operands[0].clone()]) };
        let shape = operands[0].shape.clone();
        let (lead, len) = split_last(&shape);
        let step = Step::Unary { f: f.clone(), half: half(self.dtype) };
        let values = tile::single(cx, step, &operands[..1], &[len], lead, len)?;
        Ok(vec![Tensor::floats(self.dtype, shape, values)])
    }

    fn by_rows(&self, _: &[&[usize]]) -> Option<Vec<Step>> {
        Some(vec![Step::Unary { f: self.f.clone()?, half: half(self.dtype) }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the error function to 15 digits (Abramowitz and Stegun 7.1; mpmath).
    #[test]
    fn erf_equals_tabulated_values() {
        for (x, want) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (2.6, 0.999_763_965_583_470_6),
            (3.0, 0.999_977_909_503_001_4),
        ] {
            assert!((erf64(x) - want).abs() < 1e-13, "erf({x}) = {}", erf64(x));
            assert_eq!(erf64(-x), -erf64(x));
        }
    }
}
