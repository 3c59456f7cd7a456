//! `layer_norm` over any axes.

use super::{Form, Op, Reason, axis_of, half};
use crate::tensor::{Context, Tensor, count};
use crate::tile::{self, Step};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct LayerNorm {
    /// `None`: all.
    axes: Option<Vec<i64>>,
    epsilon: f32,
    gamma: Option<Vec<f32>>,
    beta: Option<Vec<f32>>,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(LayerNorm {
        axes: form.ints("axes")?,
        epsilon: form.float("epsilon", 1e-5)?,
        gamma: form.floats("gamma")?,
        beta: form.floats("beta")?,
        dtype: form.float_dtype()?,
    }))
}

impl LayerNorm {
    /// The order that puts the normalised dimensions last, and how many are not normalised.
    fn order(&self, shape: &[usize]) -> Result<(Vec<usize>, usize), Reason> {
        let rank = shape.len();
        let mut normalised = vec![self.axes.is_none(); rank];
        for a in self.axes.iter().flatten() {
            normalised[axis_of(*a, rank)?] = true;
        }
        let (mut order, inner): (Vec<usize>, Vec<usize>) = (0..rank).partition(|d| !normalised[*d]);
        let len = inner.iter().map(|d| shape[*d]).product::<usize>();
        for (name, v) in [("gamma", &self.gamma), ("beta", &self.beta)] {
            if let Some(v) = v.as_ref().filter(|v| v.len() != len) {
                return Err(format!("`{name}` has {} values, a row has {len}", v.len()));
            }
        }
        let from = order.len();
        order.extend(inner);
        Ok((order, from))
    }

    fn step(&self) -> Step {
        let (gamma, beta) = (self.gamma.clone(), self.beta.clone());
        Step::LayerNorm { epsilon: self.epsilon, gamma, beta, half: half(self.dtype) }
    }
}

impl Op for LayerNorm {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        self.order(shapes[0])?;
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let (order, from) = self.order(&operands[0].shape)?;
        let x = operands[0].permuted(&order);
        let len = count(&x.shape[from..]);
        let mut rows = x.shape[..from].to_vec();
        rows.push(len);
        let flat = x.reshaped(cx, &rows)?;
        let values = tile::single(cx, self.step(), &[flat], &[len], &x.shape[..from], len)?;
        // Every dimension goes back to its place.
        let mut back = vec![0; order.len()];
        order.iter().enumerate().for_each(|(i, d)| back[*d] = i);
        Ok(vec![Tensor::floats(self.dtype, x.shape, values).permuted(&back)])
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let (order, from) = self.order(shapes[0]).ok()?;
        (order.is_sorted() && from + 1 == shapes[0].len()).then(|| vec![self.step()])
    }
}
