//! `pad`: elements before and after each dimension, constant, reflected or repeated.

use super::elements::{self, indices};
use super::{Form, Op, Reason};
use crate::tensor::{Context, Tensor, count, packed_strides};

#[derive(Debug)]
struct Pad {
    /// Known at load (before and after, for the last dimensions), or the second operand.
    pad: Option<Vec<i64>>,
    mode: Mode,
    fill: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Constant,
    Reflect,
    Replicate,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let pad = form.ints_or_operand("pad")?;
    let mode = match form.text("mode")?.unwrap_or("constant") {
        "constant" => Mode::Constant,
        "reflect" => Mode::Reflect,
        "replicate" => Mode::Replicate,
        other => return Err(format!("mode {other}")),
    };
    Ok(Box::new(Pad { pad, mode, fill: form.number("constant_val")?.unwrap_or(0.0) }))
}

impl Pad {
    /// Elements before and after, for every dimension.
    fn amounts(&self, pad: &[i64], x: &[usize]) -> Result<Vec<(usize, usize)>, Reason> {
        let refuse = || format!("pad {pad:?} of a tensor of shape {x:?}");
        let (pairs, []) = pad.as_chunks::<2>() else { return Err(refuse()) };
        let lead = x.len().checked_sub(pairs.len()).ok_or_else(refuse)?;
        let mut amounts = vec![(0, 0); lead];
        for (pair, size) in pairs.iter().zip(&x[lead..]) {
            let [before, after] = pair.map(usize::try_from);
            let (before, after) = (before.map_err(|_| refuse())?, after.map_err(|_| refuse())?);
            let most = before.max(after);
            let reaches = match self.mode {
                Mode::Constant => true,
                Mode::Reflect => most == 0 || most < *size,
                Mode::Replicate => most == 0 || *size > 0,
            };
            if !reaches {
                return Err(refuse());
            }
            amounts.push((before, after));
        }
        Ok(amounts)
    }

    /// The index along a dimension that the padded index `at` shows; `None` for the constant.
    fn source(&self, at: usize, before: usize, size: usize) -> Option<usize> {
        if at >= before && at < before + size {
            return Some(at - before);
        }
        match self.mode {
            Mode::Constant => None,
            Mode::Replicate => Some(if at < before { 0 } else { size - 1 }),
            Mode::Reflect if at < before => Some(before - at),
            Mode::Reflect => Some(2 * (size - 1) - (at - before)),
        }
    }
}

fn padded(x: &[usize], amounts: &[(usize, usize)]) -> Vec<usize> {
    x.iter().zip(amounts).map(|(d, (before, after))| before + d + after).collect()
}

impl Op for Pad {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let Some(pad) = &self.pad else { return Ok(None) };
        Ok(Some(vec![padded(shapes[0], &self.amounts(pad, shapes[0])?)]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let amounts = match (&self.pad, operands.get(1)) {
            (Some(pad), _) => self.amounts(pad, &x.shape)?,
            (None, Some(pad)) => self.amounts(&super::wide(pad)?, &x.shape)?,
            (None, None) => return Err("`pad` is missing".to_owned()),
        };
        let shape = padded(&x.shape, &amounts);
        // Dimensions after the last padded one move as a whole.
        let from = amounts.iter().rposition(|a| *a != (0, 0)).map_or(0, |d| d + 1);
        let (run, strides) = (count(&x.shape[from..]), packed_strides(&x.shape));
        let outer = shape[..from].to_vec();
        let starts = indices(&outer).map(|at| {
            (0..from)
                .try_fold(0, |sum, d| Some(sum + self.source(at[d], amounts[d].0, x.shape[d])? * strides[d]))
        });
        Ok(vec![elements::runs(cx, x, shape.clone(), run, self.fill, starts)?])
    }
}
