use super::*;
use crate::program::DataType::{Float16, Int32};
use crate::testing::FunctionOf;

fn caches(function: &FunctionOf) -> Vec<(String, Part, Option<String>)> {
    let found = discover(&function.build());
    found.caches.into_iter().map(|array| (array.name, array.part, array.pair)).collect()
}

fn outputs(names: &[&str], shape: &[usize]) -> FunctionOf {
    names.iter().fold(FunctionOf::default(), |function, name| {
        function.op("concat", name, Float16, shape).output(name)
    })
}

#[test]
fn names_split_into_words() {
    assert_eq!(words("new_k_cache_12"), ["new", "k", "cache", "12"]);
    assert_eq!(words("pastKeyValues.3.key"), ["past", "key", "values", "3", "key"]);
    assert_eq!(words("K13"), ["k", "13"]);
}

#[test]
fn parts_come_from_the_words_of_a_name() {
    for (name, expected) in [
        ("key_cache", Part::Key),
        ("V7", Part::Value),
        ("past_key_values_3_key", Part::Key),
        ("past_key_values", Part::KeyValue),
        ("kv13_k", Part::Key),
        ("kv_cache_0", Part::KeyValue),
        ("K_sliding_in", Part::Key),
        ("conv_state_2", Part::Recurrent),
        ("hidden_states", Part::Unknown),
    ] {
        assert_eq!(part(name), expected, "{name}");
    }
}

#[test]
fn layers_pair_by_name() {
    let found = discover(&outputs(&["K0", "V0", "K1", "V1"], &[1, 2, 16, 64]).build());
    let pairs: Vec<_> = found.caches.iter().map(|a| (a.number, a.pair.as_deref().unwrap())).collect();
    assert_eq!(pairs, [(Some(0), "V0"), (Some(0), "K0"), (Some(1), "V1"), (Some(1), "K1")]);
}

#[test]
fn nameless_outputs_are_caches_in_pairs_only() {
    let unknown = |name: &str, pair: &str| (name.to_owned(), Part::Unknown, Some(pair.to_owned()));
    let two = outputs(&["concat_1", "concat_2"], &[30, 3, 512, 64]);
    assert_eq!(caches(&two), [unknown("concat_1", "concat_2"), unknown("concat_2", "concat_1")]);
    assert_eq!(caches(&outputs(&["concat_1"], &[30, 3, 512, 64])), []);
    assert_eq!(caches(&outputs(&["a", "b", "c"], &[30, 3, 512, 64])), []);
}

#[test]
fn logits_and_masks_are_no_caches() {
    let function = FunctionOf::default()
        .input("causal_mask", Float16, &[1, 1, 64, 512])
        .op("linear", "logits", Float16, &[1, 64, 1000])
        .output("logits");
    assert_eq!(caches(&function), []);
    assert_eq!(discover(&function.build()).masks, ["causal_mask"]);
}

#[test]
fn capacity_follows_the_mask_then_the_tokens_then_the_shape() {
    let guess = |function: FunctionOf| {
        let found = discover(&function.state("kv_cache_0", Float16, &[28, 8, 64, 512]).build());
        found.capacity.map(|c| (c.rows, c.dimension))
    };
    let tokens = FunctionOf::default().input("input_ids", Int32, &[1, 64]);
    assert_eq!(guess(tokens.clone().input("mask", Float16, &[1, 1, 64, 512])), Some((512, 3)));
    assert_eq!(guess(tokens), Some((64, 2)));
    assert_eq!(guess(FunctionOf::default().input("x", Float16, &[1, 7])), Some((64, 2)));
}

#[test]
fn inputs_have_roles() {
    let function = FunctionOf::default()
        .input("input_ids", Int32, &[1, 64])
        .input("position_ids", Int32, &[1, 64])
        .input("current_pos", Int32, &[1])
        .input("inputs_embeds", Float16, &[1, 64, 32]);
    let found = discover(&function.build());
    assert_eq!(found.tokens, ["input_ids"]);
    assert_eq!(found.positions, ["position_ids", "current_pos"]);
    assert_eq!(found.embeddings, ["inputs_embeds"]);
    assert_eq!(found.capacity, None);
}
