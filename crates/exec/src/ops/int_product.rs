//! `linear` and `matmul` of integers, which wrap.

use kvbaton_mil::program::DataType;

use super::{Form, Matmul, Op, Reason};
use crate::tensor::{Context, Tensor, count};

#[derive(Debug)]
struct IntProduct {
    factors: Matmul,
    bias: Option<Vec<i32>>,
}

/// For operands that were asked for already: `x` and `y`, or `x` and `weight`.
pub(super) fn build(
    form: &Form<'_>,
    transpose_x: bool,
    transpose_y: bool,
    bias: Option<Vec<i64>>,
) -> Result<Box<dyn Op>, Reason> {
    let dtype = form.dtype()?;
    if dtype != DataType::Int32 {
        return Err(format!("of integers to {dtype}"));
    }
    let bias = bias.map(|b| b.into_iter().map(i32::try_from).collect::<Result<_, _>>()).transpose();
    let bias = bias.map_err(|e| e.to_string())?;
    Ok(Box::new(IntProduct { factors: Matmul::new(transpose_x, transpose_y, dtype), bias }))
}

impl IntProduct {
    fn shape(&self, shapes: [&[usize]; 2]) -> Result<Vec<usize>, Reason> {
        let shape = self.factors.shape(shapes[0], shapes[1])?;
        match (&self.bias, shape.last()) {
            (Some(bias), n) if n != Some(&bias.len()) => {
                Err(format!("a result {shape:?} and a bias of {}", bias.len()))
            }
            _ => Ok(shape),
        }
    }
}

impl Op for IntProduct {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![self.shape([shapes[0], shapes[1]])?]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape = self.shape([&operands[0].shape, &operands[1].shape])?;
        let f = self.factors.operands(cx, &operands[0], &operands[1])?;
        let (m, k, n) = (f.m, f.k, f.n);
        let x = f.x.broadcast(&[&f.batch[..], &[m, k]].concat())?.int_values()?;
        let y = f.y.broadcast(&[&f.batch[..], &[k, n]].concat())?.int_values()?;
        let mut values = Vec::with_capacity(count(&shape));
        for batch in 0..count(&f.batch) {
            let (x, y) = (&x[batch * m * k..][..m * k], &y[batch * k * n..][..k * n]);
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let start = self.bias.as_ref().map_or(0, |bias| bias[column]);
                let terms = (0..k).map(|i| x[row * k + i].wrapping_mul(y[i * n + column]));
                values.push(terms.fold(start, i32::wrapping_add));
            }
        }
        Ok(vec![Tensor::ints(DataType::Int32, shape, values)])
    }
}
