//! `add`, `sub`, `mul`, `real_div`, `maximum`, `minimum`, `pow`, `floor_div`, `mod`: two operands, broadcast.

use kvbaton_kernels::rows::Binary;
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, broadcast_shape, half, split_last};
use crate::tensor::{Context, Tensor, is_float};
use crate::tile::{self, Step};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Vector(Binary),
    Pow,
    FloorDiv,
    Mod,
}

#[derive(Debug)]
struct Arithmetic {
    kind: Kind,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("y")?;
    let kind = match form.op.kind.as_str() {
        "add" => Kind::Vector(Binary::Add),
        "sub" => Kind::Vector(Binary::Sub),
        "mul" => Kind::Vector(Binary::Mul),
        "real_div" => Kind::Vector(Binary::Div),
        "maximum" => Kind::Vector(Binary::Max),
        "minimum" => Kind::Vector(Binary::Min),
        "pow" => Kind::Pow,
        "floor_div" => Kind::FloorDiv,
        _ => Kind::Mod,
    };
    let dtype = form.dtype()?;
    if !is_float(dtype) && dtype != DataType::Int32 {
        return Err(format!("on {dtype} values"));
    }
    let op = Arithmetic { kind, dtype };
    // A power with the exponent 2 is a square, the usual case, and exact.
    if kind == Kind::Pow
        && is_float(dtype)
        && form.constant("y").is_some()
        && form.floats("y")?.as_deref() == Some(&[2.0])
    {
        return Ok(Box::new(super::elementary::square(dtype)));
    }
    Ok(Box::new(op))
}

/// A binary operation on floats.
pub(super) fn binary(op: Binary, dtype: DataType) -> impl Op {
    Arithmetic { kind: Kind::Vector(op), dtype }
}

impl Op for Arithmetic {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![broadcast_shape(shapes[0], shapes[1])?]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let (x, y) = (&operands[0], &operands[1]);
        let shape = broadcast_shape(&x.shape, &y.shape)?;
        let result = match (self.kind, is_float(self.dtype)) {
            (Kind::Vector(op), true) => {
                let (lead, len) = split_last(&shape);
                let step = Step::Binary { op, half: half(self.dtype) };
                let values = tile::single(cx, step, operands, &[len, len], lead, len)?;
                Tensor::floats(self.dtype, shape, values)
            }
            (kind, true) => {
                let a = x.broadcast(&shape)?.float_values(cx.isa)?;
                let b = y.broadcast(&shape)?.float_values(cx.isa)?;
                let mut values = cx.pool.take(a.len());
                for ((v, a), b) in values.iter_mut().zip(a).zip(b) {
                    *v = float(kind, a, b);
                    if half(self.dtype) {
                        *v = half::f16::from_f32(*v).to_f32();
                    }
                }
                Tensor::floats(self.dtype, shape, values)
            }
            (kind, false) => {
                let a = x.broadcast(&shape)?.int_values()?;
                let b = y.broadcast(&shape)?.int_values()?;
                let values: Result<Vec<i32>, Reason> =
                    a.into_iter().zip(b).map(|(a, b)| integer(kind, a, b)).collect();
                Tensor::ints(self.dtype, shape, values?)
            }
        };
        Ok(vec![result])
    }

    fn by_rows(&self, _: &[&[usize]]) -> Option<Vec<Step>> {
        match self.kind {
            Kind::Vector(op) if is_float(self.dtype) => {
                Some(vec![Step::Binary { op, half: half(self.dtype) }])
            }
            _ => None,
        }
    }
}

fn float(kind: Kind, a: f32, b: f32) -> f32 {
    match kind {
        Kind::Pow => a.powf(b),
        Kind::FloorDiv => {
            // The quotient of what the remainder leaves is whole up to rounding.
            let quotient = (a - modulo(a, b)) / b;
            let floor = quotient.floor();
            if quotient - floor > 0.5 { floor + 1.0 } else { floor }
        }
        _ => modulo(a, b),
    }
}

/// The exact remainder, with the divisor's sign, as numpy's.
fn modulo(a: f32, b: f32) -> f32 {
    let r = a % b;
    if r == 0.0 {
        0f32.copysign(b)
    } else if (r < 0.0) != (b < 0.0) {
        r + b
    } else {
        r
    }
}

fn integer(kind: Kind, a: i32, b: i32) -> Result<i32, Reason> {
    let floor_div = |a: i32, b: i32| {
        let q = a.checked_div(b).ok_or_else(|| format!("{a} divided by {b}"))?;
        Ok::<i32, Reason>(if a % b != 0 && (a < 0) != (b < 0) { q - 1 } else { q })
    };
    Ok(match kind {
        Kind::Vector(Binary::Add) => a.wrapping_add(b),
        Kind::Vector(Binary::Sub) => a.wrapping_sub(b),
        Kind::Vector(Binary::Mul) => a.wrapping_mul(b),
        Kind::Vector(Binary::Max) => a.max(b),
        Kind::Vector(Binary::Min) => a.min(b),
        Kind::Vector(Binary::Div) => a.checked_div(b).ok_or_else(|| format!("{a} divided by {b}"))?,
        Kind::Pow => {
            let exponent = u32::try_from(b).map_err(|_| format!("{a} to the power of {b} on integers"))?;
            a.wrapping_pow(exponent)
        }
        Kind::FloorDiv => floor_div(a, b)?,
        Kind::Mod => a.wrapping_sub(floor_div(a, b)?.wrapping_mul(b)),
    })
}
