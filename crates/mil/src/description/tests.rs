use crate::spec::{self, ArrayFeatureType, FeatureKind, ShapeFlexibility};
use crate::testing::Parts;

const AT: &str = "the description of function `main` is wrong at ";

/// `plain` with its input `input_ids` changed.
fn with_input(change: impl FnOnce(&mut spec::FeatureDescription)) -> Parts {
    let mut parts = Parts::of("plain");
    change(&mut parts.model.description.as_mut().unwrap().input[0]);
    parts
}

fn with_array(change: impl FnOnce(&mut ArrayFeatureType)) -> Parts {
    with_input(|feature| {
        let Some(FeatureKind::MultiArray(array)) = &mut feature.r#type.as_mut().unwrap().kind else {
            panic!()
        };
        change(array);
    })
}

#[test]
fn a_feature_the_program_does_not_have_is_refused() {
    let parts = with_input(|feature| feature.name = "tokens".to_owned());
    assert_eq!(parts.refusal(), format!("{AT}`tokens`: the program has no such input"));
}

#[test]
fn an_input_that_is_not_described_is_refused() {
    let mut parts = Parts::of("plain");
    parts.model.description.as_mut().unwrap().input.pop();
    assert_eq!(parts.refusal(), format!("{AT}`last_index`: this input of the program is not described"));
}

#[test]
fn an_output_the_program_does_not_give_is_refused() {
    let mut parts = Parts::of("plain");
    parts.model.description.as_mut().unwrap().output[0].name = "scores".to_owned();
    assert_eq!(parts.refusal(), format!("{AT}`scores`: the program has no such output"));
}

#[test]
fn a_state_described_as_an_input_is_refused() {
    let mut parts = Parts::of("stateful");
    let description = parts.model.description.as_mut().unwrap();
    let state = description.state.remove(0);
    description.input.push(state);
    assert_eq!(parts.refusal(), format!("{AT}`k_state`: the program has no such input"));
}

#[test]
fn another_element_type_than_the_programs_is_refused() {
    let parts = with_array(|array| array.data_type = 65552);
    let message = "it is described as fp16 but the program has int32[1, 16]";
    assert_eq!(parts.refusal(), format!("{AT}`input_ids`: {message}"));
}

#[test]
fn another_shape_than_the_programs_is_refused() {
    let parts = with_array(|array| array.shape = vec![1, 17]);
    let message = "it is described as [1, 17] but the program has int32[1, 16]";
    assert_eq!(parts.refusal(), format!("{AT}`input_ids`: {message}"));
}

#[test]
fn a_negative_size_is_refused() {
    let parts = with_array(|array| array.shape = vec![1, -16]);
    assert_eq!(parts.refusal(), format!("{AT}`input_ids`: -16 is not a size"));
}

#[test]
fn an_unknown_array_type_is_refused() {
    let parts = with_array(|array| array.data_type = 7);
    assert_eq!(parts.refusal(), format!("{AT}`input_ids`: the array type number 7 is unknown"));
}

#[test]
fn a_range_that_holds_no_size_is_refused() {
    let range = spec::SizeRange { lower_bound: 9, upper_bound: 8 };
    let range = ShapeFlexibility::Range(spec::ShapeRange { size_ranges: vec![range] });
    let parts = with_array(|array| array.flexibility = Some(range));
    assert_eq!(parts.refusal(), format!("{AT}`input_ids`: the sizes 9 to 8 are none"));
}

#[test]
fn a_feature_without_a_type_is_refused() {
    let parts = with_input(|feature| feature.r#type = None);
    assert_eq!(parts.refusal(), format!("{AT}`input_ids`: it has no type"));
}

#[test]
fn a_described_function_the_program_does_not_have_is_refused() {
    let mut parts = Parts::of("two_functions");
    parts.model.description.as_mut().unwrap().functions[0].name = "decode".to_owned();
    let message =
        "the description of function `decode` is wrong at `decode`: the program has no such function";
    assert_eq!(parts.refusal(), message);
}

#[test]
fn a_function_described_twice_is_refused() {
    let mut parts = Parts::of("two_functions");
    let functions = &mut parts.model.description.as_mut().unwrap().functions;
    functions[1] = functions[0].clone();
    assert!(parts.refusal().ends_with("the function is described twice"));
}

#[test]
fn inputs_come_in_the_order_of_the_description() {
    let mut parts = Parts::of("stateful");
    let description = parts.model.description.as_mut().unwrap();
    description.input.reverse();
    description.state.reverse();
    let package = parts.open().unwrap();
    let function = package.function(None).unwrap();
    let names = |ids: &[_]| ids.iter().map(|&id| function.value(id).name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&function.inputs), ["causal_mask", "current_pos", "hidden"]);
    assert_eq!(names(&function.states), ["v_state", "k_state"]);
}

#[test]
fn optional_inputs_keep_their_default_value() {
    let mut parts = with_input(|feature| feature.r#type.as_mut().unwrap().is_optional = true);
    let feature = &mut parts.model.description.as_mut().unwrap().input[0];
    let Some(FeatureKind::MultiArray(array)) = &mut feature.r#type.as_mut().unwrap().kind else { panic!() };
    array.default_value = Some(spec::DefaultValue::Int(3));
    let package = parts.open().unwrap();
    let feature = &package.description().functions["main"].inputs[0];
    assert!(feature.optional);
    let super::FeatureKind::Array(array) = &feature.kind else { panic!() };
    assert_eq!(array.default_value, Some(3.0));
}
