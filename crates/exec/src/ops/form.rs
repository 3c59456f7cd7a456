//! An operation as the package writes it: its arguments, read by name.

use std::collections::HashMap;
use std::sync::Arc;

use kvbaton_mil::Package;
use kvbaton_mil::program::{
    Argument, Constant, ConstantData, DataType, Function, Op as MilOp, TensorType, ValueId, ValueType,
};

use super::{Operand, Part, Reason};
use crate::tensor::{Data, Tensor, count};

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
    pub(super) fn argument(&self, name: &str) -> Option<&'a Argument> {
        self.op.inputs.get(name).and_then(|a| a.first())
    }

    /// Whether the argument is given.
    pub(super) fn has(&self, name: &str) -> bool {
        self.argument(name).is_some()
    }

    /// The argument, or the attribute, if it is known at load.
    pub(super) fn constant(&self, name: &str) -> Option<&'a Constant> {
        match self.argument(name) {
            Some(Argument::Constant(c)) => Some(c),
            Some(Argument::Value(id)) => self.constants.get(id).copied(),
            None => self.op.attributes.get(name),
        }
    }

    /// What an argument stands for.
    pub(super) fn resolve(&self, name: &str, argument: &Argument) -> Result<Operand, Reason> {
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
                (Some(Part::Integers { recipe, shape, dtype }), _)
                    if matches!(dtype, DataType::Int8 | DataType::UInt8) =>
                {
                    Operand::Fixed(Tensor::ints(*dtype, shape.clone(), recipe.integers(count(shape))))
                }
                (Some(_), _) => {
                    return Err(format!("`{name}` is a part of a compressed weight, not a weight"));
                }
                (None, Some(operand)) => operand.clone(),
                (None, None) => Operand::Value(*id),
            }),
            Argument::Constant(_) => Err(format!("`{name}` is not handled")),
        }
    }

    pub(super) fn push(&mut self, name: &str, argument: &Argument) -> Result<(), Reason> {
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
    pub(super) fn ints(&self, name: &str) -> Result<Option<Vec<i64>>, Reason> {
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
    pub(super) fn int_list(&self, name: &str) -> Result<Vec<i64>, Reason> {
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
    pub(super) fn is_before(&self, opset: &str) -> bool {
        let number = |opset: &str| opset.strip_prefix("CoreML").and_then(|n| n.parse::<u32>().ok());
        match (number(&self.function.opset), number(opset)) {
            (Some(have), Some(wanted)) => have < wanted,
            _ => false,
        }
    }

    pub(super) fn int(&self, name: &str) -> Result<Option<i64>, Reason> {
        match self.ints(name)?.as_deref() {
            None => Ok(None),
            Some([value]) => Ok(Some(*value)),
            Some(values) => Err(format!("`{name}` has {} values, not one", values.len())),
        }
    }

    /// Integers of an argument that is known at load; otherwise it becomes the next operand.
    pub(super) fn ints_or_operand(&mut self, name: &str) -> Result<Option<Vec<i64>>, Reason> {
        if self.constant(name).is_some() {
            return self.ints(name);
        }
        self.operand(name).map(|()| None)
    }

    pub(super) fn flags(&self, name: &str) -> Result<Option<Vec<bool>>, Reason> {
        Ok(self.ints(name)?.map(|v| v.into_iter().map(|v| v != 0).collect()))
    }

    /// A truth value; false when it is not given.
    pub(super) fn flag(&self, name: &str) -> Result<bool, Reason> {
        Ok(self.int(name)?.unwrap_or(0) != 0)
    }

    pub(super) fn floats(&self, name: &str) -> Result<Option<Vec<f32>>, Reason> {
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

    pub(super) fn float(&self, name: &str, default: f32) -> Result<f32, Reason> {
        match self.floats(name)?.as_deref() {
            None => Ok(default),
            Some([value]) => Ok(*value),
            Some(values) => Err(format!("`{name}` has {} values, not one", values.len())),
        }
    }

    /// One number of any type that is known at load; `None` when it is not given.
    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, Reason> {
        match self.constant(name) {
            Some(c) if crate::tensor::is_float(c.ty.dtype) => {
                self.float(name, 0.0).map(|v| Some(f64::from(v)))
            }
            #[expect(clippy::cast_precision_loss, reason = "integers of at most 32 bits")]
            _ => Ok(self.int(name)?.map(|v| v as f64)),
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>, Reason> {
        match self.constant(name).map(|c| &c.data) {
            Some(ConstantData::Strings(s)) if s.len() == 1 => Ok(Some(&s[0])),
            None if !self.has(name) => Ok(None),
            _ => Err(format!("`{name}` is not one constant string")),
        }
    }

    /// Element type of the first result.
    pub(super) fn dtype(&self) -> Result<DataType, Reason> {
        self.output_dtype(0)
    }

    /// Element type of result `i`.
    pub(super) fn output_dtype(&self, i: usize) -> Result<DataType, Reason> {
        match self.op.outputs.get(i).map(|id| &self.function.value(*id).ty) {
            Some(ValueType::Tensor(ty)) => Ok(ty.dtype),
            _ => Err(format!("its result {i} is no tensor")),
        }
    }

    /// Element type of the first result, which must be fp16 or fp32.
    pub(super) fn float_dtype(&self) -> Result<DataType, Reason> {
        let dtype = self.dtype()?;
        if crate::tensor::is_float(dtype) { Ok(dtype) } else { Err(format!("on {dtype} values")) }
    }

    pub(super) fn argument_type(&self, name: &str) -> Option<&TensorType> {
        match self.argument(name)? {
            Argument::Constant(c) => Some(&c.ty),
            Argument::Value(id) => self.function.tensor(*id),
        }
    }

    /// Element type of an argument.
    pub(super) fn argument_dtype(&self, name: &str) -> Result<DataType, Reason> {
        let ty = self.argument_type(name).ok_or_else(|| format!("`{name}` is missing or no tensor"))?;
        Ok(ty.dtype)
    }

    /// Shape of an argument, where it is known at load.
    pub(super) fn argument_shape(&self, name: &str) -> Option<Vec<usize>> {
        self.argument_type(name)?.fixed_shape()
    }
}
