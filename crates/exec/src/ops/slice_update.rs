//! `slice_update`: a tensor with a slice of it replaced; in place when nobody else needs the tensor.

use std::sync::Arc;

use kvbaton_kernels::rows;

use super::slice::{Bounds, Range, shape_of};
use super::{Form, Op, Reason, alike};
use crate::tensor::{Context, Data, RowOffsets, Tensor, count};

#[derive(Debug)]
struct SliceUpdate {
    bounds: Bounds,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    form.operand("update")?;
    let bounds = Bounds::of(form)?;
    let (x, update, dtype) = (form.argument_dtype("x")?, form.argument_dtype("update")?, form.dtype()?);
    if !alike(x, dtype) || !alike(update, dtype) {
        return Err(format!("of {x} values by {update} values"));
    }
    Ok(Box::new(SliceUpdate { bounds }))
}

impl Op for SliceUpdate {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        if let Some(ranges) = self.bounds.known(shapes[0])? {
            fits(&ranges, shapes[1])?;
        }
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn updates(&self) -> bool {
        true
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        self.eval_owned(cx, operands.to_vec())
    }

    fn eval_owned(&self, cx: &Context, mut operands: Vec<Tensor>) -> Result<Vec<Tensor>, Reason> {
        let ranges = self.bounds.resolve(&operands[0].shape, &operands[2..])?;
        fits(&ranges, &operands[1].shape)?;
        let update = operands.swap_remove(1);
        let mut x = operands.swap_remove(0).into_exclusive(cx)?;
        let positions = Positions::new(&x, &ranges);
        let once = "made exclusive above";
        match &mut x.data {
            Data::Float(values) => {
                let values = Arc::get_mut(values).expect(once);
                let update = update.to_packed(cx)?;
                let from = update.packed_singles().ok_or("not packed")?;
                positions.each_run(from, |at, run| values[at..at + run.len()].copy_from_slice(run));
            }
            Data::State(bytes) => {
                let bytes = Arc::get_mut(bytes).expect(once);
                let values = rows::as_halves_mut(bytes).ok_or("a state of half elements")?;
                let update = update.to_packed(cx)?;
                let from = update.packed_singles().ok_or("not packed")?;
                positions.each_run(from, |at, run| {
                    rows::narrow(cx.isa, run, &mut values[at..at + run.len()]);
                });
            }
            Data::Int(values) => {
                let values = Arc::get_mut(values).expect(once);
                positions.each_run(&update.int_values()?, |at, run| {
                    values[at..at + run.len()].copy_from_slice(run);
                });
            }
            Data::Bool(values) => {
                let values = Arc::get_mut(values).expect(once);
                positions.each_run(&update.bool_values()?, |at, run| {
                    values[at..at + run.len()].copy_from_slice(run);
                });
            }
            Data::Weights(_) | Data::Half(_) | Data::Compressed(_) | Data::Given(_) => {
                return Err("not exclusive".to_owned());
            }
        }
        Ok(vec![x])
    }
}

fn fits(ranges: &[Range], update: &[usize]) -> Result<(), Reason> {
    let slice = shape_of(ranges);
    if slice == update { Ok(()) } else { Err(format!("an update {update:?} of a slice {slice:?}")) }
}

/// Where a slice's elements are stored: runs of elements side by side.
struct Positions {
    /// Outer dimensions that go forwards; backwards ones are turned round by `index`.
    outer: RowOffsets,
    /// Sizes of the outer dimensions, and which of them run backwards.
    dims: Vec<(usize, bool)>,
    run: usize,
    total: usize,
}

impl Positions {
    fn new(x: &Tensor, ranges: &[Range]) -> Positions {
        let mut view = x.clone();
        for (d, r) in ranges.iter().enumerate() {
            let step = usize::try_from(r.step.unsigned_abs()).unwrap_or(usize::MAX);
            // A backwards range is seen from its last index.
            let first = if r.step < 0 && r.len > 0 { r.start - (r.len - 1) * step } else { r.start };
            view = view.narrowed(d, first, r.len, step);
        }
        let mut from = view.rank();
        while from > 0 && ranges[from - 1].step > 0 && view.is_packed_from(from - 1) {
            from -= 1;
        }
        Positions {
            outer: RowOffsets::new(&view.shape[..from], &view.strides[..from], view.offset),
            dims: ranges[..from].iter().map(|r| (r.len, r.step < 0)).collect(),
            run: count(&view.shape[from..]),
            total: view.count(),
        }
    }

    /// Calls `write` with the position of each run and the values of `from` for it.
    fn each_run<T>(&self, from: &[T], mut write: impl FnMut(usize, &[T])) {
        if self.total == 0 {
            return;
        }
        let backwards = self.dims.iter().any(|(_, back)| *back);
        for (i, run) in from.chunks_exact(self.run).enumerate() {
            let row = if backwards { self.turned(i) } else { i };
            write(self.outer.get(row), run);
        }
    }

    /// The row whose indices along backwards dimensions are counted from their ends.
    fn turned(&self, row: usize) -> usize {
        let (mut rest, mut turned, mut scale) = (row, 0, 1);
        for (len, back) in self.dims.iter().rev() {
            let i = rest % len;
            turned += scale * if *back { len - 1 - i } else { i };
            rest /= len;
            scale *= len;
        }
        turned
    }
}
