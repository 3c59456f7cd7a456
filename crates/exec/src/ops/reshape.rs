//! `reshape`, `reshape_like`, `flatten2d`, `expand_dims`, `squeeze`: the same elements under another shape.

use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Tensor, count};

#[derive(Debug)]
enum Reshape {
    /// The shape written in the program: 0 keeps a dimension, -1 takes what is left.
    To(Vec<i64>, Zeros),
    /// The same, computed: the second operand.
    Computed(Zeros),
    /// Dimensions of the other operands, from and to the given ones.
    Like(Vec<(i64, Option<i64>)>),
    /// Two dimensions: those before an axis, and the others.
    Flatten(i64),
    Expand(Vec<i64>),
    /// `None`: every dimension of size 1.
    Squeeze(Option<Vec<i64>>),
}

/// Which dimension a 0 in a shape keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zeros {
    /// The one with the same index, counted from the front.
    FromFront,
    /// Counted from the end: since iOS 17.
    FromEnd,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let zeros = if form.is_before("CoreML7") { Zeros::FromFront } else { Zeros::FromEnd };
    Ok(Box::new(match form.op.kind.as_str() {
        "expand_dims" => Reshape::Expand(form.ints("axes")?.ok_or("`axes` is missing")?),
        "squeeze" => Reshape::Squeeze(form.ints("axes")?),
        "flatten2d" => Reshape::Flatten(form.int("axis")?.unwrap_or(1)),
        "reshape_like" => {
            let n = form.operand_list("ref_tensors")?;
            let (begins, ends) = (form.int_list("begins")?, form.int_list("ends")?);
            let masks = form.int_list("end_masks")?;
            if [begins.len(), ends.len(), masks.len()] != [n; 3] {
                return Err(format!("{n} tensors, {} begins, {} ends", begins.len(), ends.len()));
            }
            let ends = ends.into_iter().zip(masks).map(|(e, mask)| (mask == 0).then_some(e));
            Reshape::Like(begins.into_iter().zip(ends).collect())
        }
        _ => match form.ints_or_operand("shape")? {
            Some(shape) => Reshape::To(shape, zeros),
            None => Reshape::Computed(zeros),
        },
    }))
}

fn resolved(from: &[usize], to: &[i64], zeros: Zeros) -> Result<Vec<usize>, Reason> {
    let refuse = || format!("cannot reshape {from:?} to {to:?}");
    let kept = |i: usize| match zeros {
        Zeros::FromFront => from.get(i).copied(),
        // Beyond the front of the old shape there are dimensions of size 1.
        Zeros::FromEnd => Some((from.len() + i).checked_sub(to.len()).map_or(1, |i| from[i])),
    };
    let mut shape = Vec::with_capacity(to.len());
    let mut open = None;
    for (i, d) in to.iter().enumerate() {
        shape.push(match d {
            0 => kept(i).ok_or_else(refuse)?,
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
    /// The new shape, if it does not depend on values; `others` are the shapes of the other operands.
    fn shape(&self, x: &[usize], others: &[&[usize]]) -> Result<Option<Vec<usize>>, Reason> {
        Ok(Some(match self {
            Reshape::To(to, zeros) => resolved(x, to, *zeros)?,
            Reshape::Computed(_) => return Ok(None),
            Reshape::Like(parts) => {
                let mut shape = Vec::new();
                for (dims, (begin, end)) in others.iter().zip(parts) {
                    // As Python slices.
                    let bound = |i: i64| {
                        let size = i64::try_from(dims.len()).unwrap_or(i64::MAX);
                        let i = if i < 0 { i + size } else { i };
                        usize::try_from(i.clamp(0, size)).unwrap_or(0)
                    };
                    let (begin, end) = (bound(*begin), end.map_or(dims.len(), bound));
                    shape.extend_from_slice(dims.get(begin..end).unwrap_or(&[]));
                }
                if count(&shape) != count(x) {
                    return Err(format!("cannot reshape {x:?} to {shape:?}"));
                }
                shape
            }
            Reshape::Flatten(axis) => {
                let size = i64::try_from(x.len()).map_err(|e| e.to_string())?;
                let at = if *axis < 0 { axis + size } else { *axis };
                let at = usize::try_from(at).ok().filter(|at| *at <= x.len());
                let at = at.ok_or_else(|| format!("axis {axis} of a tensor of rank {size}"))?;
                vec![count(&x[..at]), count(&x[at..])]
            }
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
                            // MIL leaves longer dimensions alone.
                            gone[a] = x[a] == 1;
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
        Ok(self.shape(shapes[0], &shapes[1..])?.map(|s| vec![s]))
    }

    fn views(&self) -> bool {
        true
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let others: Vec<&[usize]> = operands[1..].iter().map(|t| t.shape.as_slice()).collect();
        let shape = match self {
            Reshape::Computed(zeros) => resolved(&x.shape, &super::wide(&operands[1])?, *zeros)?,
            _ => self.shape(&x.shape, &others)?.ok_or("a shape that is not known")?,
        };
        Ok(vec![x.reshaped(cx, &shape)?])
    }

    fn keeps_rows(&self, shapes: &[&[usize]]) -> bool {
        match self.shape(shapes[0], &shapes[1..]) {
            // It reads more than the rows it shows.
            _ if shapes.len() > 1 => false,
            Ok(Some(shape)) => !shape.is_empty() && shape.last() == shapes[0].last(),
            _ => false,
        }
    }
}
