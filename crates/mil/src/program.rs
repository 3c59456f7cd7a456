//! The typed program: what a package says, with every name resolved and every shape checked.
//!
//! A program is in static single assignment form: each value is defined once, by a function input, a block
//! input or an operation. [`ValueId`] indexes [`Function::values`]; operations refer to values by id, so a
//! consumer never looks a name up.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

/// Element types of MIL.
///
/// Messages write MIL's own names (`fp16`); JSON has numpy's (`float16`), which the command line takes too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it")]
pub enum DataType {
    Bool,
    String,
    Float16,
    Float32,
    Float64,
    BFloat16,
    Int8,
    Int16,
    Int32,
    Int64,
    Int4,
    UInt8,
    UInt16,
    UInt32,
    UInt64,
    UInt4,
    UInt2,
    UInt1,
    UInt6,
    UInt3,
    #[serde(rename = "float8_e4m3fn")]
    Float8E4M3,
    #[serde(rename = "float8_e5m2")]
    Float8E5M2,
}

impl DataType {
    /// Bits of one element as weight blobs pack it (a `bool` is a byte); `None` for strings.
    pub fn bits(self) -> Option<usize> {
        Some(match self {
            DataType::String => return None,
            DataType::UInt1 => 1,
            DataType::UInt2 => 2,
            DataType::UInt3 => 3,
            DataType::Int4 | DataType::UInt4 => 4,
            DataType::UInt6 => 6,
            DataType::Bool | DataType::Int8 | DataType::UInt8 => 8,
            DataType::Float8E4M3 | DataType::Float8E5M2 => 8,
            DataType::Float16 | DataType::BFloat16 | DataType::Int16 | DataType::UInt16 => 16,
            DataType::Float32 | DataType::Int32 | DataType::UInt32 => 32,
            DataType::Float64 | DataType::Int64 | DataType::UInt64 => 64,
        })
    }

    /// The name MIL's text form uses: `fp16`, `int32`, `uint4`, …
    pub fn name(self) -> &'static str {
        match self {
            DataType::Bool => "bool",
            DataType::String => "string",
            DataType::Float16 => "fp16",
            DataType::Float32 => "fp32",
            DataType::Float64 => "fp64",
            DataType::BFloat16 => "bf16",
            DataType::Int8 => "int8",
            DataType::Int16 => "int16",
            DataType::Int32 => "int32",
            DataType::Int64 => "int64",
            DataType::Int4 => "int4",
            DataType::UInt8 => "uint8",
            DataType::UInt16 => "uint16",
            DataType::UInt32 => "uint32",
            DataType::UInt64 => "uint64",
            DataType::UInt4 => "uint4",
            DataType::UInt2 => "uint2",
            DataType::UInt1 => "uint1",
            DataType::UInt6 => "uint6",
            DataType::UInt3 => "uint3",
            DataType::Float8E4M3 => "fp8_e4m3",
            DataType::Float8E5M2 => "fp8_e5m2",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One dimension of a tensor type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dim {
    /// Known when the program was written.
    Fixed(usize),
    /// Known when the program runs.
    Unknown,
}

impl Dim {
    /// The size when it is known.
    pub fn fixed(self) -> Option<usize> {
        match self {
            Dim::Fixed(n) => Some(n),
            Dim::Unknown => None,
        }
    }
}

/// Element type and shape, outermost dimension first. A scalar has no dimensions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DataType,
    /// Dimensions, outermost first.
    pub shape: Vec<Dim>,
}

impl TensorType {
    /// The shape when every dimension is known.
    pub fn fixed_shape(&self) -> Option<Vec<usize>> {
        self.shape.iter().map(|dim| dim.fixed()).collect()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.dtype)?;
        for (i, d) in self.shape.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            match d {
                Dim::Fixed(n) => write!(f, "{comma}{n}")?,
                Dim::Unknown => write!(f, "{comma}?")?,
            }
        }
        f.write_str("]")
    }
}

