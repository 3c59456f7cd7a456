//! `reduce_sum`, `reduce_max`, `reduce_argmax`, `reduce_log_sum_exp`, … over any axes.

use kvbaton_kernels::rows::{self, Isa, Reduction};
use kvbaton_mil::program::DataType;

use super::{Form, Op, Reason, axis_of, half};
use crate::tensor::{Context, Tensor, count, is_float};
use crate::tile::{self, Step};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One pass of a kernel, which rows can be fused with.
    Kernel(Reduction),
    /// Written below.
    Prod,
    L1Norm,
    L2Norm,
    LogSum,
    LogSumExp,
    ArgMax,
    ArgMin,
}

#[derive(Debug)]
struct Reduce {
    kind: Kind,
    /// `None`: all.
    axes: Option<Vec<i64>>,
    keep: bool,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let kind = match form.op.kind.as_str() {
        "reduce_sum" => Kind::Kernel(Reduction::Sum),
        "reduce_mean" => Kind::Kernel(Reduction::Mean),
        "reduce_max" => Kind::Kernel(Reduction::Max),
        "reduce_min" => Kind::Kernel(Reduction::Min),
        "reduce_sum_square" => Kind::Kernel(Reduction::SumOfSquares),
        "reduce_prod" => Kind::Prod,
        "reduce_l1_norm" => Kind::L1Norm,
        "reduce_l2_norm" => Kind::L2Norm,
        "reduce_log_sum" => Kind::LogSum,
        "reduce_log_sum_exp" => Kind::LogSumExp,
        "reduce_argmax" => Kind::ArgMax,
        _ => Kind::ArgMin,
    };
    let (dtype, x) = (form.dtype()?, form.argument_dtype("x")?);
    let index = matches!(kind, Kind::ArgMax | Kind::ArgMin);
    let axes = if index { Some(vec![form.int("axis")?.unwrap_or(-1)]) } else { form.ints("axes")? };
    let handled = match (is_float(x), index) {
        (_, true) => matches!(dtype, DataType::Int32 | DataType::UInt16),
        (true, false) => super::alike(dtype, x),
        (false, false) => dtype == x && x == DataType::Int32,
    };
    if !handled {
        return Err(format!("of {x} values to {dtype}"));
    }
    Ok(Box::new(Reduce { kind, axes, keep: form.flag("keep_dims")?, dtype }))
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

    /// One value from the floats of a row.
    fn float(&self, isa: Isa, row: &[f32]) -> f32 {
        match self.kind {
            Kind::Kernel(what) => rows::reduce(isa, what, row),
            Kind::Prod => row.iter().product(),
            Kind::L1Norm => row.iter().map(|x| x.abs()).sum(),
            Kind::L2Norm => rows::reduce(isa, Reduction::SumOfSquares, row).sqrt(),
            Kind::LogSum => rows::reduce(isa, Reduction::Sum, row).ln(),
            Kind::LogSumExp => {
                let top = rows::reduce(isa, Reduction::Max, row);
                // A row of nothing but -inf has no other logarithm.
                if top == f32::NEG_INFINITY {
                    return top;
                }
                row.iter().map(|x| (x - top).exp()).sum::<f32>().ln() + top
            }
            Kind::ArgMax | Kind::ArgMin => f32::NAN,
        }
    }

