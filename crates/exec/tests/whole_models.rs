//! Whole models that other exporters wrote (`python/tests/foreign`), fused against one operation after the other: the same
//! bits in every numerics, states included. Their values are compared with numpy's in `python/tests/test_foreign.py`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, Executable, Numerics, Options, WeightStorage};
use kvbaton_mil::Package;

const TOKENS: usize = 29;
/// Tokens that a function of fixed shape takes.
const FIXED: usize = 32;

fn ints(shape: &[usize], values: impl Iterator<Item = usize>) -> Array {
    let values: Vec<i32> = values.map(|v| i32::try_from(v).unwrap()).collect();
    Array::from_i32(shape, &values).unwrap()
}

fn ids(tokens: usize) -> Array {
    ints(&[1, tokens], (0..tokens).map(|i| (i * 131 + 7) % 500))
}

fn mask(tokens: usize) -> Array {
    let hidden = |i: usize| if i % tokens > i / tokens { f16::NEG_INFINITY } else { f16::ZERO };
    let values: Vec<f16> = (0..tokens * tokens).map(hidden).collect();
    Array::from_f16(&[1, 1, tokens, tokens], &values).unwrap()
}

/// The package's name and inputs.
fn models() -> [(&'static str, Vec<(&'static str, Array)>); 4] {
    let anemll = vec![
        ("input_ids", ids(FIXED)),
        ("position_ids", ints(&[FIXED], 0..FIXED)),
        ("causal_mask", mask(FIXED)),
        ("current_pos", ints(&[1], [0].into_iter())),
    ];
    let last = ints(&[1], [TOKENS - 1].into_iter());
    [
        ("anemll", anemll),
        ("coreml_llm", vec![("input_ids", ids(FIXED)), ("last_index", last)]),
        ("torch_outputs", vec![("input_ids", ids(FIXED))]),
        ("torch_states", vec![("inputIds", ids(TOKENS)), ("causalMask", mask(TOKENS))]),
    ]
}

/// Bits of every output and every state.
fn answer(name: &str, options: &Options, inputs: &[(&str, Array)]) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../python/tests/foreign");
    let package = Package::open(&folder.join(format!("{name}.mlpackage"))).unwrap();
    let program = Executable::load(Arc::new(package), "main", options).unwrap();
    let mut state = program.new_state().unwrap();
    let outputs = program.run_with(inputs, &mut state).unwrap();
    let states = program.states().iter().map(|f| (f.name.clone(), state.bytes(&f.name).unwrap().to_vec()));
    outputs.iter().map(|(name, array)| (name.clone(), array.bytes().to_vec())).chain(states).collect()
}

#[test]
fn whole_models_give_the_same_bits_fused_and_not() {
    for (name, inputs) in models() {
        let mut answers = Vec::new();
        for numerics in Numerics::ALL {
            let options = |threads, fuse| Options::with_threads(threads).fused(fuse).with_numerics(numerics);
            let plain = answer(name, &options(1, false), &inputs);
            assert!(
                plain.iter().all(|(_, bytes)| bytes.iter().any(|b| *b != 0)),
                "{name}: nothing but zeros"
            );
            for threads in [1, 3] {
                let fused = answer(name, &options(threads, true), &inputs);
                for ((of, have), (_, want)) in fused.iter().zip(&plain) {
                    assert!(have == want, "{name}: `{of}` in {}, {threads} threads", numerics.name());
                }
            }
            let streamed = options(2, true).with_weights(WeightStorage::Streamed);
            assert!(answer(name, &streamed, &inputs) == plain, "{name}: streamed weights");
            answers.push(plain);
        }
        // The comparison can fail: another rounding gives other bits.
        assert!(answers[0] != answers[1] && answers[1] != answers[2], "{name}");
    }
}
