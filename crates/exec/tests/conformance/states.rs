//! States in programs written by hand: what is updated in place, and what blocks do to them.

use kvbaton_exec::{Array, Executable, Options};

use crate::{load, text};

fn program(source: &str) -> Executable {
    load(&text::cases(source)[0], &Options::with_threads(1)).unwrap()
}

fn ints(values: &[i32]) -> Array {
    Array::from_i32(&[values.len()], values).unwrap()
}

fn floats(array: &Array) -> Vec<f32> {
    array.to_f32().unwrap()
}

/// Keys and values in one state; the keys' view is taken before the values are written, and used after.
const UNIFIED: &str = "
case unified hand
func CoreML8 (cache: state fp16[2, 2, 3], at: int32[1]) {
  start: fp16[2, 2, 3] = read_state(input = cache);
  one: int32[1] = add(x = at, y = int32[1](1));
  k_begin: int32[3] = concat(values = (int32[1](0), at, int32[1](0)), axis = int32(0));
  k_end: int32[3] = concat(values = (int32[1](1), one, int32[1](3)), axis = int32(0));
  with_k: fp16[2, 2, 3] = slice_update(x = start, update = fp16[1, 1, 3](1, 2, 3), begin = k_begin, end = k_end);
  write_state(input = cache, data = with_k);
  now: fp16[2, 2, 3] = read_state(input = cache);
  keys: fp16[1, 2, 3] = slice_by_index(x = now, begin = int32[3](0, 0, 0), end = int32[3](1, 2, 3));
  v_begin: int32[3] = concat(values = (int32[1](1), at, int32[1](0)), axis = int32(0));
  v_end: int32[3] = concat(values = (int32[1](2), one, int32[1](3)), axis = int32(0));
  with_v: fp16[2, 2, 3] = slice_update(x = now, update = fp16[1, 1, 3](4, 5, 6), begin = v_begin, end = v_end);
  write_state(input = cache, data = with_v);
  last: fp16[2, 2, 3] = read_state(input = cache);
  values: fp16[1, 2, 3] = slice_by_index(x = last, begin = int32[3](1, 0, 0), end = int32[3](2, 2, 3));
  both: fp16[1, 2, 3] = mul(x = keys, y = values);
  return both;
}
";

#[test]
fn a_view_that_outlives_an_update_does_not_copy_the_state() {
    let program = program(UNIFIED);
    let mut state = program.new_state().unwrap();
    let start = state.bytes("cache").unwrap().as_ptr();
    let outputs = program.run_with(&[("at", ints(&[0]))], &mut state).unwrap();
    assert_eq!(floats(&outputs[0].1), [4.0, 10.0, 18.0, 0.0, 0.0, 0.0]);
    let outputs = program.run_with(&[("at", ints(&[1]))], &mut state).unwrap();
    assert_eq!(floats(&outputs[0].1), [4.0, 10.0, 18.0, 4.0, 10.0, 18.0]);
    assert_eq!(state.bytes("cache").unwrap().as_ptr(), start);
    let cache = floats(&state.array("cache").unwrap());
    assert_eq!(cache, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 4.0, 5.0, 6.0]);
}

/// One branch writes the state, the other one reads it alone.
const BRANCHES: &str = "
case branches hand
func CoreML8 (total: state fp16[2], x: int32[1]) {
  positive: bool[1] = greater(x = x, y = int32(0));
  which: bool = squeeze(x = positive);
  y: fp16[2] = cond(pred = which) () {
    old: fp16[2] = read_state(input = total);
    new: fp16[2] = add(x = old, y = fp16[2](1, 2));
    write_state(input = total, data = new);
    return old;
  } () {
    kept: fp16[2] = read_state(input = total);
    ten: fp16[2] = mul(x = kept, y = fp16(10));
    return ten;
  };
  after: fp16[2] = read_state(input = total);
  sum: fp16[2] = add(x = after, y = y);
  return sum;
}
";

#[test]
fn a_branch_can_write_a_state() {
    let program = program(BRANCHES);
    let mut state = program.new_state().unwrap();
    let mut run = |x| floats(&program.run_with(&[("x", ints(&[x]))], &mut state).unwrap()[0].1);
    assert_eq!(run(1), [1.0, 2.0]);
    assert_eq!(run(0), [11.0, 22.0]);
    assert_eq!(run(5), [3.0, 6.0]);
    assert_eq!(floats(&state.array("total").unwrap()), [2.0, 4.0]);
}

/// A loop writes one element of the state a round.
const ROUNDS: &str = "
case rounds hand
func CoreML8 (cache: state fp16[4], x: int32[1]) {
  n: int32 = squeeze(x = x);
  rounds: int32 = while_loop(loop_vars = (int32(0))) (i: int32) {
    more: bool = less(x = i, y = n);
    return more;
  } (j: int32) {
    old: fp16[4] = read_state(input = cache);
    next: int32 = add(x = j, y = int32(1));
    begin: int32[1] = expand_dims(x = j, axes = int32[1](0));
    end: int32[1] = expand_dims(x = next, axes = int32[1](0));
    value: fp16 = cast(x = next, dtype = string(\"fp16\"));
    update: fp16[1] = expand_dims(x = value, axes = int32[1](0));
    new: fp16[4] = slice_update(x = old, update = update, begin = begin, end = end);
    write_state(input = cache, data = new);
    return next;
  };
  return rounds;
}
";

#[test]
fn a_loop_updates_a_state_in_place() {
    let program = program(ROUNDS);
    let mut state = program.new_state().unwrap();
    let start = state.bytes("cache").unwrap().as_ptr();
    let outputs = program.run_with(&[("x", ints(&[3]))], &mut state).unwrap();
    assert_eq!(floats(&outputs[0].1), [3.0]);
    assert_eq!(floats(&state.array("cache").unwrap()), [1.0, 2.0, 3.0, 0.0]);
    assert_eq!(state.bytes("cache").unwrap().as_ptr(), start);
}

#[test]
fn a_condition_that_writes_a_state_is_refused() {
    let writes = "    write_state(input = cache, data = fp16[4](0, 0, 0, 0));\n    return more;";
    let source = ROUNDS.replace("    return more;", writes);
    let error = load(&text::cases(&source)[0], &Options::with_threads(1)).unwrap_err();
    assert_eq!(
        error,
        "function `main`: operation `while_loop` (output `rounds`): its condition writes a state"
    );
}
