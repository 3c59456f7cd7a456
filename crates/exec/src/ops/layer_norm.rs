//! `layer_norm` over trailing axes.

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
    /// The first normalised dimension; all after it must be normalised, too.
    fn from(&self, shape: &[usize]) -> Result<usize, Reason> {
        let rank = shape.len();
        let mut axes = match &self.axes {
            Some(axes) => axes.iter().map(|a| axis_of(*a, rank)).collect::<Result<Vec<_>, _>>()?,
            None => (0..rank).collect(),
        };
        axes.sort_unstable();
        let from = rank - axes.len().min(rank);
        if axes != (from..rank).collect::<Vec<_>>() {
            return Err(format!(
                "over axes {axes:?} of a tensor of rank {rank}, which are not the last ones"
            ));
        }
        let len = count(&shape[from..]);
        for (name, v) in [("gamma", &self.gamma), ("beta", &self.beta)] {
            if let Some(v) = v.as_ref().filter(|v| v.len() != len) {
                return Err(format!("`{name}` has {} values, a row has {len}", v.len()));
            }
        }
        Ok(from)
    }

    fn step(&self) -> Step {
        let (gamma, beta) = (self.gamma.clone(), self.beta.clone());
        Step::LayerNorm { epsilon: self.epsilon, gamma, beta, half: half(self.dtype) }
    }
}

impl Op for LayerNorm {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        self.from(shapes[0])?;
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let from = self.from(&x.shape)?;
        let len = count(&x.shape[from..]);
        let mut rows = x.shape[..from].to_vec();
        rows.push(len);
        let flat = x.reshaped(cx, &rows)?;
        let values = tile::single(cx, self.step(), &[flat], &[len], &x.shape[..from], len)?;
        Ok(vec![Tensor::floats(self.dtype, x.shape.clone(), values)])
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        (self.from(shapes[0]).ok()? + 1 == shapes[0].len()).then(|| vec![self.step()])
    }
}
