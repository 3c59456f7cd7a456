//! `scatter`, `scatter_along_axis`, `scatter_nd`: slices of a tensor replaced, or combined with others, by index.

use std::sync::Arc;

use half::f16;
use kvbaton_kernels::rows;
use kvbaton_mil::program::DataType;

use super::elements::indices;
use super::places::Check;
use super::{Form, Op, Reason, axis_of, half};
use crate::tensor::{Context, Data, Tensor, count, is_float, packed_strides};

#[derive(Debug)]
struct Scatter {
    kind: Kind,
    mode: Mode,
    check: Check,
    dtype: DataType,
}

#[derive(Debug)]
enum Kind {
    Slices { axis: i64 },
    AlongAxis { axis: i64 },
    Nd,
}

#[derive(Clone, Copy, Debug)]
enum Mode {
    Update,
    Add,
    Sub,
    Mul,
    Div,
    Max,
    Min,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    for name in ["data", "indices", "updates"] {
        form.operand(name)?;
    }
    let axis = form.int("axis")?.unwrap_or(0);
    let kind = match form.op.kind.as_str() {
        "scatter" => Kind::Slices { axis },
        "scatter_along_axis" => Kind::AlongAxis { axis },
        _ => Kind::Nd,
    };
    let mode = match form.text("mode")?.unwrap_or("add") {
        "update" => Mode::Update,
        "add" => Mode::Add,
        "sub" => Mode::Sub,
        "mul" => Mode::Mul,
        "div" => Mode::Div,
        "max" => Mode::Max,
        "min" => Mode::Min,
        other => return Err(format!("mode {other}")),
    };
    let dtype = form.dtype()?;
    let (data, updates) = (form.argument_dtype("data")?, form.argument_dtype("updates")?);
    if !super::alike(data, dtype) || !super::alike(updates, dtype) || dtype == DataType::Bool {
        return Err(format!("of {updates} values into {data} ones, to {dtype}"));
    }
    Ok(Box::new(Scatter { kind, mode, check: Check::of(form)?, dtype }))
}

impl Mode {
    fn float(self, a: f32, b: f32) -> f32 {
        match self {
            Mode::Update => b,
            Mode::Add => a + b,
            Mode::Sub => a - b,
            Mode::Mul => a * b,
            Mode::Div => a / b,
            // NaN wins, as in numpy's maximum and minimum.
            Mode::Max => {
                if a.is_nan() || a > b {
                    a
                } else {
                    b
                }
            }
            Mode::Min => {
                if a.is_nan() || a < b {
                    a
                } else {
                    b
                }
            }
        }
    }

    fn int(self, a: i32, b: i32) -> Result<i32, Reason> {
        Ok(match self {
            Mode::Update => b,
            Mode::Add => a.wrapping_add(b),
            Mode::Sub => a.wrapping_sub(b),
            Mode::Mul => a.wrapping_mul(b),
            Mode::Div => a.checked_div(b).ok_or_else(|| format!("{a} divided by {b}"))?,
            Mode::Max => a.max(b),
            Mode::Min => a.min(b),
        })
    }
}

impl Scatter {
    fn check_shapes(&self, data: &[usize], index: &[usize], updates: &[usize]) -> Result<(), Reason> {
        let refuse = || format!("data {data:?}, indices {index:?} and updates {updates:?}");
        let fits = match self.kind {
            Kind::Slices { axis } => {
                let axis = axis_of(axis, data.len())?;
                [&data[..axis], index, &data[axis + 1..]].concat() == updates
            }
            Kind::AlongAxis { axis } => {
                let axis = axis_of(axis, data.len())?;
                let alike = |(d, (a, b)): (usize, (&usize, &usize))| d == axis || a == b;
                index == updates && data.len() == index.len() && data.iter().zip(index).enumerate().all(alike)
            }
            Kind::Nd => match index.split_last() {
                Some((depth, lead)) => *depth <= data.len() && [lead, &data[*depth..]].concat() == updates,
                None => false,
            },
        };
        if fits { Ok(()) } else { Err(refuse()) }
    }

