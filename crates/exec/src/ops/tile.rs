//! `tile`: a tensor repeated along its dimensions.

use super::{Form, Op, Reason};
use crate::tensor::{Context, Tensor};

#[derive(Debug)]
struct Tile {
    reps: Vec<usize>,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let reps = form.ints("reps")?.ok_or("`reps` is missing")?;
    let reps = reps.into_iter().map(|r| usize::try_from(r).map_err(|_| format!("{r} repetitions")));
    Ok(Box::new(Tile { reps: reps.collect::<Result<_, _>>()? }))
}

impl Op for Tile {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let x = shapes[0];
        if x.len() != self.reps.len() {
            return Err(format!("{:?} repetitions of a tensor of shape {x:?}", self.reps));
        }
        Ok(Some(vec![x.iter().zip(&self.reps).map(|(d, r)| d * r).collect()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let shape = self.infer(&[&x.shape])?.and_then(|mut s| s.pop()).ok_or("no shape")?;
        // Every dimension becomes (repetitions, size), the repetitions with stride 0.
        let (mut dims, mut strides) = (Vec::new(), Vec::new());
        for ((d, s), r) in x.shape.iter().zip(&x.strides).zip(&self.reps) {
            dims.extend([*r, *d]);
            strides.extend([0, *s]);
        }
        let repeated = Tensor { shape: dims, strides, ..x.clone() };
        Ok(vec![repeated.reshaped(cx, &shape)?])
    }
}
