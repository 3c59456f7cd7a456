//! What can be wrong with a package.

use std::fmt;
use std::path::PathBuf;

use kvbaton_memory::MapError;

use crate::program::{DataType, TensorType};

/// A package that cannot be read. Every message names the file or the place in the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MilError {
    /// The path is not a package folder.
    #[error("`{}` is not an .mlpackage: {reason}", path.display())]
    NotAPackage {
        /// The path asked for.
        path: PathBuf,
        /// What is missing.
        reason: &'static str,
    },
    /// A file of the package could not be read.
    #[error("cannot read `{}`: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of the package could not be mapped.
    #[error("{source}: {}", source.source)]
    Map {
        /// Which file, and what the system said.
        source: MapError,
    },
    /// `Manifest.json` does not say where the model is.
    #[error("broken Manifest.json: {reason}")]
    Manifest {
        /// What is wrong with it.
        reason: String,
    },
    /// A path in the package leads out of it.
    #[error("{what} `{path}` leaves the package: {reason}")]
    PathLeavesPackage {
        /// Which path: the manifest's or a weight file's.
        what: &'static str,
        /// The path as it is written.
        path: String,
        /// Why it is refused.
        reason: &'static str,
    },
    /// The model file is larger than any program is.
    #[error("`{file}` has {len_bytes} bytes; a program of more than {limit_bytes} bytes is not read")]
    ModelTooLarge {
        /// The model file.
        file: String,
        /// Its length.
        len_bytes: usize,
        /// The largest length that is read.
        limit_bytes: usize,
    },
    /// The model file is not a Core ML model.
    #[error("`{file}` is not a Core ML model: {source}")]
    Wire {
        /// The model file.
        file: String,
        /// What the protobuf decoder said.
        source: prost::DecodeError,
    },
    /// The specification version is not one this reader knows.
    #[error(
        "specification version {found} is not supported: ML Programs have version {oldest} (macOS 12) to {newest}"
    )]
    SpecificationVersion {
        /// The model's version.
        found: i32,
        /// The first version with ML Programs.
        oldest: i32,
        /// The last version known.
        newest: i32,
    },
    /// The model is a neural network, a pipeline or another kind.
    #[error("`{file}` holds no ML Program (it may be a neural network or a pipeline)")]
    NotAnMlProgram {
        /// The model file.
        file: String,
    },
    /// The description of inputs and outputs is malformed or does not fit the program.
    #[error("the description of function `{function}` is wrong at `{feature}`: {reason}")]
    Description {
        /// The function described.
        function: String,
        /// The input, output or state.
        feature: String,
        /// What is wrong.
        reason: String,
    },
    /// The program is malformed.
    #[error("{place}: {problem}")]
    Program {
        /// Where.
        place: Box<Place>,
        /// What is wrong.
        problem: ProgramError,
    },
    /// A constant's weight blob cannot be read.
    #[error("{place}: weight blob at byte {offset_bytes} of `{file}`: {problem}")]
    Blob {
        /// The constant.
        place: Box<Place>,
        /// The weight file as the program names it.
        file: String,
        /// Where the blob's metadata is meant to be.
        offset_bytes: u64,
        /// What is wrong.
        problem: BlobError,
    },
    /// The package has no function of this name.
    #[error("the package has no function `{name}`; it has {known:?}")]
    NoSuchFunction {
        /// The name asked for.
        name: String,
        /// The functions there are.
        known: Vec<String>,
    },
}

/// A place in a program. Parts that do not apply are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The function.
    pub function: String,
    /// MIL's name of the operation.
    pub op: String,
    /// The operation's first output.
    pub output: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.function.is_empty() {
            return f.write_str("program");
        }
        write!(f, "function `{}`", self.function)?;
        if !self.op.is_empty() {
            write!(f, ", op `{}`", self.op)?;
        }
        if !self.output.is_empty() {
            write!(f, ", output `{}`", self.output)?;
        }
        Ok(())
    }
}

