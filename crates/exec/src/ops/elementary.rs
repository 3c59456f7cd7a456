//! Functions of one value: `exp`, `silu`, `gelu`, `sqrt`, `clip`, `identity`, …
//!
//! On fp16 values, functions without a vector kernel go through a table of all 65,536 results, which is exact.

use kvbaton_kernels::rows::{Pointwise, Table, Unary};
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, functions, half, split_last};
use crate::tensor::{Context, Tensor, is_float};
use crate::tile::{self, Step};

#[derive(Debug)]
struct Elementary {
    f: Function,
    dtype: DataType,
}

#[derive(Debug)]
enum Function {
    /// Passes every type through.
    Identity,
    Floats(Unary),
    Ints(Integers),
}

/// A function of integers, wrapping; `exp2` ends at the largest one.
#[derive(Debug)]
enum Integers {
    Abs,
    Sign,
    Square,
    Exp2,
    AtLeast(i32),
}

/// `x²`, for `pow` with the exponent 2.
pub(super) fn square(dtype: DataType) -> impl Op {
    // `y`, the exponent, stays an operand and is not looked at.
    Elementary { f: Function::Floats(Unary::Square), dtype }
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let dtype = form.dtype()?;
    let f = match form.op.kind.as_str() {
        "identity" => Function::Identity,
        _ if !super::alike(form.argument_dtype("x")?, dtype) => {
            return Err(format!("from {} to {dtype}", form.argument_dtype("x")?));
        }
        _ if is_float(dtype) => Function::Floats(of_floats(form, dtype)?),
        kind => Function::Ints(match kind {
            _ if dtype != DataType::Int32 => return Err(format!("on {dtype} values")),
            "abs" => Integers::Abs,
            "sign" => Integers::Sign,
            "square" => Integers::Square,
            "exp2" => Integers::Exp2,
            "threshold" => {
                let alpha = form.int("alpha")?.ok_or("`alpha` is missing")?;
                Integers::AtLeast(i32::try_from(alpha).map_err(|e| e.to_string())?)
            }
            _ => return Err(format!("on {dtype} values")),
        }),
    };
    Ok(Box::new(Elementary { f, dtype }))
}

