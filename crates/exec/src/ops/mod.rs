//! The operations: one file a family of MIL operations, `table` that finds them, `form` that reads their arguments.
//!
//! An operation is built once, at load: its constant arguments are read into a struct, and a form that the executor
//! does not handle is refused then. At run time it sees tensors only.

mod arithmetic;
pub(crate) mod attention;
mod cast;
mod compare;
mod concat;
mod constexpr;
mod conv;
mod cumsum;
mod einsum;
mod elementary;
mod elements;
mod fill;
mod form;
mod functions;
mod gather;
mod int_product;
mod layer_norm;
mod linear;
mod logic;
mod matmul;
mod norm;
mod pad;
mod places;
mod range;
mod reduce;
mod reshape;
mod scatter;
mod select;
mod shape;
mod slice;
mod slice_update;
mod softmax;
mod sort;
mod split;
pub(crate) mod states;
mod table;
mod tile;
mod transpose;

use std::fmt::Debug;

use kvbaton_mil::program::{DataType, ValueId};

use crate::tensor::{Context, Tensor};
use crate::tile::Step;

pub(crate) use constexpr::{Part, evaluate as decompress};
pub(crate) use form::Form;
pub(crate) use matmul::Matmul;
pub(crate) use table::builder;
pub use table::supported_ops;

/// Why an operation is refused or failed; the caller adds where.
pub(crate) type Reason = String;

/// An operation, ready to run.
pub(crate) trait Op: Debug + Send + Sync {
    /// Shapes of the results for operands of these shapes; `None` when they depend on values.
    ///
    /// # Errors
    ///
    /// When the operation is not defined for such operands.
    fn infer(&self, shapes: &[&[usize]]) -> Result<Option<Vec<Vec<usize>>>, Reason>;

    /// The results.
    ///
    /// # Errors
    ///
    /// When the operation is not defined for such operands.
    fn eval(&self, cx: &Context, operands: &[Tensor]) -> Result<Vec<Tensor>, Reason>;

    /// As [`Op::eval`], for operands of which some have no other user: their memory can take the result.
    fn eval_owned(&self, cx: &Context, operands: Vec<Tensor>) -> Result<Vec<Tensor>, Reason> {
        self.eval(cx, &operands)
    }

    /// Whether results may be views of the operands' memory.
    fn views(&self) -> bool {
        false
    }

    /// Whether the result takes the first operand's memory, if nobody else needs it.
    fn updates(&self) -> bool {
        false
    }

    /// The operation as steps of a row program, one for each result, if for operands of these shapes every row of a
    /// result depends on that row of the operands alone.
    fn by_rows(&self, _shapes: &[&[usize]]) -> Option<Vec<Step>> {
        None
    }

    /// Whether it only shows the same rows under another outer shape.
    fn keeps_rows(&self, _shapes: &[&[usize]]) -> bool {
        false
    }

    /// Whether operand `index` may be a weight that is still compressed; others are decompressed before.
    fn takes_compressed(&self, _index: usize) -> bool {
        false
    }

    /// The axis along which it puts its operands one after the other, if that is all it does.
    fn joins(&self, _shapes: &[&[usize]]) -> Option<usize> {
        None
    }

    /// The operation as a matrix product, for attention.
    fn as_matmul(&self) -> Option<&Matmul> {
        None
    }
}

/// An operand: computed at run time, or known at load.
#[derive(Clone, Debug)]
pub(crate) enum Operand {
    Value(ValueId),
    Fixed(Tensor),
}

impl Operand {
    /// The value, if it is computed at run time.
    pub(crate) fn value(&self) -> Option<ValueId> {
        match self {
            Operand::Value(id) => Some(*id),
            Operand::Fixed(_) => None,
        }
    }
}

/// Whether values of one type can stand for the other: a run may keep in `f32` what the program declares fp16.
pub(crate) fn alike(a: DataType, b: DataType) -> bool {
    a == b || (crate::tensor::is_float(a) && crate::tensor::is_float(b))
}

/// Whether results of this type are rounded to fp16.
pub(crate) fn half(dtype: DataType) -> bool {
    dtype == DataType::Float16
}

/// The integers of an operand.
pub(crate) fn wide(tensor: &Tensor) -> Result<Vec<i64>, Reason> {
    Ok(tensor.int_values()?.into_iter().map(i64::from).collect())
}

/// Rounds results of the type `dtype`.
pub(crate) fn round(values: &mut [f32], dtype: DataType) {
    if half(dtype) {
        values.iter_mut().for_each(|v| *v = half::f16::from_f32(*v).to_f32());
    }
}

/// `axis`, counted from the end when negative, as an index below `rank`.
pub(crate) fn axis_of(axis: i64, rank: usize) -> Result<usize, Reason> {
    let r = i64::try_from(rank).map_err(|e| e.to_string())?;
    let a = if axis < 0 { axis + r } else { axis };
    usize::try_from(a)
        .ok()
        .filter(|a| *a < rank)
        .ok_or_else(|| format!("axis {axis} of a tensor of rank {rank}"))
}

/// The shape two operands broadcast to.
pub(crate) fn broadcast_shape(a: &[usize], b: &[usize]) -> Result<Vec<usize>, Reason> {
    let rank = a.len().max(b.len());
    let dim = |s: &[usize], i: usize| if i + s.len() < rank { 1 } else { s[i + s.len() - rank] };
    (0..rank)
        .map(|i| match (dim(a, i), dim(b, i)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(format!("shapes {a:?} and {b:?} do not broadcast")),
        })
        .collect()
}

/// A shape's outer dimensions and its last one (1 for a scalar).
pub(crate) fn split_last(shape: &[usize]) -> (&[usize], usize) {
    match shape.split_last() {
        Some((last, lead)) => (lead, *last),
        None => (&[], 1),
    }
}
