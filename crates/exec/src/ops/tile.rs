//! `tile`: a tensor repeated along its dimensions.

use super::{Form, Op, Reason};
use crate::tensor::{Context, Tensor};

#[derive(Debug)]
struct Tile {
    /// Known at load, or the second operand.
    reps: Option<Vec<i64>>,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(Tile { reps: form.ints_or_operand("reps")? }))
}

fn repetitions(reps: &[i64], x: &[usize]) -> Result<Vec<usize>, Reason> {
    let whole: Option<Vec<usize>> = reps.iter().map(|r| usize::try_from(*r).ok()).collect();
    let whole = whole.filter(|r| r.len() == x.len());
    whole.ok_or_else(|| format!("{reps:?} repetitions of a tensor of shape {x:?}"))
}

impl Op for Tile {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let Some(reps) = &self.reps else { return Ok(None) };
        let reps = repetitions(reps, shapes[0])?;
        Ok(Some(vec![shapes[0].iter().zip(reps).map(|(d, r)| d * r).collect()]))
    }

    fn views(&self) -> bool {
        true
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let reps = match (&self.reps, operands.get(1)) {
            (Some(reps), _) => repetitions(reps, &x.shape)?,
            (None, Some(reps)) => repetitions(&super::wide(reps)?, &x.shape)?,
            (None, None) => return Err("`reps` is missing".to_owned()),
        };
        // Every dimension becomes (repetitions, size), the repetitions with stride 0.
        let (mut dims, mut strides) = (Vec::new(), Vec::new());
        for ((d, s), r) in x.shape.iter().zip(&x.strides).zip(&reps) {
            dims.extend([*r, *d]);
            strides.extend([0, *s]);
        }
        let shape: Vec<usize> = x.shape.iter().zip(reps).map(|(d, r)| d * r).collect();
        let repeated = Tensor { shape: dims, strides, ..x.clone() };
        Ok(vec![repeated.reshaped(cx, &shape)?])
    }
}
