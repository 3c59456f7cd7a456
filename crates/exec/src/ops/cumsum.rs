//! `cumsum`: sums of all elements up to each, along one axis.

use super::{Form, Op, Reason, axis_of, half};
use crate::tensor::{Context, Tensor, count, is_float};
use kvbaton_mil::program::DataType;

#[derive(Debug)]
struct Cumsum {
    axis: i64,
    /// Each sum leaves out its own element.
    exclusive: bool,
    /// From the end.
    reverse: bool,
    dtype: DataType,
}

pub(super) fn build(form: &mut Form<'_>) -> Result<Box<dyn Op>, Reason> {
    form.operand("x")?;
    let dtype = form.dtype()?;
    if !is_float(dtype) && dtype != DataType::Int32 {
        return Err(format!("on {dtype} values"));
    }
    let (exclusive, reverse) = (form.flag("exclusive")?, form.flag("reverse")?);
    Ok(Box::new(Cumsum { axis: form.int("axis")?.unwrap_or(0), exclusive, reverse, dtype }))
}

impl Cumsum {
    /// Sums along the axis, in place. Floats are summed in `f32`, and each sum is rounded by itself.
    fn sum<T: Copy + Default>(
        &self,
        shape: &[usize],
        axis: usize,
        values: &mut [T],
        add: impl Fn(T, T) -> T,
        round: impl Fn(T) -> T,
    ) {
        let (size, inner) = (shape[axis], count(&shape[axis + 1..]));
        for start in (0..count(&shape[..axis])).flat_map(|o| (0..inner).map(move |i| o * size * inner + i)) {
            let mut sum = T::default();
            for i in 0..size {
                let i = if self.reverse { size - 1 - i } else { i };
                let value = &mut values[start + i * inner];
                let with = add(sum, *value);
                *value = round(if self.exclusive { sum } else { with });
                sum = with;
            }
        }
    }
}

impl Op for Cumsum {
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason> {
        axis_of(self.axis, shapes[0].len())?;
        Ok(Some(vec![shapes[0].to_vec()]))
    }

    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason> {
        let x = &operands[0];
        let axis = axis_of(self.axis, x.rank())?;
        if is_float(self.dtype) {
            let mut values = cx.pool.take(x.count());
            x.copy_to(cx.isa, &mut values)?;
            let round = |v: f32| if half(self.dtype) { half::f16::from_f32(v).to_f32() } else { v };
            self.sum(&x.shape, axis, &mut values, |a, b| a + b, round);
            return Ok(vec![Tensor::floats(self.dtype, x.shape.clone(), values)]);
        }
        let mut values = x.int_values()?;
        self.sum(&x.shape, axis, &mut values, i32::wrapping_add, |v| v);
        Ok(vec![Tensor::ints(self.dtype, x.shape.clone(), values)])
    }
}