    /// Where each run of the updates goes in `data`, packed, and how long runs are.
    fn starts(&self, data: &[usize], index: &Tensor) -> Result<(Vec<usize>, usize), Reason> {
        let values = index.int_values()?;
        let strides = packed_strides(data);
        match self.kind {
            Kind::Slices { axis } => {
                let axis = axis_of(axis, data.len())?;
                let (size, inner) = (data[axis], count(&data[axis + 1..]));
                let places: Result<Vec<usize>, Reason> =
                    values.into_iter().map(|i| self.check.place(i, axis, size)).collect();
                let places = places?;
                let outer = count(&data[..axis]);
                let starts = (0..outer).flat_map(|o| places.iter().map(move |p| (o * size + p) * inner));
                Ok((starts.collect(), inner))
            }
            Kind::AlongAxis { axis } => {
                let axis = axis_of(axis, data.len())?;
                let starts = indices(&index.shape).zip(values).map(|(mut at, i)| {
                    at[axis] = self.check.place(i, axis, data[axis])?;
                    Ok(at.iter().zip(&strides).map(|(i, s)| i * s).sum())
                });
                Ok((starts.collect::<Result<_, Reason>>()?, 1))
            }
            Kind::Nd => {
                let (depth, lead) = index.shape.split_last().ok_or("indices are a scalar")?;
                let starts = (0..count(lead)).map(|row| {
                    (0..*depth).try_fold(0, |sum, d| {
                        Ok(sum + self.check.place(values[row * depth + d], d, data[d])? * strides[d])
                    })
                });
                Ok((starts.collect::<Result<_, Reason>>()?, count(&data[*depth..])))
            }
        }
    }
}

impl Op for Scatter {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        self.check_shapes(shapes[0], shapes[1], shapes[2])?;
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn updates(&self) -> bool {
        true
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        self.eval_owned(cx, operands.to_vec())
    }

    fn eval_owned(&self, cx: &Context, mut operands: Vec<Tensor>) -> Result<Vec<Tensor>, Reason> {
        self.check_shapes(&operands[0].shape, &operands[1].shape, &operands[2].shape)?;
        let (starts, run) = self.starts(&operands[0].shape, &operands[1])?;
        let updates = operands.swap_remove(2);
        let mut data = operands.swap_remove(0).into_exclusive_packed(cx)?;
        let at = data.offset;
        let once = "made exclusive above";
        if is_float(self.dtype) {
            let updates = updates.to_packed(cx)?;
            let from = updates.packed_singles().ok_or("not packed")?;
            // Each step rounds, as it does where the sums are kept in the tensor.
            let combined = |old: f32, new: f32| {
                let value = self.mode.float(old, new);
                if half(self.dtype) { f16::from_f32(value).to_f32() } else { value }
            };
            let each = starts.iter().zip(from.chunks(run.max(1)));
            match &mut data.data {
                Data::Float(values) => {
                    let values = Arc::get_mut(values).expect(once);
                    for (start, from) in each {
                        let to = &mut values[at + start..][..run];
                        to.iter_mut().zip(from).for_each(|(a, b)| *a = combined(*a, *b));
                    }
                }
                Data::State(bytes) => {
                    let bytes = Arc::get_mut(bytes).expect(once);
                    let values = rows::as_halves_mut(bytes).ok_or("a state of half elements")?;
                    for (start, from) in each {
                        let to = &mut values[at + start..][..run];
                        to.iter_mut()
                            .zip(from)
                            .for_each(|(a, b)| *a = f16::from_f32(combined(a.to_f32(), *b)));
                    }
                }
                _ => return Err("not exclusive".to_owned()),
            }
            return Ok(vec![data]);
        }
        let from = updates.int_values()?;
        let Data::Int(values) = &mut data.data else { return Err("not integers".to_owned()) };
        let values = Arc::get_mut(values).expect(once);
        for (start, from) in starts.iter().zip(from.chunks(run.max(1))) {
            for (a, b) in values[at + start..][..run].iter_mut().zip(from) {
                *a = self.mode.int(*a, *b)?;
            }
        }
        Ok(vec![data])
    }
}
