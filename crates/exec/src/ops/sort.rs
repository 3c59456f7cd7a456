//! `topk` and `argsort`: the order of elements along an axis; equal ones stay in their order.

use std::cmp::Ordering;

use super::elements::indices;
use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Tensor, is_float, packed_strides};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Sort {
    axis: i64,
    ascending: bool,
    results: Results,
}

#[derive(Debug)]
enum Results {
    /// The first `k` values, and which they are if somebody asks.
    Top { k: usize, indices: Option<DataType> },
    /// Which they are, all of them.
    Order,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let results = if form.op.kind == "argsort" {
        Results::Order
    } else {
        let k = form.int("k")?.unwrap_or(1);
        let k = usize::try_from(k).map_err(|_| format!("the first {k} values"))?;
        // `sort = false` leaves the order open: it is sorted, too.
        Results::Top { k, indices: form.op.outputs.get(1).map(|_| form.output_dtype(1)).transpose()? }
    };
    if form.argument_dtype("x")? == DataType::Bool {
        return Err("of truth values".to_owned());
    }
    Ok(Box::new(Sort { axis: form.int("axis")?.unwrap_or(-1), ascending: form.flag("ascending")?, results }))
}

impl Sort {
    fn shape(&self, x: &[usize]) -> Result<(usize, Vec<usize>), Reason> {
        let axis = axis_of(self.axis, x.len())?;
        let mut shape = x.to_vec();
        if let Results::Top { k, .. } = self.results {
            if k > shape[axis] {
                return Err(format!("the first {k} values along an axis of size {}", shape[axis]));
            }
            shape[axis] = k;
        }
        Ok((axis, shape))
    }

    /// For each element of the result, its index along the axis. `values` are packed, of shape `x`.
    fn order<T: Copy>(
        &self,
        x: &[usize],
        shape: &[usize],
        axis: usize,
        values: &[T],
        compare: impl Fn(T, T) -> Ordering,
    ) -> Vec<usize> {
        let (strides, out_strides) = (packed_strides(x), packed_strides(shape));
        let mut result = vec![0; shape.iter().product()];
        if result.is_empty() {
            return result;
        }
        let mut lines = x.to_vec();
        lines[axis] = 1;
        let mut order: Vec<usize> = Vec::with_capacity(x[axis]);
        for at in indices(&lines) {
            let place = |strides: &[usize]| at.iter().zip(strides).map(|(i, s)| i * s).sum::<usize>();
            let (from, to) = (place(&strides), place(&out_strides));
            order.clear();
            order.extend(0..x[axis]);
            order.sort_by(|a, b| compare(values[from + a * strides[axis]], values[from + b * strides[axis]]));
            for (i, index) in order.iter().take(shape[axis]).enumerate() {
                result[to + i * out_strides[axis]] = *index;
            }
        }
        result
    }
}

/// NaN comes last in either direction, as numpy sorts.
fn floats(ascending: bool) -> impl Fn(f32, f32) -> Ordering {
    move |a, b| match (a.is_nan(), b.is_nan()) {
        (false, false) => {
            let order = a.partial_cmp(&b).unwrap_or(Ordering::Equal);
            if ascending { order } else { order.reverse() }
        }
        (a, b) => a.cmp(&b),
    }
}

impl Op for Sort {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let (_, shape) = self.shape(shapes[0])?;
        Ok(Some(match self.results {
            Results::Top { indices: Some(_), .. } => vec![shape.clone(), shape],
            _ => vec![shape],
        }))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = operands[0].to_packed(cx)?;
        let (axis, shape) = self.shape(&x.shape)?;
        let order = if is_float(x.dtype) {
            let values = x.packed_singles().ok_or("not packed")?;
            self.order(&x.shape, &shape, axis, values, floats(self.ascending))
        } else {
            let ascending = self.ascending;
            let compare = |a: i32, b: i32| if ascending { a.cmp(&b) } else { b.cmp(&a) };
            self.order(&x.shape, &shape, axis, &x.int_values()?, compare)
        };
        let as_ints = |dtype: DataType| {
            let ints = order.iter().map(|i| i32::try_from(*i).map_err(|e| e.to_string()));
            Ok::<_, Reason>(Tensor::ints(dtype, shape.clone(), ints.collect::<Result<_, _>>()?))
        };
        let Results::Top { indices: which, .. } = self.results else {
            return Ok(vec![as_ints(DataType::Int32)?]);
        };
        let strides = packed_strides(&x.shape);
        let starts = indices(&shape).zip(&order).map(|(mut at, i)| {
            at[axis] = *i;
            Some(at.iter().zip(&strides).map(|(i, s)| i * s).sum())
        });
        let values = super::elements::runs(cx, &x, shape.clone(), 1, 0.0, starts)?;
        Ok(match which {
            Some(dtype) => vec![values, as_ints(dtype)?],
            None => vec![values],
        })
    }
}
