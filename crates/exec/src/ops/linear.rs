//! `linear`: rows times the transpose of a weight, plus a bias.

use kvbaton_kernels::rows::{self, Matrix, Product};
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, half, int_product};
use crate::tensor::{Context, Data, RowOffsets, Tensor, count};

/// Weights of a compressed factor that are decompressed at a time: 4 MiB.
const STREAMED: usize = 1 << 20;

#[derive(Debug)]
struct Linear {
    bias: Option<Vec<f32>>,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("weight")?;
    if form.argument_dtype("x")? == DataType::Int32 {
        return int_product::build(form, false, true, form.ints("bias")?);
    }
    // A bias of zeros, which exporters always write, adds nothing: sums start from +0 and never become -0.
    let bias = form.floats("bias")?.filter(|b| b.iter().any(|v| *v != 0.0));
    Ok(Box::new(Linear { bias, dtype: form.float_dtype()? }))
}

impl Linear {
    fn shape(&self, x: &[usize], weight: &[usize]) -> Result<Vec<usize>, Reason> {
        match (x.split_last(), weight) {
            (Some((k, lead)), [n, depth]) if k == depth => {
                if let Some(b) = self.bias.as_ref().filter(|b| b.len() != *n) {
                    return Err(format!("{n} outputs and a bias of {}", b.len()));
                }
                Ok([lead, &[*n]].concat())
            }
            _ => Err(format!("x {x:?} and weight {weight:?}")),
        }
    }
}

impl Op for Linear {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![self.shape(shapes[0], shapes[1])?]))
    }

    fn takes_compressed(&self, index: usize) -> bool {
        index == 1
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let (x, weight) = (&operands[0], &operands[1]);
        let shape = self.shape(&x.shape, &weight.shape)?;
        let (n, k) = (weight.shape[0], weight.shape[1]);
        let rank = x.rank();
        let rows = RowOffsets::new(&x.shape[..rank - 1], &x.strides[..rank - 1], x.offset);
        // Rows that lie at one distance are read where they are.
        let usable = rows.stride().is_some() && x.is_packed_from(rank - 1);
        let x = if usable && matches!(x.source()?, rows::Source::Singles(_)) {
            x.clone()
        } else {
            x.to_packed(cx)?
        };
        let left_stride =
            RowOffsets::new(&x.shape[..rank - 1], &x.strides[..rank - 1], 0).stride().unwrap_or(0);
        let rows::Source::Singles(left) = x.source()? else {
            return Err("x is not stored as f32".to_owned());
        };
        let mut values = cx.pool.take(count(&shape));
        let m = count(&x.shape[..rank - 1]);
        let left = &left[x.offset..];
        let multiply = |right: Matrix<'_>, first: usize, out: &mut [f32]| {
            let bias = self.bias.as_ref().map(|b| &b[first..first + right.n]);
            let product = Product { left, left_stride, m, right, bias, half: half(self.dtype) };
            rows::multiply_into(cx.isa, &product, out, n);
        };
        match &weight.data {
            Data::Compressed(compressed) if !values.is_empty() => {
                // A few outputs at a time: their weights fit one buffer, whatever the model's size.
                let outputs = (STREAMED / k.max(1)).clamp(1, n);
                let mut buffer = cx.pool.take(outputs * k);
                for first in (0..n).step_by(outputs) {
                    let now = outputs.min(n - first);
                    let buffer = &mut buffer[..now * k];
                    compressed.copy_to(cx.isa, first * k, buffer);
                    let values_now = rows::Source::Singles(buffer);
                    let right = Matrix { values: values_now, k, n: now, k_stride: 1, n_stride: k };
                    multiply(right, first, &mut values[first..]);
                }
            }
            Data::Compressed(_) => {}
            _ => multiply(matrix(weight, weight.strides[1], weight.strides[0], k, n)?, 0, &mut values),
        }
        Ok(vec![Tensor::floats(self.dtype, shape, values)])
    }
}

/// A tensor's values as a right factor, whatever its strides.
pub(super) fn matrix(
    tensor: &Tensor,
    k_stride: usize,
    n_stride: usize,
    k: usize,
    n: usize,
) -> Result<Matrix<'_>, Reason> {
    let values = match tensor.source()? {
        rows::Source::Singles(v) => rows::Source::Singles(&v[tensor.offset.min(v.len())..]),
        rows::Source::Halves(v) => rows::Source::Halves(&v[tensor.offset.min(v.len())..]),
        other => other,
    };
    Ok(Matrix { values, k, n, k_stride, n_stride })
}
