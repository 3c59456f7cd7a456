//! Core ML's wire format: the messages that a reader of ML Programs needs, as hand-written prost structs.
//!
//! Message and field numbers are those of `Model.proto`, `FeatureTypes.proto` and `MIL.proto` of Core ML's format
//! specification. Fields that nothing here reads (doc strings, attributes of programs and blocks, other model
//! kinds) are left out; prost skips them. Reading only: a message written back would lose them.
//!
//! prost refuses messages nested deeper than 100, so recursion over a decoded message is bounded.

use std::collections::BTreeMap;

use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Model {
    #[prost(int32, tag = "1")]
    pub(crate) specification_version: i32,
    #[prost(message, optional, tag = "2")]
    pub(crate) description: Option<ModelDescription>,
    #[prost(message, optional, tag = "502")]
    pub(crate) ml_program: Option<Program>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ModelDescription {
    #[prost(message, repeated, tag = "1")]
    pub(crate) input: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "10")]
    pub(crate) output: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "13")]
    pub(crate) state: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "20")]
    pub(crate) functions: Vec<FunctionDescription>,
    #[prost(string, tag = "21")]
    pub(crate) default_function_name: String,
    #[prost(message, optional, tag = "100")]
    pub(crate) metadata: Option<Metadata>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Metadata {
    #[prost(string, tag = "1")]
    pub(crate) short_description: String,
    #[prost(string, tag = "2")]
    pub(crate) version_string: String,
    #[prost(string, tag = "3")]
    pub(crate) author: String,
    #[prost(string, tag = "4")]
    pub(crate) license: String,
    #[prost(btree_map = "string, string", tag = "100")]
    pub(crate) user_defined: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FunctionDescription {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) input: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) output: Vec<FeatureDescription>,
    #[prost(message, repeated, tag = "6")]
    pub(crate) state: Vec<FeatureDescription>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FeatureDescription {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) short_description: String,
    #[prost(message, optional, tag = "3")]
    pub(crate) r#type: Option<FeatureType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct FeatureType {
    #[prost(oneof = "FeatureKind", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub(crate) kind: Option<FeatureKind>,
    #[prost(bool, tag = "1000")]
    pub(crate) is_optional: bool,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum FeatureKind {
    #[prost(message, tag = "1")]
    Int64(Ignored),
    #[prost(message, tag = "2")]
    Double(Ignored),
    #[prost(message, tag = "3")]
    String(Ignored),
    #[prost(message, tag = "4")]
    Image(Ignored),
    #[prost(message, tag = "5")]
    MultiArray(ArrayFeatureType),
    #[prost(message, tag = "6")]
    Dictionary(Ignored),
    #[prost(message, tag = "7")]
    Sequence(Ignored),
    #[prost(message, tag = "8")]
    State(StateFeatureType),
}

