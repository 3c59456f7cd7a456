//! `cast`: between floats, integers and truth values.

use kvbaton_kernels::rows::Unary;
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, half, split_last};
use crate::tensor::{Context, Data, Tensor, is_float};
use crate::tile::{self, Step};

#[derive(Debug)]
struct Cast {
    from: DataType,
    to: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let (from, to) = (form.argument_dtype("x")?, form.dtype()?);
    for dtype in [from, to] {
        let integer = matches!(
            dtype,
            DataType::Bool
                | DataType::Int8
                | DataType::UInt8
                | DataType::Int16
                | DataType::UInt16
                | DataType::Int32
        );
        if !integer && !is_float(dtype) {
            return Err(format!("from {from} to {to}"));
        }
    }
    Ok(Box::new(Cast { from, to }))
}

/// Integers of `dtype`: wider values wrap, as numpy's `astype` does.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "wrapping is the meaning")]
fn wrapped(dtype: DataType, v: i32) -> i32 {
    match dtype {
        DataType::Int8 => i32::from(v as i8),
        DataType::UInt8 => i32::from(v as u8),
        DataType::Int16 => i32::from(v as i16),
        DataType::UInt16 => i32::from(v as u16),
        _ => v,
    }
}

impl Op for Cast {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let shape = x.shape.clone();
        let tensor = match (&x.data, self.to) {
            (Data::Float(_) | Data::Weights(_) | Data::Half(_) | Data::Given(_) | Data::State(_), to)
                if is_float(to) =>
            {
                let (lead, len) = split_last(&shape);
                let step = Step::Unary { f: Unary::Identity, half: half(to) };
                Tensor::floats(to, shape.clone(), tile::single(cx, step, operands, &[len], lead, len)?)
            }
            (
                Data::Float(_) | Data::Weights(_) | Data::Half(_) | Data::Given(_) | Data::State(_),
                DataType::Bool,
            ) => Tensor::bools(shape, x.float_values(cx.isa)?.into_iter().map(|v| v != 0.0).collect()),
            (Data::Float(_) | Data::Weights(_) | Data::Half(_) | Data::Given(_) | Data::State(_), to) => {
                #[expect(clippy::cast_possible_truncation, reason = "a cast truncates")]
                let ints = x.float_values(cx.isa)?.into_iter().map(|v| wrapped(to, v as i32)).collect();
                Tensor::ints(to, shape, ints)
            }
            (Data::Int(_), DataType::Bool) => {
                Tensor::bools(shape, x.int_values()?.into_iter().map(|v| v != 0).collect())
            }
            (Data::Int(_), to) if !is_float(to) => {
                Tensor::ints(to, shape, x.int_values()?.into_iter().map(|v| wrapped(to, v)).collect())
            }
            (Data::Bool(_), DataType::Bool) => x.clone(),
            (Data::Bool(_), to) if !is_float(to) => {
                Tensor::ints(to, shape, x.bool_values()?.into_iter().map(i32::from).collect())
            }
            (_, to) => {
                let ints = match &x.data {
                    Data::Bool(_) => x.bool_values()?.into_iter().map(i32::from).collect(),
                    _ => x.int_values()?,
                };
                let mut values = cx.pool.take(ints.len());
                for (v, i) in values.iter_mut().zip(ints) {
                    #[expect(clippy::cast_precision_loss, reason = "a cast rounds")]
                    let float = i as f32;
                    *v = if half(to) { half::f16::from_f32(float).to_f32() } else { float };
                }
                Tensor::floats(to, shape, values)
            }
        };
        Ok(vec![tensor])
    }

    fn by_rows(&self, _: &[&[usize]]) -> Option<Vec<Step>> {
        (is_float(self.from) && is_float(self.to))
            .then(|| vec![Step::Unary { f: Unary::Identity, half: half(self.to) }])
    }
}
