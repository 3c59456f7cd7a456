//! `fill`, `fill_like`, `one_hot`, `band_part`, `non_zero`: tensors made of a value, and where values are not zero.

use super::elements::{self, indices};
use super::places::Check;
use super::{Form, Op, Reason, axis_of};
use crate::tensor::{Context, Data, Tensor, is_float};
use kvbaton_mil::program::DataType;

/// A shape that is longer than this is a mistake.
const LIMIT: usize = 1 << 30;

#[derive(Debug)]
struct Fill {
    /// Known at load, or the operand's values.
    shape: Option<Vec<i64>>,
    value: f64,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    let shape = form.ints_or_operand("shape")?;
    Ok(Box::new(Fill { shape, value: form.number("value")?.unwrap_or(0.0), dtype: form.dtype()? }))
}

fn sizes(shape: &[i64]) -> Result<Vec<usize>, Reason> {
    let sizes: Option<Vec<usize>> = shape.iter().map(|d| usize::try_from(*d).ok()).collect();
    let total =
        |s: &Vec<usize>| s.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).is_some_and(|n| n <= LIMIT);
    sizes.filter(total).ok_or_else(|| format!("shape {shape:?}"))
}

impl Op for Fill {
    fn infer(&self, _: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        self.shape.as_ref().map(|s| Ok(vec![sizes(s)?])).transpose()
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape = match (&self.shape, operands.first()) {
            (Some(shape), _) => sizes(shape)?,
            (None, Some(shape)) => sizes(&super::wide(shape)?)?,
            (None, None) => return Err("`shape` is missing".to_owned()),
        };
        Ok(vec![elements::filled(cx, self.dtype, shape, self.value)])
    }
}

#[derive(Debug)]
struct FillLike {
    value: f64,
    dtype: DataType,
}

pub(super) fn like(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("ref_tensor")?;
    Ok(Box::new(FillLike { value: form.number("value")?.unwrap_or(0.0), dtype: form.dtype()? }))
}

impl Op for FillLike {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        Ok(vec![elements::filled(cx, self.dtype, operands[0].shape.clone(), self.value)])
    }
}

#[derive(Debug)]
struct OneHot {
    axis: i64,
    /// Known at load, or the second operand.
    size: Option<i64>,
    on: f64,
    off: f64,
    dtype: DataType,
}

pub(super) fn one_hot(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("indices")?;
    let size = match form.ints_or_operand("one_hot_vector_size")?.as_deref() {
        None => None,
        Some([size]) => Some(*size),
        Some(sizes) => return Err(format!("`one_hot_vector_size` has {} values, not one", sizes.len())),
    };
    Ok(Box::new(OneHot {
        axis: form.int("axis")?.unwrap_or(-1),
        size,
        on: form.number("on_value")?.unwrap_or(1.0),
        off: form.number("off_value")?.unwrap_or(0.0),
        dtype: form.dtype()?,
    }))
}

impl OneHot {
    fn shape(&self, indices: &[usize], size: i64) -> Result<(usize, Vec<usize>), Reason> {
        let axis = axis_of(self.axis, indices.len() + 1)?;
        let mut shape: Vec<i64> = indices.iter().map(|d| i64::try_from(*d).unwrap_or(i64::MAX)).collect();
        shape.insert(axis, size);
        Ok((axis, sizes(&shape)?))
    }
}

impl Op for OneHot {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        let Some(size) = self.size else { return Ok(None) };
        Ok(Some(vec![self.shape(shapes[0], size)?.1]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let size = match (self.size, operands.get(1)) {
            (Some(size), _) => size,
            (None, Some(size)) => super::wide(size)?.first().copied().ok_or("no size")?,
            (None, None) => return Err("`one_hot_vector_size` is missing".to_owned()),
        };
        let (axis, shape) = self.shape(&operands[0].shape, size)?;
        let places: Result<Vec<usize>, Reason> = operands[0]
            .int_values()?
            .into_iter()
            .map(|i| Check::FromEnd.place(i, axis, shape[axis]))
            .collect();
        let inner: usize = shape[axis + 1..].iter().product();
        let places = places?;
        // The two values, and which of them each element is.
        let pair = Tensor::floats(DataType::Float32, vec![2], {
            let mut values = cx.pool.take(2);
            #[expect(clippy::cast_possible_truncation, reason = "values of the type")]
            values.copy_from_slice(&[self.off as f32, self.on as f32]);
            values
        });
        let pair = match self.dtype {
            DataType::Bool => Tensor::bools(vec![2], vec![self.off != 0.0, self.on != 0.0]),
            dtype if is_float(dtype) => Tensor { dtype, ..pair },
            #[expect(clippy::cast_possible_truncation, reason = "values of the type")]
            dtype => Tensor::ints(dtype, vec![2], vec![self.off as i32, self.on as i32]),
        };
        let starts = (0..shape.iter().product()).map(|at: usize| {
            let (outer, i) = (at / (inner * shape[axis]), at / inner % shape[axis]);
            Some(usize::from(places[outer * inner + at % inner] == i))
        });
        Ok(vec![elements::runs(cx, &pair, shape.clone(), 1, 0.0, starts)?])
    }
}

#[derive(Debug)]
struct BandPart {
    /// Diagonals kept below and above the main one; all when negative.
    lower: i64,
    upper: i64,
}

pub(super) fn band_part(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let all = |name| Ok::<_, Reason>(form.int(name)?.unwrap_or(-1));
    Ok(Box::new(BandPart { lower: all("lower")?, upper: all("upper")? }))
}

impl BandPart {
    fn keeps(&self, row: usize, column: usize) -> bool {
        let within = |distance: usize, limit: i64| usize::try_from(limit).map_or(true, |l| distance <= l);
        if row >= column { within(row - column, self.lower) } else { within(column - row, self.upper) }
    }
}

impl Op for BandPart {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        if shapes[0].len() < 2 {
            return Err(format!("of a tensor of shape {:?}", shapes[0]));
        }
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let shape = operands[0].shape.clone();
        self.infer(&[&shape])?;
        let starts = indices(&shape).enumerate().map(|(i, at)| {
            let [.., row, column] = at.as_slice() else { return None };
            self.keeps(*row, *column).then_some(i)
        });
        Ok(vec![elements::runs(cx, &operands[0], shape.clone(), 1, 0.0, starts)?])
    }
}

#[derive(Debug)]
struct NonZero;

pub(super) fn non_zero(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    Ok(Box::new(NonZero))
}

impl Op for NonZero {
    fn infer(&self, _: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        Ok(None)
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let set: Vec<bool> = match &x.data {
            Data::Bool(_) => x.bool_values()?,
            Data::Int(_) => x.int_values()?.into_iter().map(|v| v != 0).collect(),
            _ => x.float_values(cx.isa)?.into_iter().map(|v| v != 0.0).collect(),
        };
        let rows = indices(&x.shape).zip(&set).filter(|(_, set)| **set).flat_map(|(at, _)| at);
        let values = rows.map(|i| i32::try_from(i).map_err(|e| e.to_string()));
        let number = set.iter().filter(|s| **s).count();
        Ok(vec![Tensor::ints(DataType::Int32, vec![number, x.rank()], values.collect::<Result<_, _>>()?)])
    }
}
