//! Whole programs: fused against one operation after the other, bit for bit; and what is refused.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, ExecError, Executable, Numerics, Options};
use kvbaton_mil::Package;

fn open(name: &str) -> Arc<Package> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name);
    Arc::new(Package::open(&path).unwrap())
}

fn load(name: &str, fuse: bool, threads: usize) -> Result<Executable, ExecError> {
    Executable::load(open(name), "main", &Options::with_threads(threads).fused(fuse))
}

const SHAPE: [usize; 3] = [1, 96, 32];

fn noise(scale: f32) -> Vec<f16> {
    let mut state = 5u32;
    (0..SHAPE.iter().product())
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f16::from_f32(((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale)
        })
        .collect()
}

fn rounding(numerics: Numerics, fuse: bool, threads: usize) -> Executable {
    let options = Options::with_threads(threads).fused(fuse).with_numerics(numerics);
    Executable::load(open("attention.mlpackage"), "main", &options).unwrap()
}

fn assert_fused_equals_plain(x: &[f16]) {
    Numerics::ALL.into_iter().for_each(|numerics| assert_fused_equals_plain_in(numerics, x));
}

fn assert_fused_equals_plain_in(numerics: Numerics, x: &[f16]) {
    let input = Array::from_f16(&SHAPE, x).unwrap();
    let plain = rounding(numerics, false, 1).run(&[("x", input.clone())]).unwrap();
    for threads in [1, 3] {
        let fused = rounding(numerics, true, threads);
        let outputs = fused.run(&[("x", input.clone())]).unwrap();
        for ((name, a), (other, b)) in outputs.iter().zip(&plain) {
            assert_eq!((name, a.shape()), (other, b.shape()));
            let same = a.to_f32().unwrap().iter().zip(b.to_f32().unwrap()).all(|(a, b)| {
                // Which NaN comes out depends on the order of operands in the processor.
                a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
            });
            assert!(same, "`{name}` differs with {threads} threads in {}", numerics.name());
        }
    }
}

/// Grouped heads folded into rows, five dimensions, repeated keys, a reshape and a softmax in steps between the
/// products, and no mask: each is found, with rope, norm and gating fused around it.
#[test]
fn every_way_of_writing_attention_is_recognised() {
    let fused = load("attention.mlpackage", true, 1).unwrap();
    let census = fused.census();
    let count = |name: &str| census.iter().find(|(n, _)| n == name).map_or(0, |(_, n)| *n);
    assert_eq!(count("(attention)"), 5, "{census:?}");
    for gone in ["matmul", "softmax", "silu", "layer_norm", "split", "concat", "exp"] {
        assert_eq!(count(gone), 0, "{gone} stands alone: {census:?}");
    }
}

#[test]
fn fused_programs_equal_plain_ones() {
    assert_fused_equals_plain(&noise(1.0));
}

/// With scores this large, the mask's -40000 hides nothing for sure, and no block may be skipped.
#[test]
fn fused_programs_equal_plain_ones_on_huge_values() {
    assert_fused_equals_plain(&noise(60000.0));
}

/// Infinite values behind the mask reach every row in the plain program: 0 times infinity is NaN.
#[test]
fn fused_programs_equal_plain_ones_on_infinities() {
    let mut x = noise(1.0);
    x[95 * 32] = f16::INFINITY;
    assert_fused_equals_plain(&x);
}

const PAST: [usize; 4] = [3, 2, 40, 16];

