//! Malformed programs: each is a package that coremltools wrote, spoilt in one place.

use crate::program::{Argument, Constant, ConstantData, DataType, Dim, TensorType, ValueType};
use crate::spec::{self, BindingKind, ImmediateKind, TensorValues, ValueKind, ValueTypeKind};
use crate::testing::{Parts, fixed, tensor};

const FUNCTION: &str = "function `main`";
/// An int32 `const` without a blob.
const AXIS: &str = "embedding_axis_0";
const IN_AXIS: &str = "function `main`, op `const`, output `embedding_axis_0`: ";
const IN_SILU: &str = "function `main`, op `silu`, output `silu_0`: ";

fn plain() -> Parts {
    Parts::of("plain")
}

fn bind(parts: &mut Parts, output: &str, parameter: &str, kind: Option<BindingKind>) {
    let argument = parts.op(output).inputs.get_mut(parameter).unwrap();
    argument.arguments[0].kind = kind;
}

fn immediate(values: TensorValues) -> Option<ValueKind> {
    let tensor = spec::TensorValue { values: Some(values) };
    Some(ValueKind::Immediate(spec::ImmediateValue { kind: Some(ImmediateKind::Tensor(tensor)) }))
}

fn ints(values: &[i32]) -> Option<ValueKind> {
    immediate(TensorValues::Ints(spec::RepeatedInts { values: values.to_vec() }))
}

fn bytes(values: &[u8]) -> Option<ValueKind> {
    immediate(TensorValues::Bytes(spec::RepeatedBytes { values: values.to_vec() }))
}

