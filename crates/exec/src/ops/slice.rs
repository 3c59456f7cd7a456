//! `slice_by_index`: a range of every dimension, with steps, masks and squeezed dimensions. `slice_by_size`, `reverse`.

use super::{Form, Op, Reason};
use crate::tensor::{Context, Data, Tensor, is_float};
use crate::tile::Step;
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Slice {
    bounds: Bounds,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(Slice { bounds: Bounds::of(form)?, dtype: form.dtype()? }))
}

/// Which part of a tensor a slice is.
#[derive(Debug)]
pub(super) struct Bounds {
    /// Begin and end, if they are known at load; else they are operands.
    known: Option<(Vec<i64>, Vec<i64>)>,
    stride: Option<Vec<i64>>,
    begin_mask: Option<Vec<bool>>,
    end_mask: Option<Vec<bool>>,
    squeeze_mask: Option<Vec<bool>>,
}

/// One dimension's share: `len` indices from `start` on, `step` apart; dropped from the shape if `squeeze`.
pub(super) struct Range {
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) step: i64,
    pub(super) squeeze: bool,
}

/// The shape of a slice.
pub(super) fn shape_of(ranges: &[Range]) -> Vec<usize> {
    ranges.iter().filter(|r| !r.squeeze).map(|r| r.len).collect()
}

impl Bounds {
    /// The slice that an operation names. Begin and end become its next operands if they are computed.
    pub(super) fn of(form: &mut Form<'_>) -> Result<Bounds, Reason> {
        let known = if form.constant("begin").is_some() && form.constant("end").is_some() {
            Some((form.ints("begin")?.unwrap_or_default(), form.ints("end")?.unwrap_or_default()))
        } else {
            form.operand("begin")?;
            form.operand("end")?;
            None
        };
        Ok(Bounds {
            known,
            stride: form.ints("stride")?,
            begin_mask: form.flags("begin_mask")?,
            end_mask: form.flags("end_mask")?,
            squeeze_mask: form.flags("squeeze_mask")?,
        })
    }

    /// The ranges, if they are known at load.
    pub(super) fn known(&self, shape: &[usize]) -> Result<Option<Vec<Range>>, Reason> {
        let Some((begin, end)) = &self.known else { return Ok(None) };
        self.ranges(shape, begin, end).map(Some)
    }

    /// The ranges, with begin and end from `computed` if they are not known at load.
    pub(super) fn resolve(&self, shape: &[usize], computed: &[Tensor]) -> Result<Vec<Range>, Reason> {
        let ints =
            |t: &Tensor| Ok::<_, Reason>(t.int_values()?.into_iter().map(i64::from).collect::<Vec<_>>());
        match (&self.known, computed) {
            (Some((begin, end)), _) => self.ranges(shape, begin, end),
            (None, [begin, end]) => self.ranges(shape, &ints(begin)?, &ints(end)?),
            (None, _) => Err("`begin` and `end` are missing".to_owned()),
        }
    }

    fn ranges(&self, shape: &[usize], begin: &[i64], end: &[i64]) -> Result<Vec<Range>, Reason> {
        let rank = shape.len();
        let flag =
            |mask: &Option<Vec<bool>>, d: usize| mask.as_ref().is_some_and(|m| m.get(d) == Some(&true));
        let lens = [begin.len(), end.len(), self.stride.as_ref().map_or(rank, Vec::len)];
        if lens.iter().any(|n| *n != rank) {
            return Err(format!("begin {begin:?} and end {end:?} of a tensor of shape {shape:?}"));
        }
        (0..rank)
            .map(|d| {
                let size = i64::try_from(shape[d]).map_err(|e| e.to_string())?;
                let step = self.stride.as_ref().map_or(1, |s| s[d]);
                if step == 0 {
                    return Err(format!("stride 0 along axis {d}"));
                }
                let squeeze = flag(&self.squeeze_mask, d);
                let from_end = |v: i64| if v < 0 { v + size } else { v };
                if squeeze {
                    let start = from_end(begin[d]);
                    let start = usize::try_from(start).ok().filter(|s| *s < shape[d]);
                    let start =
                        start.ok_or_else(|| format!("index {} along axis {d} of size {size}", begin[d]))?;
                    return Ok(Range { start, len: 1, step: 1, squeeze });
                }
                // As Python slices: bounds beyond the ends are cut, for either direction.
                let (low, high) = if step > 0 { (0, size) } else { (-1, size - 1) };
                let start = if flag(&self.begin_mask, d) {
                    if step > 0 { 0 } else { size - 1 }
                } else {
                    from_end(begin[d]).clamp(low, high)
                };
                let stop = if flag(&self.end_mask, d) {
                    if step > 0 { size } else { -1 }
                } else {
                    from_end(end[d]).clamp(low, high)
                };
                let span = if step > 0 { stop - start } else { start - stop };
                let len = if span <= 0 { 0 } else { (span + step.abs() - 1) / step.abs() };
                let whole = |v: i64| usize::try_from(v).map_err(|e| e.to_string());
                Ok(Range { start: if len == 0 { 0 } else { whole(start)? }, len: whole(len)?, step, squeeze })
            })
            .collect()
    }
}