/// Inputs of `past.mlpackage`; `unwritten` is in the slots that hold no row yet.
fn past_inputs(position: usize, unwritten: f16) -> Vec<(&'static str, Array)> {
    let values = noise(1.5);
    let take = |shape: &[usize], from: usize| {
        let count = shape.iter().product();
        Array::from_f16(shape, &values.iter().copied().cycle().skip(from).take(count).collect::<Vec<_>>())
    };
    let cache = |from: usize| {
        let count: usize = PAST.iter().product();
        let mut all: Vec<f16> = values.iter().copied().cycle().skip(from).take(count).collect();
        for (slot, row) in all.chunks_mut(PAST[3]).enumerate() {
            if slot % PAST[2] >= position {
                row.fill(unwritten);
            }
        }
        Array::from_f16(&PAST, &all).unwrap()
    };
    vec![
        ("q", take(&[1, 2, 24, 16], 7).unwrap()),
        ("k", take(&[1, 2, 8, 16], 101).unwrap()),
        ("v", take(&[1, 2, 8, 16], 203).unwrap()),
        ("past_k", cache(11)),
        ("past_v", cache(13)),
        ("position", Array::from_i32(&[1], &[i32::try_from(position).unwrap()]).unwrap()),
    ]
}

fn bits(outputs: &[(String, Array)]) -> Vec<u8> {
    outputs.iter().flat_map(|(_, a)| a.bytes().to_vec()).collect()
}

/// A past is read as far as its mask shows it, and joined to the chunk's rows for no more than one product.
#[test]
fn attention_over_a_past_equals_the_plain_program() {
    let plain = load("past.mlpackage", false, 1).unwrap();
    for position in [0, 1, 7, 20, 39, 40, 55] {
        let inputs = past_inputs(position, f16::ZERO);
        let expected = bits(&plain.run(&inputs).unwrap());
        for threads in [1, 3] {
            let fused = load("past.mlpackage", true, threads).unwrap();
            let census = fused.census();
            let count = |name: &str| census.iter().find(|(n, _)| n == name).map_or(0, |(_, n)| *n);
            // The two concats that are left make the masks.
            assert_eq!((count("(attention)"), count("concat")), (2, 2), "{census:?}");
            assert_eq!(bits(&fused.run(&inputs).unwrap()), expected, "after {position} tokens");
        }
    }
}

#[test]
fn slots_that_hold_no_row_yet_are_not_read() {
    let fused = load("past.mlpackage", true, 2).unwrap();
    for position in [0, 1, 20, 33] {
        let expected = bits(&fused.run(&past_inputs(position, f16::ZERO)).unwrap());
        assert_eq!(bits(&fused.run(&past_inputs(position, f16::NAN)).unwrap()), expected, "{position}");
    }
}

/// The three ways to round give three answers, close to each other.
#[test]
fn each_numerics_has_its_own_bits() {
    let input = Array::from_f16(&SHAPE, &noise(1.0)).unwrap();
    let answers = Numerics::ALL.map(|n| {
        let outputs = rounding(n, true, 1).run(&[("x", input.clone())]).unwrap();
        outputs.iter().flat_map(|(_, a)| a.to_f32().unwrap()).collect::<Vec<f32>>()
    });
    let norm = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f32>().sqrt();
    let (storage, accumulate) = (norm(&answers[0], &answers[1]), norm(&answers[0], &answers[2]));
    let whole = norm(&answers[0], &vec![0.0; answers[0].len()]);
    assert!(0.0 < storage && storage < accumulate, "{storage} {accumulate}");
    assert!(accumulate < 0.05 * whole, "{accumulate} of {whole}");
}

#[test]
fn every_operation_is_observed_once_and_in_order() {
    let input = Array::from_f16(&SHAPE, &noise(1.0)).unwrap();
    let package = open("attention.mlpackage");
    let ops = package.function(None).unwrap().all_ops();
    let names = ops
        .iter()
        .filter(|op| op.kind != "const")
        .flat_map(|op| op.outputs.iter().map(|id| package.function(None).unwrap().value(*id).name.clone()));
    let names: Vec<String> = names.collect();
    let fused = rounding(Numerics::default(), true, 2);
    let (mut seen, mut last) = (Vec::new(), Vec::new());
    let outputs = fused
        .run_observed(&[("x", input.clone())], &mut fused.new_state().unwrap(), &mut |o| {
            seen.push(o.output().to_owned());
            assert_eq!(o.statistics(&[]).map(|s| s.count), o.values().map(|v| v.len()), "{}", o.op());
            last = o.values().unwrap_or_default();
        })
        .unwrap();
    assert_eq!(seen, names);
    let plain = fused.run(&[("x", input)]).unwrap();
    for ((name, a), (_, b)) in outputs.iter().zip(&plain) {
        assert_eq!(a.to_f32(), b.to_f32(), "{name}");
    }
    assert_eq!(outputs.last().unwrap().1.to_f32().unwrap(), last, "the last result is an output");
}

