use super::*;
use crate::description::{Feature, SizeRange};
use crate::program::DataType::{Float16, Float32, Int32};
use crate::testing::FunctionOf;

fn rules(function: &FunctionOf) -> Vec<&'static str> {
    of_function(&function.build(), None).into_iter().map(|warning| warning.rule).collect()
}

#[test]
fn a_state_whose_rows_are_64_bytes_passes_and_one_of_270_elements_does_not() {
    let state = |width| FunctionOf::default().state("k", Float16, &[30, 4, 512, width]);
    assert_eq!(rules(&state(256)), [""; 0]);
    assert_eq!(rules(&state(96)), [""; 0]);
    assert_eq!(rules(&state(270)), ["state_width"]);
}

#[test]
fn only_the_inner_dimensions_of_a_state_are_powers_of_two() {
    let state = |shape| FunctionOf::default().state("k", Float16, shape);
    assert_eq!(rules(&state(&[30, 4, 512, 64])), [""; 0]);
    assert_eq!(rules(&state(&[32, 3, 512, 64])), ["state_power_of_two"]);
    assert_eq!(rules(&state(&[32, 4, 500, 64])), ["state_power_of_two"]);
}

#[test]
fn two_states_pass_and_three_do_not() {
    let two = FunctionOf::default().state("a", Float16, &[2, 64]).state("b", Float16, &[2, 64]);
    assert_eq!(rules(&two), [""; 0]);
    assert_eq!(rules(&two.state("c", Float16, &[2, 64])), ["state_count"]);
}

#[test]
fn values_above_the_largest_dimension_are_reported_once_with_their_count() {
    let vocabulary = FunctionOf::default()
        .op("const", "table", Float16, &[49_152, 64])
        .op("linear", "logits", Float16, &[1, 49_152])
        .op("argmax", "best", Int32, &[1, 16_384])
        .op("softmax", "probabilities", Float16, &[1, 49_152]);
    let warnings = of_function(&vocabulary.build(), None);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert_eq!(warnings[0].rule, "dimension_limit");
    assert_eq!(warnings[0].place, "function `main`, `logits`");
    assert_eq!(warnings[0].message, "2 values have a dimension above 16384; the first is fp16[1, 49152]");
}

#[test]
fn an_fp16_output_has_at_most_16384_surface_rows() {
    let output = |dtype, layers| {
        FunctionOf::default().op("concat", "keys", dtype, &[layers, 3, 512, 64]).output("keys")
    };
    assert_eq!(rules(&output(Float16, 10)), [""; 0]);
    assert_eq!(rules(&output(Float16, 30)), ["surface_rows"]);
    assert_eq!(rules(&output(Float32, 30)), [""; 0]);
}

#[test]
fn pow_counts_in_fp16_and_sdpa_always() {
    let pow = |dtype| FunctionOf::default().op("pow", "y", dtype, &[4]);
    assert_eq!(rules(&pow(Float16)), ["pow"]);
    assert_eq!(rules(&pow(Float32)), [""; 0]);
    let sdpa = FunctionOf::default().op("scaled_dot_product_attention", "y", Float32, &[4]);
    assert_eq!(rules(&sdpa), ["sdpa"]);
}

#[test]
fn a_range_of_shapes_counts_beside_states_only() {
    let feature = |name: &str, flexibility| Feature {
        name: name.to_owned(),
        short_description: String::new(),
        optional: false,
        kind: FeatureKind::Array(ArrayFeature {
            dtype: Some(Float16),
            shape: vec![1, 64],
            flexibility,
            default_value: None,
        }),
    };
    let range = Flexibility::Ranges(vec![SizeRange { min: 1, max: None }; 2]);
    let mut features = Features { inputs: vec![feature("x", range)], ..Features::default() };
    let function = FunctionOf::default().build();
    assert_eq!(of_function(&function, Some(&features)), []);
    features.states = vec![feature("k", Flexibility::Fixed)];
    assert_eq!(of_function(&function, Some(&features))[0].rule, "ranged_shape_with_states");
}