impl Op for Slice {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(self.bounds.known(shapes[0])?.map(|ranges| vec![shape_of(&ranges)]))
    }

    fn views(&self) -> bool {
        true
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let mut view = operands[0].clone();
        let ranges = self.bounds.resolve(&view.shape, &operands[1..])?;
        for (d, r) in ranges.iter().enumerate() {
            match usize::try_from(r.step) {
                Ok(step) => view = view.narrowed(d, r.start, r.len, step),
                Err(_) => view = reversed(cx, &view, d, r)?,
            }
        }
        let keep = |v: &[usize]| v.iter().zip(&ranges).filter(|(_, r)| !r.squeeze).map(|(v, _)| *v).collect();
        Ok(vec![Tensor { shape: keep(&view.shape), strides: keep(&view.strides), ..view }])
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let ranges = self.bounds.known(shapes[0]).ok()??;
        let (last, lead) = ranges.split_last()?;
        let whole = lead.iter().zip(shapes[0]).all(|(r, d)| r.len == *d && r.step == 1 && !r.squeeze);
        (is_float(self.dtype) && whole && last.step == 1 && !last.squeeze)
            .then(|| vec![Step::Slice { start: last.start }])
    }
}

#[derive(Debug)]
struct SliceBySize {
    /// Known at load, or the operands 1 and 2.
    begin: Option<Vec<i64>>,
    size: Option<Vec<i64>>,
}

pub(super) fn by_size(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let known = |form: &Form<'_>, name| form.constant(name).map(|_| form.ints(name)).transpose();
    let (begin, size) = (known(form, "begin")?.flatten(), known(form, "size")?.flatten());
    form.operand("begin")?;
    form.operand("size")?;
    Ok(Box::new(SliceBySize { begin, size }))
}

/// Start and length in every dimension; a size of -1 takes what is left.
fn sized(x: &[usize], begin: &[i64], size: &[i64]) -> Result<Vec<(usize, usize)>, Reason> {
    let refuse = || format!("begin {begin:?} and size {size:?} of a tensor of shape {x:?}");
    if begin.len() != x.len() || size.len() != x.len() {
        return Err(refuse());
    }
    let part = |d: usize| {
        let whole = i64::try_from(x[d]).ok()?;
        let start = if begin[d] < 0 { begin[d] + whole } else { begin[d] };
        let len = if size[d] == -1 { whole - start } else { size[d] };
        let (start, len) = (usize::try_from(start).ok()?, usize::try_from(len).ok()?);
        (start.checked_add(len)? <= x[d]).then_some((start, len))
    };
    (0..x.len()).map(|d| part(d).ok_or_else(refuse)).collect()
}

impl Op for SliceBySize {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let (Some(begin), Some(size)) = (&self.begin, &self.size) else { return Ok(None) };
        Ok(Some(vec![sized(shapes[0], begin, size)?.into_iter().map(|(_, len)| len).collect()]))
    }

    fn views(&self) -> bool {
        true
    }

    fn eval(&self, _: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let mut view = operands[0].clone();
        let parts = sized(&view.shape, &super::wide(&operands[1])?, &super::wide(&operands[2])?)?;
        for (d, (start, len)) in parts.into_iter().enumerate() {
            view = view.narrowed(d, start, len, 1);
        }
        Ok(vec![view])
    }
}

#[derive(Debug)]
struct Reverse {
    /// `None`: all.
    axes: Option<Vec<i64>>,
}

pub(super) fn reverse(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(Reverse { axes: form.ints("axes")? }))
}

impl Reverse {
    fn dims(&self, rank: usize) -> Result<Vec<usize>, Reason> {
        match &self.axes {
            Some(axes) => axes.iter().map(|a| super::axis_of(*a, rank)).collect(),
            None => Ok((0..rank).collect()),
        }
    }
}

impl Op for Reverse {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        self.dims(shapes[0].len())?;
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let mut view = operands[0].clone();
        for d in self.dims(view.rank())? {
            let len = view.shape[d];
            view = reversed(
                cx,
                &view,
                d,
                &Range { start: len.saturating_sub(1), len, step: -1, squeeze: false },
            )?;
        }
        Ok(vec![view])
    }
}

/// Indices of dimension `d` backwards: views have no negative strides, so this copies.
fn reversed(cx: &Context, x: &Tensor, d: usize, range: &Range) -> Result<Tensor, Reason> {
    let step = usize::try_from(-range.step).map_err(|e| e.to_string())?;
    let mut order: Vec<usize> = (0..x.rank()).collect();
    order.swap(0, d);
    let turned = x.permuted(&order);
    let mut shape = turned.shape.clone();
    shape[0] = range.len;
    let slices = (0..range.len).map(|i| turned.narrowed(0, range.start - i * step, 1, 1));
    let tensor = if is_float(x.dtype) {
        let mut values = cx.pool.take(crate::tensor::count(&shape));
        let size = values.len() / range.len.max(1);
        for (slice, out) in slices.zip(values.chunks_mut(size.max(1))) {
            slice.copy_to(cx.isa, out)?;
        }
        Tensor::floats(x.dtype, shape, values)
    } else if let Data::Bool(_) = x.data {
        let all = slices.map(|s| s.bool_values()).collect::<Result<Vec<_>, _>>()?;
        Tensor::bools(shape, all.concat())
    } else {
        let all = slices.map(|s| s.int_values()).collect::<Result<Vec<_>, _>>()?;
        Tensor::ints(x.dtype, shape, all.concat())
    };
    Ok(tensor.permuted(&order))
}