#[test]
fn fusing_attention_needs_less_memory() {
    let input = Array::from_f16(&SHAPE, &noise(1.0)).unwrap();
    let peak = |fuse| {
        let program = load("attention.mlpackage", fuse, 1).unwrap();
        assert_eq!(program.peak_bytes(), 0);
        program.run(&[("x", input.clone())]).unwrap();
        program.peak_bytes()
    };
    let scores = 6 * 96 * 96 * 4;
    assert!(peak(true) + scores < peak(false), "{} {}", peak(true), peak(false));
}

#[test]
fn outputs_start_on_a_page() {
    let input = Array::from_f16(&SHAPE, &noise(1.0)).unwrap();
    for (name, array) in load("attention.mlpackage", true, 1).unwrap().run(&[("x", input)]).unwrap() {
        assert_eq!(array.bytes().as_ptr().addr() % kvbaton_memory::PAGE_BYTES, 0, "{name}");
    }
}

#[test]
fn a_missing_operation_is_named_at_load() {
    let error = load("missing.mlpackage", true, 1).unwrap_err().to_string();
    assert_eq!(
        error,
        "function `main`: operation `sliding_windows` (output `windows`) is not supported on the CPU"
    );
}

#[test]
fn an_unknown_function_is_an_error() {
    let error = Executable::load(open("attention.mlpackage"), "decode", &Options::default()).unwrap_err();
    assert!(matches!(error, ExecError::Package(_)), "{error}");
}

fn refusal(inputs: &[(&str, Array)]) -> String {
    load("attention.mlpackage", true, 1).unwrap().run(inputs).unwrap_err().to_string()
}

#[test]
fn a_missing_input_is_an_error() {
    assert_eq!(refusal(&[]), "input `x` is missing; the function takes [\"x\"]");
}

#[test]
fn an_unknown_input_is_an_error() {
    let x = Array::from_f16(&SHAPE, &noise(1.0)).unwrap();
    let error = refusal(&[("x", x.clone()), ("mask", x)]);
    assert_eq!(error, "input `mask` is unknown or given twice; the function takes [\"x\"]");
}

#[test]
fn an_input_given_twice_is_an_error() {
    let x = Array::from_f16(&SHAPE, &noise(1.0)).unwrap();
    let error = refusal(&[("x", x.clone()), ("x", x)]);
    assert_eq!(error, "input `x` is unknown or given twice; the function takes [\"x\"]");
}

#[test]
fn an_input_of_another_shape_is_an_error() {
    let x = Array::from_f16(&[1, 32, 96], &noise(1.0)).unwrap();
    assert_eq!(refusal(&[("x", x)]), "input `x` is fp16[1, 32, 96], the function takes fp16[1, 96, 32]");
}

#[test]
fn an_input_of_another_type_is_an_error() {
    let x = Array::from_f32(&SHAPE, &[0.0; 96 * 32]).unwrap();
    assert_eq!(refusal(&[("x", x)]), "input `x` is fp32[1, 96, 32], the function takes fp16[1, 96, 32]");
}

#[test]
fn an_array_of_too_few_values_is_an_error() {
    let error = Array::from_i32(&[2, 3], &[0; 5]).unwrap_err().to_string();
    assert_eq!(error, "a int32 array of shape [2, 3] has 24 bytes, not 20");
}