    /// One value from the integers of a row.
    fn int(&self, row: &[i32]) -> Result<i32, Reason> {
        let empty = || "of no values".to_owned();
        Ok(match self.kind {
            Kind::Kernel(Reduction::Sum | Reduction::SumOfFinite) => {
                row.iter().fold(0, |a, x| a.wrapping_add(*x))
            }
            Kind::Kernel(Reduction::SumOfSquares) => {
                row.iter().fold(0, |a, x| a.wrapping_add(x.wrapping_mul(*x)))
            }
            Kind::Kernel(Reduction::Mean) => {
                let len = i64::try_from(row.len()).map_err(|e| e.to_string())?;
                let sum: i64 = row.iter().map(|x| i64::from(*x)).sum();
                i32::try_from(sum.checked_div(len).ok_or_else(empty)?).map_err(|e| e.to_string())?
            }
            Kind::Kernel(Reduction::Max) => row.iter().copied().max().ok_or_else(empty)?,
            Kind::Kernel(Reduction::Min) => row.iter().copied().min().ok_or_else(empty)?,
            Kind::L1Norm => row.iter().fold(0, |a, x| a.wrapping_add(x.wrapping_abs())),
            Kind::L2Norm => whole(real(row).map(|x| x * x).sum::<f64>().sqrt()),
            Kind::LogSum => whole(real(row).sum::<f64>().ln()),
            Kind::LogSumExp => {
                let top = real(row).fold(f64::NEG_INFINITY, f64::max);
                whole(real(row).map(|x| (x - top).exp()).sum::<f64>().ln() + top)
            }
            _ => row.iter().fold(1, |a, x| a.wrapping_mul(*x)),
        })
    }
}

fn real(row: &[i32]) -> impl Iterator<Item = f64> {
    row.iter().map(|x| f64::from(*x))
}

/// Towards zero, as a result that MIL types as an integer is rounded.
#[expect(clippy::cast_possible_truncation, reason = "beyond the integers is the largest one")]
fn whole(x: f64) -> i32 {
    x as i32
}

/// The first place of the largest value (or the smallest); the first NaN is both.
fn extreme<T: PartialOrd + Copy>(row: &[T], largest: bool) -> Result<i32, Reason> {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        let beats = if largest { *x > row[best] } else { *x < row[best] };
        // Only a NaN is not equal to itself.
        #[expect(clippy::eq_op, reason = "the test for NaN of any type")]
        if row[best] != row[best] {
            break;
        } else if beats || *x != *x {
            best = i;
        }
    }
    if row.is_empty() {
        return Err("of no values".to_owned());
    }
    i32::try_from(best).map_err(|e| e.to_string())
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
        let number = count(&lead);
        if let (Kind::Kernel(what), true) = (self.kind, is_float(self.dtype)) {
            let step = Step::Reduce { what, half: half(self.dtype) };
            let values = tile::single(cx, step, &[x], &[len], &lead, 1)?;
            return Ok(vec![Tensor::floats(self.dtype, shape, values)]);
        }
        let index = matches!(self.kind, Kind::ArgMax | Kind::ArgMin);
        if is_float(x.dtype) {
            let packed = x.to_packed(cx)?;
            let values = packed.packed_singles().ok_or("not packed")?;
            let row = |i: usize| &values[i * len..][..len];
            if index {
                let places = (0..number).map(|i| extreme(row(i), self.kind == Kind::ArgMax));
                return Ok(vec![Tensor::ints(self.dtype, shape, places.collect::<Result<_, _>>()?)]);
            }
            let mut results = cx.pool.take(number);
            results.iter_mut().enumerate().for_each(|(i, v)| *v = self.float(cx.isa, row(i)));
            super::round(&mut results, self.dtype);
            return Ok(vec![Tensor::floats(self.dtype, shape, results)]);
        }
        let values = x.int_values()?;
        let row = |i: usize| &values[i * len..][..len];
        let results = (0..number).map(|i| match self.kind {
            Kind::ArgMax | Kind::ArgMin => extreme(row(i), self.kind == Kind::ArgMax),
            _ => self.int(row(i)),
        });
        Ok(vec![Tensor::ints(self.dtype, shape, results.collect::<Result<_, _>>()?)])
    }

    fn by_rows(&self, shapes: &[&[usize]]) -> Option<Vec<Step>> {
        let Kind::Kernel(what) = self.kind else { return None };
        let gone = self.reduced(shapes[0].len()).ok()?;
        let last_alone = gone.split_last().is_some_and(|(last, lead)| *last && !lead.contains(&true));
        (last_alone && self.keep && is_float(self.dtype))
            .then(|| vec![Step::Reduce { what, half: half(self.dtype) }])
    }
}
