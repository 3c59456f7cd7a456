//! `reduce_sum`, `reduce_mean`, `reduce_max`, `reduce_min`, `reduce_sum_square` over any axes.

use kvbaton_kernels::rows::Reduction;
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, axis_of, half};
use crate::tensor::{Context, Tensor, count};
use crate::tile::{self, Step};

#[derive(Debug)]
struct Reduce {
    what: Reduction,
    /// `None`: all.
    axes: Option<Vec<i64>>,
    keep: bool,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let what = match form.op.kind.as_str() {
        "reduce_sum" => Reduction::Sum,
        "reduce_mean" => Reduction::Mean,
        "reduce_max" => Reduction::Max,
        "reduce_min" => Reduction::Min,
        _ => Reduction::SumOfSquares,
    };
    let (axes, keep) = (form.ints("axes")?, form.flag("keep_dims")?);
    Ok(Box::new(Reduce { what, axes, keep, dtype: form.float_dtype()? }))
}

impl Reduce {
    /// Which dimensions go.
    fn reduced(&self, rank: usize) -> Result<Vec<bool>, Reason> {
        let Some(axes) = &self.axes else { return Ok(vec![true; rank]) };
        let mut gone = vec![false; rank];
        for a in axes {
            gone[axis_of(*a, rank)?] = true;
        }
        Ok(gone)
    }

    fn shape(&self, shape: &[usize], gone: &[bool]) -> Vec<usize> {
        let dims = shape.iter().zip(gone);
        dims.filter(|(_, g)| self.keep || !**g).map(|(d, g)| if *g { 1 } else { *d }).collect()
    }
}

impl Op for Reduce {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let gone = self.reduced(shapes[0].len())?;
        Ok(Some(vec![self.shape(shapes[0], &gone)]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let gone = self.reduced(x.rank())?;
        let shape = self.shape(&x.shape, &gone);
        // The reduced dimensions go last and become one.
        let (mut order, inner): (Vec<usize>, Vec<usize>) = (0..x.rank()).partition(|d| !gone[*d]);
        let mut rows: Vec<usize> = order.iter().map(|d| x.shape[*d]).collect();
        let len = count(&inner.iter().map(|d| x.shape[*d]).collect::<Vec<_>>());
        order.extend(inner);
        let lead = rows.clone();
        rows.push(len);
        let x = x.permuted(&order).reshaped(cx, &rows)?;
        let step = Step::Reduce { what: self.what, half: half(self.dtype) };
        let values = tile::single(cx, step, &[x], &[len], &lead, 1)?;
        Ok(vec![Tensor::floats(self.dtype, shape, values)])
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let gone = self.reduced(shapes[0].len()).ok()?;
        let last_alone = gone.split_last().is_some_and(|(last, lead)| *last && !lead.contains(&true));
        (last_alone && self.keep).then(|| vec![Step::Reduce { what: self.what, half: half(self.dtype) }])
    }
}