/// A message whose presence is all that matters.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Ignored {}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StateFeatureType {
    #[prost(message, optional, tag = "1")]
    pub(crate) array: Option<ArrayFeatureType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ArrayFeatureType {
    #[prost(int64, repeated, tag = "1")]
    pub(crate) shape: Vec<i64>,
    #[prost(int32, tag = "2")]
    pub(crate) data_type: i32,
    #[prost(oneof = "ShapeFlexibility", tags = "21, 31")]
    pub(crate) flexibility: Option<ShapeFlexibility>,
    #[prost(oneof = "DefaultValue", tags = "41, 51, 61")]
    pub(crate) default_value: Option<DefaultValue>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ShapeFlexibility {
    #[prost(message, tag = "21")]
    Enumerated(EnumeratedShapes),
    #[prost(message, tag = "31")]
    Range(ShapeRange),
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum DefaultValue {
    #[prost(int32, tag = "41")]
    Int(i32),
    #[prost(float, tag = "51")]
    Float(f32),
    #[prost(double, tag = "61")]
    Double(f64),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct EnumeratedShapes {
    #[prost(message, repeated, tag = "1")]
    pub(crate) shapes: Vec<Shape>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Shape {
    #[prost(int64, repeated, tag = "1")]
    pub(crate) shape: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ShapeRange {
    #[prost(message, repeated, tag = "1")]
    pub(crate) size_ranges: Vec<SizeRange>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SizeRange {
    #[prost(uint64, tag = "1")]
    pub(crate) lower_bound: u64,
    #[prost(int64, tag = "2")]
    pub(crate) upper_bound: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Program {
    #[prost(int64, tag = "1")]
    pub(crate) version: i64,
    #[prost(btree_map = "string, message", tag = "2")]
    pub(crate) functions: BTreeMap<String, Function>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Function {
    #[prost(message, repeated, tag = "1")]
    pub(crate) inputs: Vec<NamedValueType>,
    #[prost(string, tag = "2")]
    pub(crate) opset: String,
    #[prost(btree_map = "string, message", tag = "3")]
    pub(crate) block_specializations: BTreeMap<String, Block>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Block {
    #[prost(message, repeated, tag = "1")]
    pub(crate) inputs: Vec<NamedValueType>,
    #[prost(string, repeated, tag = "2")]
    pub(crate) outputs: Vec<String>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) operations: Vec<Operation>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Operation {
    #[prost(string, tag = "1")]
    pub(crate) r#type: String,
    #[prost(btree_map = "string, message", tag = "2")]
    pub(crate) inputs: BTreeMap<String, Argument>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) outputs: Vec<NamedValueType>,
    #[prost(message, repeated, tag = "4")]
    pub(crate) blocks: Vec<Block>,
    #[prost(btree_map = "string, message", tag = "5")]
    pub(crate) attributes: BTreeMap<String, Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Argument {
    #[prost(message, repeated, tag = "1")]
    pub(crate) arguments: Vec<Binding>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Binding {
    #[prost(oneof = "BindingKind", tags = "1, 2")]
    pub(crate) kind: Option<BindingKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum BindingKind {
    #[prost(string, tag = "1")]
    Name(String),
    #[prost(message, tag = "2")]
    Value(Value),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct NamedValueType {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) r#type: Option<ValueType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ValueType {
    #[prost(oneof = "ValueTypeKind", tags = "1, 2, 3, 4, 5")]
    pub(crate) kind: Option<ValueTypeKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ValueTypeKind {
    #[prost(message, tag = "1")]
    Tensor(TensorType),
    #[prost(message, tag = "2")]
    List(Box<ListType>),
    #[prost(message, tag = "3")]
    Tuple(TupleType),
    #[prost(message, tag = "4")]
    Dictionary(Box<DictionaryType>),
    #[prost(message, tag = "5")]
    State(Box<StateType>),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TensorType {
    #[prost(int32, tag = "1")]
    pub(crate) data_type: i32,
    #[prost(int64, tag = "2")]
    pub(crate) rank: i64,
    #[prost(message, repeated, tag = "3")]
    pub(crate) dimensions: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TupleType {
    #[prost(message, repeated, tag = "1")]
    pub(crate) types: Vec<ValueType>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListType {
    #[prost(message, optional, boxed, tag = "1")]
    pub(crate) r#type: Option<Box<ValueType>>,
    #[prost(message, optional, tag = "2")]
    pub(crate) length: Option<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct DictionaryType {
    #[prost(message, optional, boxed, tag = "1")]
    pub(crate) key_type: Option<Box<ValueType>>,
    #[prost(message, optional, boxed, tag = "2")]
    pub(crate) value_type: Option<Box<ValueType>>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct StateType {
    #[prost(message, optional, boxed, tag = "1")]
    pub(crate) wrapped_type: Option<Box<ValueType>>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Dimension {
    #[prost(oneof = "DimensionKind", tags = "1, 2")]
    pub(crate) kind: Option<DimensionKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum DimensionKind {
    #[prost(message, tag = "1")]
    Constant(ConstantDimension),
    #[prost(message, tag = "2")]
    Unknown(UnknownDimension),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ConstantDimension {
    #[prost(uint64, tag = "1")]
    pub(crate) size: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct UnknownDimension {
    #[prost(bool, tag = "1")]
    pub(crate) variadic: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Value {
    #[prost(message, optional, tag = "2")]
    pub(crate) r#type: Option<ValueType>,
    #[prost(oneof = "ValueKind", tags = "3, 5")]
    pub(crate) kind: Option<ValueKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ValueKind {
    #[prost(message, tag = "3")]
    Immediate(ImmediateValue),
    #[prost(message, tag = "5")]
    BlobFile(BlobFileValue),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ImmediateValue {
    #[prost(oneof = "ImmediateKind", tags = "1, 2, 3, 4")]
    pub(crate) kind: Option<ImmediateKind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum ImmediateKind {
    #[prost(message, tag = "1")]
    Tensor(TensorValue),
    #[prost(message, tag = "2")]
    Tuple(Ignored),
    #[prost(message, tag = "3")]
    List(ListValue),
    #[prost(message, tag = "4")]
    Dictionary(Ignored),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ListValue {
    #[prost(message, repeated, tag = "1")]
    pub(crate) values: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct BlobFileValue {
    #[prost(string, tag = "1")]
    pub(crate) file_name: String,
    #[prost(uint64, tag = "2")]
    pub(crate) offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct TensorValue {
    #[prost(oneof = "TensorValues", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub(crate) values: Option<TensorValues>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum TensorValues {
    #[prost(message, tag = "1")]
    Floats(RepeatedFloats),
    #[prost(message, tag = "2")]
    Ints(RepeatedInts),
    #[prost(message, tag = "3")]
    Bools(RepeatedBools),
    #[prost(message, tag = "4")]
    Strings(RepeatedStrings),
    #[prost(message, tag = "5")]
    LongInts(RepeatedLongInts),
    #[prost(message, tag = "6")]
    Doubles(RepeatedDoubles),
    #[prost(message, tag = "7")]
    Bytes(RepeatedBytes),
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RepeatedFloats {
    #[prost(float, repeated, tag = "1")]
    pub(crate) values: Vec<f32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RepeatedInts {
    #[prost(int32, repeated, tag = "1")]
    pub(crate) values: Vec<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RepeatedBools {
    #[prost(bool, repeated, tag = "1")]
    pub(crate) values: Vec<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RepeatedStrings {
    #[prost(string, repeated, tag = "1")]
    pub(crate) values: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RepeatedLongInts {
    #[prost(int64, repeated, tag = "1")]
    pub(crate) values: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RepeatedDoubles {
    #[prost(double, repeated, tag = "1")]
    pub(crate) values: Vec<f64>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct RepeatedBytes {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) values: Vec<u8>,
}