/// The type of a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ValueType {
    /// An n-dimensional array.
    Tensor(TensorType),
    /// A tensor that lives across predictions; read with `read_state`, written with `write_state`.
    State(TensorType),
    /// A list of values of one type (rare: TensorArray loops).
    List(Box<ValueType>),
    /// A tuple (rare: results of control flow before unpacking).
    Tuple(Vec<ValueType>),
    /// A dictionary of keys and values (rare: the result of a classifier).
    Dictionary(Box<ValueType>, Box<ValueType>),
}

/// A value's place in [`Function::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

/// A named, typed value.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueDef {
    /// The name the program gave it.
    pub name: String,
    /// Its type.
    pub ty: ValueType,
}

/// A constant tensor: a `const` operation's `val`, an attribute, or an inline argument.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    /// Element type and shape; always fixed.
    pub ty: TensorType,
    /// The elements.
    pub data: ConstantData,
}

/// Where a constant's elements are.
#[derive(Clone, Debug, PartialEq)]
pub enum ConstantData {
    /// Elements in the program itself, little endian, packed as in a weight blob; the length was checked
    /// against the type.
    Inline(Vec<u8>),
    /// Strings, one an element.
    Strings(Vec<String>),
    /// Elements in a weight file; bounds, type and length were checked against the type.
    Blob(BlobRef),
}

/// A checked range of one of the package's weight files; read it with `Package::blob_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlobRef {
    /// Which weight file of the package.
    pub file: usize,
    /// First byte of the data in the file.
    pub offset_bytes: usize,
    /// Length of the data.
    pub len_bytes: usize,
}

/// What an operation's input is bound to.
#[derive(Clone, Debug, PartialEq)]
pub enum Argument {
    /// A value defined earlier.
    Value(ValueId),
    /// A constant written in place.
    Constant(Constant),
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// MIL's name of the operation: `linear`, `softmax`, `const`, …
    pub kind: String,
    /// Inputs by MIL parameter name; most have one argument, `values` of `concat` and the like several.
    pub inputs: BTreeMap<String, Vec<Argument>>,
    /// Attributes by name (`val` of a `const`; the old `constexpr_*` forms keep everything here).
    pub attributes: BTreeMap<String, Constant>,
    /// The values it defines.
    pub outputs: Vec<ValueId>,
    /// Nested blocks of `cond` and `while_loop`.
    pub blocks: Vec<Block>,
}

/// A straight run of operations.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Values that the enclosing operation passes in (none for a function's own block).
    pub inputs: Vec<ValueId>,
    /// In the order of execution; each uses only values defined before it.
    pub ops: Vec<Op>,
    /// The block's results.
    pub outputs: Vec<ValueId>,
}

/// One function of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its name; `main` unless the package has several.
    pub name: String,
    /// The opset its block is written in: `CoreML6` (iOS 16) to `CoreML9`.
    pub opset: String,
    /// Every value of the function, nested blocks included; [`ValueId`] indexes this.
    pub values: Vec<ValueDef>,
    /// Inputs that are tensors, in the order of the description.
    pub inputs: Vec<ValueId>,
    /// Inputs that are states.
    pub states: Vec<ValueId>,
    /// The body. `block.outputs` are the function's outputs.
    pub block: Block,
}

impl Function {
    /// The definition of `id`.
    pub fn value(&self, id: ValueId) -> &ValueDef {
        &self.values[id.0 as usize]
    }

    /// Every operation of the function, an operation before those in its blocks.
    pub fn all_ops(&self) -> Vec<&Op> {
        fn walk<'a>(block: &'a Block, ops: &mut Vec<&'a Op>) {
            for op in &block.ops {
                ops.push(op);
                op.blocks.iter().for_each(|inner| walk(inner, ops));
            }
        }
        let mut ops = Vec::new();
        walk(&self.block, &mut ops);
        ops
    }

    /// The tensor type of `id`, a state's included; `None` for lists, tuples and dictionaries.
    pub fn tensor(&self, id: ValueId) -> Option<&TensorType> {
        match &self.value(id).ty {
            ValueType::Tensor(ty) | ValueType::State(ty) => Some(ty),
            ValueType::List(_) | ValueType::Tuple(_) | ValueType::Dictionary(..) => None,
        }
    }
}

/// All functions of a package, by name.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Functions by name.
    pub functions: BTreeMap<String, Function>,
    /// The function that runs when none is named.
    pub default_function: String,
}