fn of_floats(form: &Form<'_>, dtype: DataType) -> Result<Unary, Reason> {
    let required = |name: &str| {
        if form.constant(name).is_some() {
            form.float(name, 0.0)
        } else {
            Err(format!("`{name}` is missing or computed"))
        }
    };
    let two = || Ok::<_, Reason>((required("alpha")?, required("beta")?));
    Ok(match form.op.kind.as_str() {
        "exp" => Unary::Exp,
        "silu" => Unary::Silu,
        "sigmoid" => Unary::Sigmoid,
        "square" => Unary::Square,
        "sqrt" => Unary::Sqrt,
        "rsqrt" => Unary::Rsqrt { epsilon: form.float("epsilon", 1e-12)? },
        "inverse" => Unary::Inverse { epsilon: form.float("epsilon", 1e-4)? },
        "abs" => pointwise(dtype, f32::abs),
        "acos" => pointwise(dtype, f32::acos),
        "asin" => pointwise(dtype, f32::asin),
        "atan" => pointwise(dtype, f32::atan),
        "atanh" => pointwise(dtype, f32::atanh),
        "ceil" => pointwise(dtype, f32::ceil),
        "cos" => pointwise(dtype, f32::cos),
        "cosh" => pointwise(dtype, f32::cosh),
        "erf" => pointwise(dtype, functions::erf),
        "exp2" => pointwise(dtype, f32::exp2),
        "floor" => pointwise(dtype, f32::floor),
        "relu" => pointwise(dtype, functions::relu),
        "relu6" => pointwise(dtype, |x| clamped(x, 0.0, 6.0)),
        "round" => pointwise(dtype, f32::round_ties_even),
        "sign" => pointwise(dtype, functions::sign),
        "sin" => pointwise(dtype, f32::sin),
        "sinh" => pointwise(dtype, f32::sinh),
        "softplus" => pointwise(dtype, functions::softplus),
        "softsign" => pointwise(dtype, |x| x / (1.0 + x.abs())),
        "tan" => pointwise(dtype, f32::tan),
        "tanh" => pointwise(dtype, f32::tanh),
        "log" => {
            let epsilon = form.float("epsilon", if half(dtype) { 0.0 } else { 1e-45 })?;
            pointwise(dtype, move |x| (x + epsilon).ln())
        }
        "clip" => {
            let (low, high) = two()?;
            pointwise(dtype, move |x| clamped(x, low, high))
        }
        "threshold" => {
            let alpha = required("alpha")?;
            pointwise(dtype, move |x| if x < alpha { alpha } else { x })
        }
        "thresholded_relu" => {
            let alpha = required("alpha")?;
            pointwise(dtype, move |x| if x < alpha { 0.0 } else { x })
        }
        "leaky_relu" => {
            let alpha = required("alpha")?;
            pointwise(dtype, move |x| if x < 0.0 { alpha * x } else { x })
        }
        "elu" => {
            let alpha = required("alpha")?;
            pointwise(dtype, move |x| if x < 0.0 { alpha * x.exp_m1() } else { x })
        }
        "clamped_relu" => {
            let (alpha, beta) = two()?;
            pointwise(dtype, move |x| if x < 0.0 { (alpha * x).min(beta) } else { clamped(x, 0.0, beta) })
        }
        "linear_activation" => {
            let (alpha, beta) = two()?;
            pointwise(dtype, move |x| alpha * x + beta)
        }
        "scaled_tanh" => {
            let (alpha, beta) = two()?;
            pointwise(dtype, move |x| alpha * (x * beta).tanh())
        }
        "sigmoid_hard" => {
            let (alpha, beta) = two()?;
            pointwise(dtype, move |x| clamped(alpha * x + beta, 0.0, 1.0))
        }
        _ => match form.text("mode")?.unwrap_or("EXACT") {
            "EXACT" => pointwise(dtype, functions::gelu),
            "TANH_APPROXIMATION" => pointwise(dtype, functions::gelu_tanh),
            "SIGMOID_APPROXIMATION" => pointwise(dtype, functions::gelu_sigmoid),
            mode => return Err(format!("mode {mode}")),
        },
    })
}

/// `x` within bounds; NaN stays, and bounds the wrong way round give the upper one, as numpy's.
fn clamped(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

fn pointwise(dtype: DataType, f: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Unary {
    if half(dtype) { Unary::Table(Table::new(f)) } else { Unary::Scalar(Pointwise::new(f)) }
}

impl Op for Elementary {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn views(&self) -> bool {
        matches!(self.f, Function::Identity)
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape = operands[0].shape.clone();
        Ok(vec![match &self.f {
            Function::Identity => operands[0].clone(),
            Function::Floats(f) => {
                let (lead, len) = split_last(&shape);
                let step = Step::Unary { f: f.clone(), half: half(self.dtype) };
                let values = tile::single(cx, step, &operands[..1], &[len], lead, len)?;
                Tensor::floats(self.dtype, shape, values)
            }
            Function::Ints(f) => {
                let apply = |x: i32| match f {
                    Integers::Abs => x.wrapping_abs(),
                    Integers::Sign => x.signum(),
                    Integers::Square => x.wrapping_mul(x),
                    #[expect(clippy::cast_possible_truncation, reason = "documented")]
                    Integers::Exp2 => f64::from(x).exp2() as i32,
                    Integers::AtLeast(alpha) => x.max(*alpha),
                };
                Tensor::ints(self.dtype, shape, operands[0].int_values()?.into_iter().map(apply).collect())
            }
        }])
    }

    fn by_rows(&self, _: &[&[usize]]) -> Option<Vec<Step>> {
        match &self.f {
            Function::Floats(f) => Some(vec![Step::Unary { f: f.clone(), half: half(self.dtype) }]),
            Function::Identity | Function::Ints(_) => None,
        }
    }
}
