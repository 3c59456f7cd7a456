//! The operations: one file a family of MIL operations, and the table that finds them.
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
mod functions;
mod gather;
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
mod tile;
mod transpose;

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Arc;

use kvbaton_mil::Package;
use kvbaton_mil::program::{
    Argument, Constant, ConstantData, DataType, Function, Op as MilOp, TensorType, ValueId, ValueType,
};

use crate::tensor::{Context, Data, Tensor};
use crate::tile::Step;

pub(crate) use constexpr::{Part, evaluate as decompress};
pub(crate) use matmul::Matmul;

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

/// An operation as the package writes it, while it is being built.
pub(crate) struct Form<'a> {
    pub(crate) package: &'a Arc<Package>,
    pub(crate) function: &'a Function,
    pub(crate) op: &'a MilOp,
    /// Values that `const` operations define.
    pub(crate) constants: &'a HashMap<ValueId, &'a Constant>,
    /// Results of decompressions.
    pub(crate) decompressed: &'a HashMap<ValueId, Part>,
    /// Values that stand for others: what `read_state` returns.
    pub(crate) aliases: &'a HashMap<ValueId, Operand>,
    /// Operands asked for so far.
    pub(crate) operands: Vec<Operand>,
}

impl<'a> Form<'a> {
    fn argument(&self, name: &str) -> Option<&'a Argument> {
        self.op.inputs.get(name).and_then(|a| a.first())
    }

    /// Whether the argument is given.
    fn has(&self, name: &str) -> bool {
        self.argument(name).is_some()
    }

    /// The argument, or the attribute, if it is known at load.
    fn constant(&self, name: &str) -> Option<&'a Constant> {
        match self.argument(name) {
            Some(Argument::Constant(c)) => Some(c),
            Some(Argument::Value(id)) => self.constants.get(id).copied(),
            None => self.op.attributes.get(name),
        }
    }

    /// What an argument stands for.
    fn resolve(&self, name: &str, argument: &Argument) -> Result<Operand, Reason> {
        let constant = match argument {
            Argument::Constant(c) => Some(c),
            Argument::Value(id) => self.constants.get(id).copied(),
        };
        if let Some(c) = constant {
            let tensor = Tensor::constant(self.package, c);
            let tensor = tensor.ok_or_else(|| format!("`{name}` is a constant of type {}", c.ty))?;
            return Ok(Operand::Fixed(tensor));
        }
        match argument {
            Argument::Value(id) => Ok(match (self.decompressed.get(id), self.aliases.get(id)) {
                (Some(Part::Weight(tensor)), _) => Operand::Fixed(tensor.clone()),
                (Some(_), _) => {
                    return Err(format!("`{name}` is a part of a compressed weight, not a weight"));
                }
                (None, Some(operand)) => operand.clone(),
                (None, None) => Operand::Value(*id),
            }),
            Argument::Constant(_) => Err(format!("`{name}` is not handled")),
        }
    }

    fn push(&mut self, name: &str, argument: &Argument) -> Result<(), Reason> {
        let operand = self.resolve(name, argument)?;
        self.operands.push(operand);
        Ok(())
    }

    /// Makes the argument an operand.
    pub(crate) fn operand(&mut self, name: &str) -> Result<(), Reason> {
        let argument = self.argument(name).ok_or_else(|| format!("`{name}` is missing"))?;
        self.push(name, argument)
    }

    /// Makes all arguments of a list operands, and returns how many there are.
    pub(crate) fn operand_list(&mut self, name: &str) -> Result<usize, Reason> {
        let list = self.op.inputs.get(name).ok_or_else(|| format!("`{name}` is missing"))?;
        for argument in list {
            self.push(name, argument)?;
        }
        Ok(list.len())
    }

    /// Integers of an argument that is known at load; `None` when it is not given.
    fn ints(&self, name: &str) -> Result<Option<Vec<i64>>, Reason> {
        let Some(constant) = self.constant(name) else {
            if self.has(name) {
                return Err(format!("`{name}` is computed, only a constant is supported"));
            }
            return Ok(None);
        };
        let bytes = self.package.constant_bytes(constant);
        let values = bytes.and_then(|b| crate::tensor::integers(constant.ty.dtype, b));
        let values = values.ok_or_else(|| format!("`{name}` is {}, not integers", constant.ty))?;
        Ok(Some(values.into_iter().map(i64::from).collect()))
    }

    /// One integer from each argument of a list, all known at load.
    fn int_list(&self, name: &str) -> Result<Vec<i64>, Reason> {
        let list = self.op.inputs.get(name).ok_or_else(|| format!("`{name}` is missing"))?;
        let one = |argument: &Argument| match self.resolve(name, argument)? {
            Operand::Fixed(t) if t.count() == 1 => match &t.data {
                Data::Bool(_) => Ok(i64::from(t.bool_values()?[0])),
                _ => Ok(i64::from(t.int_values()?[0])),
            },
            _ => Err(format!("`{name}` is not a list of constant numbers")),
        };
        list.iter().map(one).collect()
    }

    /// Whether the function is written in an older opset than this one.
    fn is_before(&self, opset: &str) -> bool {
        let number = |opset: &str| opset.strip_prefix("CoreML").and_then(|n| n.parse::<u32>().ok());
        match (number(&self.function.opset), number(opset)) {
            (Some(have), Some(wanted)) => have < wanted,
            _ => false,
        }
    }

    fn int(&self, name: &str) -> Result<Option<i64>, Reason> {
        match self.ints(name)?.as_deref() {
            None => Ok(None),
            Some([value]) => Ok(Some(*value)),
            Some(values) => Err(format!("`{name}` has {} values, not one", values.len())),
        }
    }

    /// Integers of an argument that is known at load; otherwise it becomes the next operand.
    fn ints_or_operand(&mut self, name: &str) -> Result<Option<Vec<i64>>, Reason> {
        if self.constant(name).is_some() {
            return self.ints(name);
        }
        self.operand(name).map(|()| None)
    }

    fn flags(&self, name: &str) -> Result<Option<Vec<bool>>, Reason> {
        Ok(self.ints(name)?.map(|v| v.into_iter().map(|v| v != 0).collect()))
    }

    /// A truth value; false when it is not given.
    fn flag(&self, name: &str) -> Result<bool, Reason> {
        Ok(self.int(name)?.unwrap_or(0) != 0)
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, Reason> {
        let Some(constant) = self.constant(name) else {
            if self.has(name) {
                return Err(format!("`{name}` is computed, only a constant is supported"));
            }
            return Ok(None);
        };
        let tensor = Tensor::constant(self.package, constant).filter(|t| crate::tensor::is_float(t.dtype));
        let tensor = tensor.ok_or_else(|| format!("`{name}` is {}, not floats", constant.ty))?;
        tensor.float_values(kvbaton_kernels::rows::Isa::best()).map(Some)
    }

    fn float(&self, name: &str, default: f32) -> Result<f32, Reason> {
        match self.floats(name)?.as_deref() {
            None => Ok(default),
            Some([value]) => Ok(*value),
            Some(values) => Err(format!("`{name}` has {} values, not one", values.len())),
        }
    }

    /// One number of any type that is known at load; `None` when it is not given.
    fn number(&self, name: &str) -> Result<Option<f64>, Reason> {
        match self.constant(name) {
            Some(c) if crate::tensor::is_float(c.ty.dtype) => {
                self.float(name, 0.0).map(|v| Some(f64::from(v)))
            }
            #[expect(clippy::cast_precision_loss, reason = "integers of at most 32 bits")]
            _ => Ok(self.int(name)?.map(|v| v as f64)),
        }
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, Reason> {
        match self.constant(name).map(|c| &c.data) {
            Some(ConstantData::Strings(s)) if s.len() == 1 => Ok(Some(&s[0])),
            None if !self.has(name) => Ok(None),
            _ => Err(format!("`{name}` is not one constant string")),
        }
    }

    /// Element type of the first result.
    fn dtype(&self) -> Result<DataType, Reason> {
        self.output_dtype(0)
    }

    /// Element type of result `i`.
    fn output_dtype(&self, i: usize) -> Result<DataType, Reason> {
        match self.op.outputs.get(i).map(|id| &self.function.value(*id).ty) {
            Some(ValueType::Tensor(ty)) => Ok(ty.dtype),
            _ => Err(format!("its result {i} is no tensor")),
        }
    }

    /// Element type of the first result, which must be fp16 or fp32.
    fn float_dtype(&self) -> Result<DataType, Reason> {
        let dtype = self.dtype()?;
        if crate::tensor::is_float(dtype) { Ok(dtype) } else { Err(format!("on {dtype} values")) }
    }

    fn argument_type(&self, name: &str) -> Option<&TensorType> {
        match self.argument(name)? {
            Argument::Constant(c) => Some(&c.ty),
            Argument::Value(id) => self.function.tensor(*id),
        }
    }

    /// Element type of an argument.
    fn argument_dtype(&self, name: &str) -> Result<DataType, Reason> {
        let ty = self.argument_type(name).ok_or_else(|| format!("`{name}` is missing or no tensor"))?;
        Ok(ty.dtype)
    }

    /// Shape of an argument, where it is known at load.
    fn argument_shape(&self, name: &str) -> Option<Vec<usize>> {
        self.argument_type(name)?.fixed_shape()
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

type Builder = fn(&mut Form<'_>) -> Result<Box<dyn Op>, Reason>;

/// Every operation by MIL's name (`const` is read at load and never runs).
const OPS: &[(&str, Builder)] = &[
    ("abs", elementary::build),
    ("acos", elementary::build),
    ("add", arithmetic::build),
    ("argsort", sort::build),
    ("asin", elementary::build),
    ("atan", elementary::build),
    ("atanh", elementary::build),
    ("band_part", fill::band_part),
    ("batch_norm", norm::build),
    ("cast", cast::build),
    ("ceil", elementary::build),
    ("clamped_relu", elementary::build),
    ("clip", elementary::build),
    ("concat", concat::build),
    ("conv", conv::build),
    ("cos", elementary::build),
    ("cosh", elementary::build),
    ("cumsum", cumsum::build),
    ("einsum", einsum::build),
    ("elu", elementary::build),
    ("equal", compare::build),
    ("erf", elementary::build),
    ("exp", elementary::build),
    ("exp2", elementary::build),
    ("expand_dims", reshape::build),
    ("fill", fill::build),
    ("fill_like", fill::like),
    ("flatten2d", reshape::build),
    ("floor", elementary::build),
    ("floor_div", arithmetic::build),
    ("gather", gather::build),
    ("gather_along_axis", gather::build),
    ("gather_nd", gather::build),
    ("gelu", elementary::build),
    ("greater", compare::build),
    ("greater_equal", compare::build),
    ("identity", elementary::build),
    ("instance_norm", norm::build),
    ("inverse", elementary::build),
    ("l2_norm", norm::build),
    ("layer_norm", layer_norm::build),
    ("leaky_relu", elementary::build),
    ("less", compare::build),
    ("less_equal", compare::build),
    ("linear", linear::build),
    ("linear_activation", elementary::build),
    ("log", elementary::build),
    ("logical_and", logic::build),
    ("logical_not", logic::build),
    ("logical_or", logic::build),
    ("logical_xor", logic::build),
    ("matmul", matmul::build),
    ("maximum", arithmetic::build),
    ("minimum", arithmetic::build),
    ("mod", arithmetic::build),
    ("mul", arithmetic::build),
    ("non_zero", fill::non_zero),
    ("not_equal", compare::build),
    ("one_hot", fill::one_hot),
    ("pad", pad::build),
    ("pow", arithmetic::build),
    ("prelu", norm::build),
    ("range_1d", range::build),
    ("real_div", arithmetic::build),
    ("reduce_argmax", reduce::build),
    ("reduce_argmin", reduce::build),
    ("reduce_l1_norm", reduce::build),
    ("reduce_l2_norm", reduce::build),
    ("reduce_log_sum", reduce::build),
    ("reduce_log_sum_exp", reduce::build),
    ("reduce_max", reduce::build),
    ("reduce_mean", reduce::build),
    ("reduce_min", reduce::build),
    ("reduce_prod", reduce::build),
    ("reduce_sum", reduce::build),
    ("reduce_sum_square", reduce::build),
    ("relu", elementary::build),
    ("relu6", elementary::build),
    ("reshape", reshape::build),
    ("reshape_like", reshape::build),
    ("reverse", slice::reverse),
    ("round", elementary::build),
    ("rsqrt", elementary::build),
    ("scaled_tanh", elementary::build),
    ("scatter", scatter::build),
    ("scatter_along_axis", scatter::build),
    ("scatter_nd", scatter::build),
    ("select", select::build),
    ("shape", shape::build),
    ("sigmoid", elementary::build),
    ("sigmoid_hard", elementary::build),
    ("sign", elementary::build),
    ("silu", elementary::build),
    ("sin", elementary::build),
    ("sinh", elementary::build),
    ("slice_by_index", slice::build),
    ("slice_by_size", slice::by_size),
    ("slice_update", slice_update::build),
    ("softmax", softmax::build),
    ("softplus", elementary::build),
    ("softplus_parametric", norm::build),
    ("softsign", elementary::build),
    ("split", split::build),
    ("sqrt", elementary::build),
    ("square", elementary::build),
    ("squeeze", reshape::build),
    ("stack", concat::build),
    ("sub", arithmetic::build),
    ("tan", elementary::build),
    ("tanh", elementary::build),
    ("threshold", elementary::build),
    ("thresholded_relu", elementary::build),
    ("tile", tile::build),
    ("topk", sort::build),
    ("transpose", transpose::build),
];

/// MIL's names of the operations the executor runs; `const` apart.
pub fn supported_ops() -> impl Iterator<Item = &'static str> {
    let built = ["cond", "while_loop", attention::NAME];
    constexpr::names().chain(states::NAMES).chain(built).chain(OPS.iter().map(|(name, _)| *name))
}

/// How to build the operation `kind`.
pub(crate) fn builder(kind: &str) -> Option<Builder> {
    OPS.binary_search_by(|(name, _)| (*name).cmp(kind)).ok().map(|i| OPS[i].1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_for_its_search() {
        assert!(OPS.is_sorted_by(|a, b| a.0 < b.0));
    }
}
