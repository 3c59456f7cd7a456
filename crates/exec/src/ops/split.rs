//! `split`: equal or given parts of one axis, as views.

use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Tensor, is_float};
use crate::tile::Step;
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Split {
    axis: i64,
    parts: Parts,
    dtype: DataType,
}

#[derive(Debug)]
enum Parts {
    Equal(usize),
    Sizes(Vec<usize>),
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let axis = form.int("axis")?.ok_or("`axis` is missing")?;
    let size = |n: i64| usize::try_from(n).map_err(|_| format!("a part of size {n}"));
    let parts = match form.ints("split_sizes")? {
        Some(sizes) => Parts::Sizes(sizes.into_iter().map(size).collect::<Result<_, _>>()?),
        None => Parts::Equal(size(form.int("num_splits")?.ok_or("`num_splits` is missing")?)?),
    };
    Ok(Box::new(Split { axis, parts, dtype: form.dtype()? }))
}

impl Split {
    fn sizes(&self, shape: &[usize]) -> Result<(usize, Vec<usize>), Reason> {
        let axis = axis_of(self.axis, shape.len())?;
        let sizes = match &self.parts {
            Parts::Equal(n) if *n > 0 && shape[axis].is_multiple_of(*n) => vec![shape[axis] / n; *n],
            Parts::Equal(n) => return Err(format!("{} in {n} equal parts", shape[axis])),
            Parts::Sizes(sizes) => sizes.clone(),
        };
        if sizes.iter().sum::<usize>() != shape[axis] {
            return Err(format!("parts {sizes:?} of {}", shape[axis]));
        }
        Ok((axis, sizes))
    }
}

impl Op for Split {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let (axis, sizes) = self.sizes(shapes[0])?;
        let part = |n| {
            let mut shape = shapes[0].to_vec();
            shape[axis] = n;
            shape
        };
        Ok(Some(sizes.into_iter().map(part).collect()))
    }

    fn views(&self) -> bool {
        true
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let (axis, sizes) = self.sizes(&operands[0].shape)?;
        let mut at = 0;
        let mut part = |n| {
            at += n;
            operands[0].narrowed(axis, at - n, n, 1)
        };
        Ok(sizes.into_iter().map(&mut part).collect())
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let (axis, sizes) = self.sizes(shapes[0]).ok()?;
        let mut at = 0;
        let mut part = |n| {
            at += n;
            Step::Slice { start: at - n }
        };
        (is_float(self.dtype) && axis + 1 == shapes[0].len())
            .then(|| sizes.into_iter().map(&mut part).collect())
    }
}
