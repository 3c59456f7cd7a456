//! What each numerics rounds, on sums that fp16 does not hold: 2049 lies between 2048 and 2050.

use half::f16;
use kvbaton_exec::{Array, Numerics, Options};

use crate::{load, numbers, text};

fn halves(values: &[f32]) -> Array {
    let values: Vec<f16> = values.iter().map(|v| f16::from_f32(*v)).collect();
    Array::from_f16(&[values.len()], &values).unwrap()
}

/// The result of the program, fused and not, and the state `held` where it has one.
fn run(source: &str, x: &[f32], numerics: Numerics) -> (Vec<f64>, Option<Vec<f64>>) {
    let answers = [true, false].map(|fuse| {
        let options = Options::with_threads(1).fused(fuse).with_numerics(numerics);
        let program = load(&text::cases(source)[0], &options).unwrap();
        let mut state = program.new_state().unwrap();
        let outputs = program.run_with(&[("x", halves(x))], &mut state).unwrap();
        let held = state.array("held").ok().map(|array| numbers(&array));
        (numbers(&outputs[0].1), held)
    });
    assert_eq!(answers[0], answers[1], "fused and not, in {}", numerics.name());
    answers.into_iter().next().unwrap()
}

const STEPS: &str = "
case steps hand
func CoreML8 (x: fp16[1]) {
  more: fp16[1] = add(x = x, y = fp16(1));
  less: fp16[1] = sub(x = more, y = fp16(2048));
  return less;
}
";

#[test]
fn a_value_between_operations_is_rounded_unless_asked_not_to() {
    assert_eq!(run(STEPS, &[2048.0], Numerics::F32).0, [1.0]);
    assert_eq!(run(STEPS, &[2048.0], Numerics::F16Storage).0, [0.0]);
    assert_eq!(run(STEPS, &[2048.0], Numerics::F16Accumulate).0, [0.0]);
}

const OUTPUT: &str = "
case output hand
func CoreML8 (x: fp16[1]) {
  more: fp16[1] = add(x = x, y = fp16(1));
  return more;
}
";

#[test]
fn a_result_is_rounded_as_its_type_says() {
    for numerics in Numerics::ALL {
        assert_eq!(run(OUTPUT, &[2048.0], numerics).0, [2048.0], "{}", numerics.name());
        // Ties go to even: 2051 lies between 2050 and 2052.
        assert_eq!(run(OUTPUT, &[2050.0], numerics).0, [2052.0], "{}", numerics.name());
    }
}

const STATE: &str = "
case state hand
func CoreML8 (held: state fp16[1], x: fp16[1]) {
  old: fp16[1] = read_state(input = held);
  more: fp16[1] = add(x = x, y = fp16(1));
  sum: fp16[1] = add(x = old, y = more);
  write_state(input = held, data = sum);
  new: fp16[1] = read_state(input = held);
  less: fp16[1] = sub(x = new, y = fp16(2048));
  return less;
}
";

#[test]
fn a_state_is_rounded_when_it_is_written() {
    for numerics in Numerics::ALL {
        let (less, held) = run(STATE, &[2048.0], numerics);
        assert_eq!((less, held), (vec![0.0], Some(vec![2048.0])), "{}", numerics.name());
    }
}

/// A row of 33: after 32 terms the sum is rounded.
const PRODUCT: &str = "
case product hand
func CoreML8 (x: fp16[33]) {
  ones: fp16[33, 1] = fill(shape = int32[2](33, 1), value = fp16(1));
  y: fp16[1] = matmul(x = x, y = ones);
  return y;
}
";

#[test]
fn sums_are_rounded_as_they_grow_where_asked() {
    // 2048 and 1 are 2049 after 32 terms, which becomes 2048; the last 1 makes 2049 again, and a result of 2048.
    let mut x = [0.0; 33];
    (x[0], x[1], x[32]) = (2048.0, 1.0, 1.0);
    assert_eq!(run(PRODUCT, &x, Numerics::F16Accumulate).0, [2048.0]);
    // Rounded once, 2050 is a value of fp16.
    assert_eq!(run(PRODUCT, &x, Numerics::F16Storage).0, [2050.0]);
    assert_eq!(run(PRODUCT, &x, Numerics::F32).0, [2050.0]);
    // All within the first 32 terms: one sum, rounded once.
    (x[32], x[2]) = (0.0, 1.0);
    assert_eq!(run(PRODUCT, &x, Numerics::F16Accumulate).0, [2050.0]);
}

/// A reduction keeps sixteen partial sums: value `i` goes to number `i mod 16`.
const SUM: &str = "
case sum hand
func CoreML8 (x: fp16[64]) {
  y: fp16[1] = reduce_sum(x = x, axes = int32[1](0), keep_dims = bool(true));
  return y;
}
";

#[test]
fn partial_sums_of_a_row_are_rounded_where_asked() {
    let mut x = [0.0; 64];
    // One partial sum: 2048 + 1, rounded after 32 values to 2048, then + 1 again.
    (x[0], x[16], x[32]) = (2048.0, 1.0, 1.0);
    assert_eq!(run(SUM, &x, Numerics::F16Accumulate).0, [2048.0]);
    assert_eq!(run(SUM, &x, Numerics::F16Storage).0, [2050.0]);
    assert_eq!(run(SUM, &x, Numerics::F32).0, [2050.0]);
}
