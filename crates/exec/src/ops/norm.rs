//! `batch_norm`, `instance_norm`, `l2_norm`; and `prelu`, `softplus_parametric`: what a channel's own numbers do.

use super::{Form, Op, Reason, functions, round};
use crate::tensor::{Context, Tensor, count};
use kvbaton_kernels::rows::{self, Reduction};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Norm {
    kind: Kind,
    epsilon: f32,
    gamma: Option<Vec<f32>>,
    beta: Option<Vec<f32>>,
    dtype: DataType,
}

#[derive(Debug)]
enum Kind {
    /// With a mean and a variance for each channel, the second dimension.
    Batch { mean: Vec<f32>, variance: Vec<f32> },
    /// With those of each channel's own values.
    Instance,
    /// By the length of the last three dimensions.
    L2,
    /// `gamma · x` where x is negative.
    Prelu,
    /// `gamma · ln(1 + e^(beta · x))`
    Softplus,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let required = |name: &str| form.floats(name)?.ok_or_else(|| format!("`{name}` is missing"));
    let epsilon = |default| form.float("epsilon", default);
    let (kind, epsilon, gamma, beta) = match form.op.kind.as_str() {
        "l2_norm" => (Kind::L2, epsilon(1e-6)?, None, None),
        "prelu" => (Kind::Prelu, 0.0, Some(required("alpha")?), None),
        "softplus_parametric" => (Kind::Softplus, 0.0, Some(required("alpha")?), Some(required("beta")?)),
        "instance_norm" => (Kind::Instance, epsilon(1e-5)?, form.floats("gamma")?, form.floats("beta")?),
        _ => {
            let kind = Kind::Batch { mean: required("mean")?, variance: required("variance")? };
            (kind, epsilon(1e-5)?, form.floats("gamma")?, form.floats("beta")?)
        }
    };
    Ok(Box::new(Norm { kind, epsilon, gamma, beta, dtype: form.float_dtype()? }))
}

impl Norm {
    /// Channels, and values of a channel; for `l2_norm` values that are normalised together.
    fn check(&self, x: &[usize]) -> Result<(usize, usize), Reason> {
        if matches!(self.kind, Kind::L2) {
            let from = x.len().checked_sub(3).ok_or_else(|| format!("of a tensor of shape {x:?}"))?;
            return Ok((1, count(&x[from..])));
        }
        let [_, channels, rest @ ..] = x else { return Err(format!("of a tensor of shape {x:?}")) };
        let (mean, variance) = match &self.kind {
            Kind::Batch { mean, variance } => (Some(mean), Some(variance)),
            _ => (None, None),
        };
        for values in [mean, variance, self.gamma.as_ref(), self.beta.as_ref()].into_iter().flatten() {
            if values.len() != *channels {
                return Err(format!("{} values for {channels} channels", values.len()));
            }
        }
        Ok((*channels, count(rest)))
    }

    /// One channel's values, in place.
    fn apply(&self, cx: &Context, c: usize, values: &mut [f32]) {
        let gamma = self.gamma.as_ref().map_or(1.0, |g| g[c]);
        let beta = self.beta.as_ref().map_or(0.0, |b| b[c]);
        let scale = |values: &mut [f32], mean: f32, variance: f32| {
            let deviation = (variance + self.epsilon).sqrt();
            values.iter_mut().for_each(|v| *v = (*v - mean) / deviation * gamma + beta);
        };
        match &self.kind {
            Kind::Batch { mean, variance } => scale(values, mean[c], variance[c]),
            Kind::Instance => {
                let mean = rows::reduce(cx.isa, Reduction::Mean, values);
                let centred: Vec<f32> = values.iter().map(|v| v - mean).collect();
                #[expect(clippy::cast_precision_loss, reason = "rows are far shorter than 2^24")]
                let len = values.len() as f32;
                scale(values, mean, rows::reduce(cx.isa, Reduction::SumOfSquares, &centred) / len);
            }
            Kind::L2 => {
                let length = (rows::reduce(cx.isa, Reduction::SumOfSquares, values) + self.epsilon).sqrt();
                values.iter_mut().for_each(|v| *v /= length);
            }
            Kind::Prelu => values.iter_mut().filter(|v| **v < 0.0).for_each(|v| *v *= gamma),
            Kind::Softplus => values.iter_mut().for_each(|v| *v = gamma * functions::softplus(*v * beta)),
        }
    }
}

impl Op for Norm {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        self.check(shapes[0])?;
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let (channels, len) = self.check(&x.shape)?;
        let mut values = cx.pool.take(x.count());
        x.copy_to(cx.isa, &mut values)?;
        for (i, values) in values.chunks_mut(len.max(1)).enumerate() {
            self.apply(cx, i % channels, values);
        }
        round(&mut values, self.dtype);
        Ok(vec![Tensor::floats(self.dtype, x.shape.clone(), values)])
    }
}