/// `plain` with the constant `embedding_axis_0` of another type and value.
fn with_axis(data_type: i32, shape: &[u64], kind: Option<ValueKind>) -> Parts {
    let mut parts = plain();
    let ty = spec::TensorType {
        data_type,
        rank: shape.len() as i64,
        dimensions: shape.iter().map(|&n| fixed(n)).collect(),
    };
    let ty = Some(spec::ValueType { kind: Some(ValueTypeKind::Tensor(ty)) });
    parts.op(AXIS).outputs[0].r#type.clone_from(&ty);
    *parts.val(AXIS) = spec::Value { r#type: ty, kind };
    parts
}

/// The constant that [`with_axis`] wrote, as it was read.
fn axis(parts: Parts) -> Constant {
    let package = parts.open().unwrap();
    let function = package.function(None).unwrap();
    let named = |id| function.value(id).name == AXIS;
    let op = function.all_ops().into_iter().find(|op| op.outputs.iter().copied().any(named)).unwrap();
    op.attributes["val"].clone()
}

// Names.

#[test]
fn an_undefined_name_is_refused() {
    let mut parts = plain();
    bind(&mut parts, "silu_0", "x", Some(BindingKind::Name("nothing".to_owned())));
    assert_eq!(parts.refusal(), format!("{IN_SILU}`nothing` is not defined"));
}

#[test]
fn a_name_used_before_its_definition_is_refused() {
    let mut parts = plain();
    bind(&mut parts, "silu_0", "x", Some(BindingKind::Name("silu_1".to_owned())));
    let message = "`silu_1` is used before it is defined, or outside the block that defines it";
    assert_eq!(parts.refusal(), IN_SILU.to_owned() + message);
}

#[test]
fn a_value_that_uses_itself_is_refused() {
    let mut parts = plain();
    bind(&mut parts, "silu_0", "x", Some(BindingKind::Name("silu_0".to_owned())));
    let message = "`silu_0` is used before it is defined, or outside the block that defines it";
    assert_eq!(parts.refusal(), IN_SILU.to_owned() + message);
}

#[test]
fn a_name_of_an_inner_block_is_not_visible_outside() {
    let mut parts = Parts::of("branching");
    assert!(parts.op("while_loop_0_0").blocks[1].operations.iter().any(|op| op.outputs[0].name == "add_2"));
    bind(&mut parts, "y", "x", Some(BindingKind::Name("add_2".to_owned())));
    let message = "`add_2` is used before it is defined, or outside the block that defines it";
    assert_eq!(parts.refusal(), format!("{FUNCTION}, op `identity`, output `y`: {message}"));
}

#[test]
fn a_name_defined_twice_is_refused() {
    let mut parts = plain();
    parts.op("silu_0").outputs[0].name = "embedding".to_owned();
    let message = "function `main`, op `silu`, output `embedding`: `embedding` is defined twice";
    assert_eq!(parts.refusal(), message);
}

#[test]
fn a_name_that_is_also_an_input_is_refused() {
    let mut parts = plain();
    parts.op("silu_0").outputs[0].name = "input_ids".to_owned();
    let message = "function `main`, op `silu`, output `input_ids`: `input_ids` is defined twice";
    assert_eq!(parts.refusal(), message);
}

#[test]
fn a_value_without_a_name_is_refused() {
    let mut parts = plain();
    parts.op("silu_0").outputs[0].name.clear();
    assert_eq!(parts.refusal(), "function `main`, op `silu`: a value has no name");
}

#[test]
fn an_output_of_the_block_that_nothing_defines_is_refused() {
    let mut parts = plain();
    parts.block().outputs[0] = "nothing".to_owned();
    assert_eq!(parts.refusal(), "function `main`: `nothing` is not defined");
}

#[test]
fn an_unbound_parameter_is_refused() {
    let mut parts = plain();
    bind(&mut parts, "silu_0", "x", None);
    assert_eq!(parts.refusal(), format!("{IN_SILU}parameter `x` is bound to nothing"));
}

// Functions and blocks.

#[test]
fn a_program_without_functions_is_refused() {
    let mut parts = plain();
    parts.program().functions.clear();
    assert_eq!(parts.refusal(), "program: the program has no functions");
}

#[test]
fn a_default_function_that_does_not_exist_is_refused() {
    let mut parts = Parts::of("two_functions");
    parts.model.description.as_mut().unwrap().default_function_name = "decode".to_owned();
    let message = "program: the default function `decode` does not exist; the program has \
                   [\"prefill_16\", \"prefill_8\"]";
    assert_eq!(parts.refusal(), message);
}

#[test]
fn several_functions_without_a_default_and_a_main_are_refused() {
    let mut parts = Parts::of("two_functions");
    parts.model.description.as_mut().unwrap().default_function_name.clear();
    assert!(parts.refusal().starts_with("program: the default function `main` does not exist"));
}

#[test]
fn a_function_without_a_block_for_its_opset_is_refused() {
    let mut parts = plain();
    parts.function().opset = "CoreML7".to_owned();
    let message = "function `main`: no block for opset `CoreML7`; there are blocks for [\"CoreML8\"]";
    assert_eq!(parts.refusal(), message);
}

/// `branching` with a `cond` that holds itself `depth` times.
fn nested(depth: usize) -> Parts {
    let mut parts = Parts::of("branching");
    let mut inner = parts.op("cond_0").clone();
    inner.blocks.truncate(1);
    inner.blocks[0].outputs.clear();
    inner.blocks[0].operations.clear();
    for level in 0..depth {
        let mut outer = inner.clone();
        outer.outputs[0].name = format!("level_{level}");
        outer.blocks[0].operations = vec![inner];
        inner = outer;
    }
    inner.outputs[0].name = "cond_0".to_owned();
    *parts.op("cond_0") = inner;
    parts
}

#[test]
fn blocks_nested_too_deep_are_refused() {
    assert!(nested(14).open().is_ok());
    assert!(nested(17).refusal().ends_with(": blocks are nested more than 16 deep"));
}

#[test]
fn nesting_that_would_exhaust_the_stack_is_refused_by_the_decoder() {
    let message = nested(60).refusal();
    assert!(message.contains("recursion limit reached"), "{message}");
}

#[test]
fn types_nested_without_end_are_refused_by_the_decoder() {
    let mut parts = plain();
    let mut ty = parts.op("silu_0").outputs[0].r#type.take();
    for _ in 0..200 {
        let list = spec::ListType { r#type: ty.map(Box::new), length: None };
        ty = Some(spec::ValueType { kind: Some(ValueTypeKind::List(Box::new(list))) });
    }
    parts.op("silu_0").outputs[0].r#type = ty;
    assert!(parts.refusal().contains("recursion limit reached"));
}

#[test]
fn an_operation_without_a_type_is_refused() {
    let mut parts = plain();
    parts.op("silu_0").r#type.clear();
    assert_eq!(parts.refusal(), "function `main`, output `silu_0`: an operation has no type");
}

// Types.

#[test]
fn a_value_without_a_type_is_refused() {
    let mut parts = plain();
    parts.op("silu_0").outputs[0].r#type = None;
    assert_eq!(parts.refusal(), format!("{IN_SILU}`silu_0` has no type"));
}

#[test]
fn an_unknown_element_type_is_refused() {
    let mut parts = plain();
    parts.tensor("silu_0").data_type = 77;
    assert_eq!(parts.refusal(), format!("{IN_SILU}`silu_0` has the unknown element type number 77"));
}

#[test]
fn a_rank_that_is_not_the_number_of_dimensions_is_refused() {
    let mut parts = plain();
    parts.tensor("silu_0").rank = -1;
    assert_eq!(parts.refusal(), format!("{IN_SILU}`silu_0` has rank -1 but 3 dimensions"));
}

#[test]
fn a_tensor_of_unknown_rank_is_refused() {
    let mut parts = plain();
    let unknown = spec::UnknownDimension { variadic: true };
    parts.tensor("silu_0").dimensions[0].kind = Some(spec::DimensionKind::Unknown(unknown));
    let message = "`silu_0` is a tensor of unknown rank, which is not supported here";
    assert_eq!(parts.refusal(), IN_SILU.to_owned() + message);
}

#[test]
fn a_dimension_may_be_unknown() {
    let mut parts = plain();
    let unknown = spec::UnknownDimension { variadic: false };
    parts.tensor("silu_0").dimensions[1].kind = Some(spec::DimensionKind::Unknown(unknown));
    let package = parts.open().unwrap();
    let function = package.function(None).unwrap();
    let value = function.values.iter().find(|value| value.name == "silu_0").unwrap();
    let shape = vec![Dim::Fixed(1), Dim::Unknown, Dim::Fixed(32)];
    assert_eq!(value.ty, ValueType::Tensor(TensorType { dtype: DataType::Float16, shape }));
}

#[test]
fn lists_tuples_and_dictionaries_have_types() {
    let mut parts = plain();
    let element = parts.op("silu_0").outputs[0].r#type.clone();
    let list = spec::ListType { r#type: element.clone().map(Box::new), length: None };
    let list = spec::ValueType { kind: Some(ValueTypeKind::List(Box::new(list))) };
    let dictionary =
        spec::DictionaryType { key_type: element.clone().map(Box::new), value_type: Some(Box::new(list)) };
    let dictionary = spec::ValueType { kind: Some(ValueTypeKind::Dictionary(Box::new(dictionary))) };
    let tuple = spec::TupleType { types: vec![dictionary] };
    let tuple = spec::ValueType { kind: Some(ValueTypeKind::Tuple(tuple)) };
    parts.op("silu_0").outputs[0].r#type = Some(tuple);
    let package = parts.open().unwrap();
    let function = package.function(None).unwrap();
    let found = &function.values.iter().find(|value| value.name == "silu_0").unwrap().ty;
    let ValueType::Tuple(types) = found else { panic!("{found:?}") };
    let [ValueType::Dictionary(key, value)] = types.as_slice() else { panic!("{types:?}") };
    assert!(matches!((&**key, &**value), (ValueType::Tensor(_), ValueType::List(_))));
}

#[test]
fn a_state_that_wraps_no_tensor_is_refused() {
    let mut parts = Parts::of("stateful");
    let state = parts.function().inputs.iter_mut().find(|input| input.name == "k_state").unwrap();
    let Some(ValueTypeKind::State(ty)) = &mut state.r#type.as_mut().unwrap().kind else { panic!() };
    let inner = ty.wrapped_type.take();
    let list = spec::ListType { r#type: inner, length: None };
    ty.wrapped_type = Some(Box::new(spec::ValueType { kind: Some(ValueTypeKind::List(Box::new(list))) }));
    assert_eq!(parts.refusal(), "function `main`: state `k_state` does not wrap a tensor");
}

// Constants.

#[test]
fn a_const_without_a_value_is_refused() {
    let mut parts = plain();
    parts.op(AXIS).attributes.remove("val");
    assert_eq!(parts.refusal(), format!("{IN_AXIS}`val` has no value"));
}

#[test]
fn a_value_that_is_neither_immediate_nor_blob_is_refused() {
    assert_eq!(with_axis(23, &[], None).refusal(), format!("{IN_AXIS}`val` has no value"));
}

#[test]
fn a_const_of_another_type_than_its_output_is_refused() {
    let mut parts = plain();
    parts.tensor(AXIS).data_type = 11;
    let message = "`val` has the type int32[] but the output is declared fp32[]";
    assert_eq!(parts.refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn a_constant_of_unknown_shape_is_refused() {
    let mut parts = with_axis(23, &[1], ints(&[0]));
    tensor(&mut parts.val(AXIS).r#type).dimensions[0].kind = None;
    let message = "constant `val` has the type int32[?], whose shape is not fixed";
    assert_eq!(parts.refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn more_elements_than_memory_holds_are_refused() {
    let parts = with_axis(23, &[1 << 40, 1 << 40], ints(&[0]));
    let message = "`val` has the type int32[1099511627776, 1099511627776], which has more elements than \
                   memory can hold";
    assert_eq!(parts.refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn a_large_type_with_few_elements_is_refused_without_allocating() {
    let message = "`val` has the type int32[1099511627776], which needs 1099511627776 elements, but holds 1";
    assert_eq!(with_axis(23, &[1 << 40], ints(&[0])).refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn a_huge_dimension_beside_an_empty_one_is_empty() {
    let constant = axis(with_axis(23, &[0, u64::MAX], ints(&[])));
    assert_eq!(constant.data, ConstantData::Inline(Vec::new()));
}

#[test]
fn too_few_elements_are_refused() {
    let message = "`val` has the type int32[2], which needs 2 elements, but holds 1";
    assert_eq!(with_axis(23, &[2], ints(&[7])).refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn an_empty_immediate_does_not_stand_for_zeros() {
    let floats = immediate(TensorValues::Floats(spec::RepeatedFloats { values: Vec::new() }));
    let message = "`val` has the type fp32[4], which needs 4 elements, but holds 0";
    assert_eq!(with_axis(11, &[4], floats).refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn too_many_bytes_are_refused() {
    let message = "`val` has the type fp16[2], which needs 4 bytes, but holds 5";
    assert_eq!(with_axis(10, &[2], bytes(&[0; 5])).refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn sub_byte_immediates_are_padded_to_a_whole_byte() {
    assert_eq!(axis(with_axis(39, &[3], bytes(&[1, 0]))).data, ConstantData::Inline(vec![1, 0]));
    let message = "`val` has the type uint3[3], which needs 2 bytes, but holds 1";
    assert_eq!(with_axis(39, &[3], bytes(&[1])).refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn elements_in_a_field_of_another_type_are_refused() {
    for (data_type, name) in [(11, "fp32"), (10, "fp16"), (1, "bool"), (2, "string"), (24, "int64")] {
        let message = format!("`val` has the type {name}[1] but its elements are written as ints");
        assert_eq!(with_axis(data_type, &[1], ints(&[0])).refusal(), IN_AXIS.to_owned() + &message);
    }
    let message = "`val` has the type bool[1] but its elements are written as bytes";
    assert_eq!(with_axis(1, &[1], bytes(&[1])).refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn an_integer_that_its_type_cannot_hold_is_refused() {
    let message = "`val` holds -1, which uint16 cannot hold";
    assert_eq!(with_axis(32, &[1], ints(&[-1])).refusal(), IN_AXIS.to_owned() + message);
    let message = "`val` holds 200, which int8 cannot hold";
    assert_eq!(with_axis(21, &[1], ints(&[200])).refusal(), IN_AXIS.to_owned() + message);
}

#[test]
fn immediates_become_little_endian_bytes() {
    let inline = |parts| match axis(parts).data {
        ConstantData::Inline(bytes) => bytes,
        other => panic!("{other:?}"),
    };
    assert_eq!(inline(with_axis(23, &[2], ints(&[1, -2]))), [1, 0, 0, 0, 254, 255, 255, 255]);
    assert_eq!(inline(with_axis(22, &[2], ints(&[1, -2]))), [1, 0, 254, 255]);
    assert_eq!(inline(with_axis(32, &[1], ints(&[65_535]))), [255, 255]);
    let longs = immediate(TensorValues::LongInts(spec::RepeatedLongInts { values: vec![-1] }));
    assert_eq!(inline(with_axis(34, &[1], longs)), [255; 8]);
    let doubles = immediate(TensorValues::Doubles(spec::RepeatedDoubles { values: vec![1.0] }));
    assert_eq!(inline(with_axis(12, &[1], doubles)), [0, 0, 0, 0, 0, 0, 0xf0, 0x3f]);
    let bools = immediate(TensorValues::Bools(spec::RepeatedBools { values: vec![true, false] }));
    assert_eq!(inline(with_axis(1, &[2], bools)), [1, 0]);
}

// Lists: a classifier's labels are a list of strings.

fn list(element: i32, values: Vec<spec::Value>) -> spec::Value {
    let element = spec::TensorType { data_type: element, rank: 0, dimensions: Vec::new() };
    let element = spec::ValueType { kind: Some(ValueTypeKind::Tensor(element)) };
    let ty = spec::ListType { r#type: Some(Box::new(element)), length: None };
    let list = ImmediateKind::List(spec::ListValue { values });
    spec::Value {
        r#type: Some(spec::ValueType { kind: Some(ValueTypeKind::List(Box::new(ty))) }),
        kind: Some(ValueKind::Immediate(spec::ImmediateValue { kind: Some(list) })),
    }
}

fn scalar(data_type: i32, kind: Option<ValueKind>) -> spec::Value {
    let ty = spec::TensorType { data_type, rank: 0, dimensions: Vec::new() };
    spec::Value { r#type: Some(spec::ValueType { kind: Some(ValueTypeKind::Tensor(ty)) }), kind }
}

fn with_argument(value: spec::Value) -> Parts {
    let mut parts = plain();
    bind(&mut parts, "silu_0", "x", Some(BindingKind::Value(value)));
    parts
}

#[test]
fn a_list_of_scalars_is_a_tensor_of_rank_1() {
    let strings =
        |s: &str| immediate(TensorValues::Strings(spec::RepeatedStrings { values: vec![s.to_owned()] }));
    let package =
        with_argument(list(2, vec![scalar(2, strings("a")), scalar(2, strings("b"))])).open().unwrap();
    let ops = package.function(None).unwrap().all_ops();
    let silu = ops.iter().find(|op| op.kind == "silu").unwrap();
    let [Argument::Constant(labels)] = silu.inputs["x"].as_slice() else { panic!("{silu:?}") };
    assert_eq!(labels.ty, TensorType { dtype: DataType::String, shape: vec![Dim::Fixed(2)] });
    assert_eq!(labels.data, ConstantData::Strings(vec!["a".to_owned(), "b".to_owned()]));
}

#[test]
fn a_list_of_mixed_types_is_refused() {
    let parts = with_argument(list(23, vec![scalar(23, ints(&[1])), scalar(22, ints(&[1]))]));
    let message = "`x` is a list constant of mixed types, which is not supported here";
    assert_eq!(parts.refusal(), IN_SILU.to_owned() + message);
}

#[test]
fn tuple_constants_are_refused() {
    let tuple = spec::ValueType { kind: Some(ValueTypeKind::Tuple(spec::TupleType { types: Vec::new() })) };
    let kind = Some(ImmediateKind::Tuple(spec::Ignored {}));
    let kind = Some(ValueKind::Immediate(spec::ImmediateValue { kind }));
    let parts = with_argument(spec::Value { r#type: Some(tuple), kind });
    let message = "`x` is a tuple constant, which is not supported here";
    assert_eq!(parts.refusal(), IN_SILU.to_owned() + message);
}

#[test]
fn a_string_constant_in_a_weight_file_is_refused() {
    let blob = spec::BlobFileValue { file_name: crate::testing::WEIGHTS.to_owned(), offset: 64 };
    let message = with_axis(2, &[1], Some(ValueKind::BlobFile(blob))).refusal();
    assert!(message.ends_with("the blob holds fp16 but the constant is declared string"), "{message}");
}
