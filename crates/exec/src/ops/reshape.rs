//! `reshape`, `expand_dims`, `squeeze`: the same elements under another shape.

use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Tensor, count};

#[derive(Debug)]
enum Reshape {
    /// The shape written in the program: 0 keeps a dimension, -1 takes what is left.
    To(Vec<i64>),
    /// The same, computed: the second operand.
    Computed,
    Expand(Vec<i64>),
    /// `None`: every dimension of size 1.
    Squeeze(Option<Vec<i64>>),
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(match form.op.kind.as_str() {
        "expand_dims" => Reshape::Expand(form.ints("axes")?.ok_or("`axes` is missing")?),
        "squeeze" => Reshape::Squeeze(form.ints("axes")?),
        _ if form.constant("shape").is_some() => {
            Reshape::To(form.ints("shape")?.ok_or("`shape` is missing")?)
        }
        _ => {
            form.operand("shape")?;
            Reshape::Computed
        }
    }))
}

fn resolved(from: &[usize], to: &[i64]) -> Result<Vec<usize>, Reason> {
    let refuse = || format!("cannot reshape {from:?} to {to:?}");
    let mut shape = Vec::with_capacity(to.len());
    let mut open = None;
    for (i, d) in to.iter().enumerate() {
        shape.push(match d {
            0 => *from.get(i).ok_or_else(refuse)?,
            -1 if open.is_none() => {
                open = Some(i);
                1
            }
            d => usize::try_from(*d).map_err(|_| refuse())?,
        });
    }
    if let Some(i) = open {
        let rest = count(&shape);
        if rest == 0 || !count(from).is_multiple_of(rest) {
            return Err(refuse());
        }
        shape[i] = count(from) / rest;
    }
    if count(&shape) == count(from) { Ok(shape) } else { Err(refuse()) }
}

impl Reshape {
    fn shape(&self, x: &[usize]) -> Result<Option<Vec<usize>>, Reason> {
        Ok(Some(match self {
            Reshape::To(to) => resolved(x, to)?,
            Reshape::Computed => return Ok(None),
            Reshape::Expand(axes) => {
                let rank = x.len() + axes.len();
                let mut new = vec![false; rank];
                for a in axes {
                    new[axis_of(*a, rank)?] = true;
                }
                let mut dims = x.iter();
                let shape = new.iter().map(|n| if *n { Some(1) } else { dims.next().copied() });
                let shape: Option<Vec<usize>> = shape.collect();
                shape
                    .filter(|_| dims.next().is_none())
                    .ok_or_else(|| format!("axes {axes:?} name one twice"))?
            }
            Reshape::Squeeze(axes) => {
                let mut gone = vec![false; x.len()];
                match axes {
                    None => gone.iter_mut().zip(x).for_each(|(g, d)| *g = *d == 1),
                    Some(axes) => {
                        for a in axes {
                            let a = axis_of(*a, x.len())?;
                            if x[a] != 1 {
                                return Err(format!("axis {a} of {x:?} is not 1"));
                            }
                            gone[a] = true;
                        }
                    }
                }
                x.iter().zip(gone).filter(|(_, g)| !g).map(|(d, _)| *d).collect()
            }
        }))
    }
}

impl Op for Reshape {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(self.shape(shapes[0])?.map(|s| vec![s]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let shape = match self.shape(&x.shape)? {
            Some(shape) => shape,
            None => {
                let to: Vec<i64> = operands[1].int_values()?.into_iter().map(i64::from).collect();
                resolved(&x.shape, &to)?
            }
        };
        Ok(vec![x.reshaped(cx, &shape)?])
    }

    fn keeps_rows(&self, shapes: &[&[usize]]) -> bool {
        match self.shape(shapes[0]) {
            Ok(Some(shape)) => !shape.is_empty() && shape.last() == shapes[0].last(),
            _ => false,
        }
    }
}