/// What is wrong at a [`Place`] of a program.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// The program has no function at all.
    #[error("the program has no functions")]
    NoFunctions,
    /// The default function does not exist.
    #[error("the default function `{name}` does not exist; the program has {known:?}")]
    NoDefaultFunction {
        /// The function named as the default.
        name: String,
        /// The functions there are.
        known: Vec<String>,
    },
    /// The function has no body for its opset.
    #[error("no block for opset `{opset}`; there are blocks for {known:?}")]
    MissingBlock {
        /// The function's opset.
        opset: String,
        /// The opsets that have a block.
        known: Vec<String>,
    },
    /// A name that nothing defines.
    #[error("`{name}` is not defined")]
    Undefined {
        /// The name.
        name: String,
    },
    /// A name that is defined, but not before this use or not in this block.
    #[error("`{name}` is used before it is defined, or outside the block that defines it")]
    UsedBeforeDefined {
        /// The name.
        name: String,
    },
    /// A name that is defined twice.
    #[error("`{name}` is defined twice")]
    DefinedTwice {
        /// The name.
        name: String,
    },
    /// A value without a name.
    #[error("a value has no name")]
    Unnamed,
    /// A value without a type.
    #[error("`{name}` has no type")]
    MissingType {
        /// The value or parameter.
        name: String,
    },
    /// An element type that the format does not define.
    #[error("`{name}` has the unknown element type number {number}")]
    UnknownDataType {
        /// The value or parameter.
        name: String,
        /// The number in the file.
        number: i32,
    },
    /// A tensor type whose rank is not the number of its dimensions.
    #[error("`{name}` has rank {rank} but {dimensions} dimensions")]
    RankMismatch {
        /// The value or parameter.
        name: String,
        /// The rank stated.
        rank: i64,
        /// The dimensions listed.
        dimensions: usize,
    },
    /// A type this reader has no use for.
    #[error("`{name}` is a {found}, which is not supported here")]
    UnsupportedType {
        /// The value or parameter.
        name: String,
        /// What it is.
        found: &'static str,
    },
    /// A function whose states are not tensors.
    #[error("state `{name}` does not wrap a tensor")]
    StateWithoutTensor {
        /// The state.
        name: String,
    },
    /// A constant without elements.
    #[error("`{name}` has no value")]
    MissingValue {
        /// The constant.
        name: String,
    },
    /// A constant with a dimension that is unknown.
    #[error("constant `{name}` has the type {ty}, whose shape is not fixed")]
    ConstantOfUnknownShape {
        /// The constant.
        name: String,
        /// Its type.
        ty: TensorType,
    },
    /// A constant whose size does not fit the address space.
    #[error("`{name}` has the type {ty}, which has more elements than memory can hold")]
    TooLarge {
        /// The constant.
        name: String,
        /// Its type.
        ty: TensorType,
    },
    /// Elements in a field that does not fit the type.
    #[error("`{name}` has the type {ty} but its elements are written as {found}")]
    WrongField {
        /// The constant.
        name: String,
        /// Its type.
        ty: TensorType,
        /// The field the elements are in.
        found: &'static str,
    },
    /// More or fewer elements than the type has.
    #[error("`{name}` has the type {ty}, which needs {wanted} {unit}, but holds {found}")]
    WrongLength {
        /// The constant.
        name: String,
        /// Its type.
        ty: TensorType,
        /// Elements or bytes the type needs.
        wanted: usize,
        /// Elements or bytes there are.
        found: usize,
        /// `elements` or `bytes`.
        unit: &'static str,
    },
    /// An element that its type cannot hold.
    #[error("`{name}` holds {value}, which {dtype} cannot hold")]
    OutOfRange {
        /// The constant.
        name: String,
        /// The element.
        value: i64,
        /// The element type.
        dtype: DataType,
    },
    /// A `const` whose value and output disagree.
    #[error("`val` has the type {value} but the output is declared {declared}")]
    ConstTypeMismatch {
        /// The value's type.
        value: TensorType,
        /// The output's type.
        declared: TensorType,
    },
    /// An operation that does not say what it is.
    #[error("an operation has no type")]
    NoOperationType,
    /// An argument that is neither a name nor a value.
    #[error("parameter `{name}` is bound to nothing")]
    Unbound {
        /// The parameter.
        name: String,
    },
    /// Blocks nested deeper than any program needs.
    #[error("blocks are nested more than {limit} deep")]
    TooDeep {
        /// The deepest nesting that is read.
        limit: usize,
    },
}

/// What is wrong with a weight blob.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BlobError {
    /// The weight file does not exist.
    #[error("the file does not exist")]
    MissingFile,
    /// The file does not start as a weight file does.
    #[error("the file has {len_bytes} bytes; a weight file has a header of 64")]
    TooShort {
        /// The file's length.
        len_bytes: usize,
    },
    /// A version this reader does not know.
    #[error("the file has blob version {found}; only version 2 is known")]
    Version {
        /// The version in the header.
        found: u32,
    },
    /// An offset that is not a multiple of 64.
    #[error("{what} at byte {offset_bytes} is not aligned to 64 bytes")]
    Misaligned {
        /// `metadata` or `data`.
        what: &'static str,
        /// Where it is.
        offset_bytes: u64,
    },
    /// Metadata or data beyond the end of the file.
    #[error("{what} needs bytes {start}..{end} but the file has {have_bytes}", end = u128::from(*start) + u128::from(*wanted_bytes))]
    OutOfFile {
        /// `metadata` or `data`.
        what: &'static str,
        /// The first byte.
        start: u64,
        /// How many bytes are wanted.
        wanted_bytes: u64,
        /// How long the file is.
        have_bytes: usize,
    },
    /// No blob starts there.
    #[error("no blob starts there: found {found:#010x} instead of 0xdeadbeef")]
    Sentinel {
        /// What is there.
        found: u32,
    },
    /// The blob's element type is not the constant's.
    #[error("the blob holds {found} but the constant is declared {declared}")]
    WrongType {
        /// The blob's type.
        found: String,
        /// The program's type.
        declared: DataType,
    },
    /// The blob's length is not what the constant's type needs.
    #[error("the blob has {found_bytes} bytes but {ty} needs {wanted_bytes}")]
    WrongLength {
        /// The blob's length.
        found_bytes: u64,
        /// What the type needs.
        wanted_bytes: usize,
        /// The constant's type.
        ty: TensorType,
    },
    /// The padding of a sub-byte blob does not fit its type.
    #[error("the blob states {found_bits} bits of padding but {ty} has {wanted_bits}")]
    Padding {
        /// The padding stated.
        found_bits: u64,
        /// The padding that the type implies.
        wanted_bits: u64,
        /// The constant's type.
        ty: TensorType,
    },
}
