//! Stateful programs: two layers that keep keys and values, against numpy's values from `testdata/generate.py`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, ExecError, Executable, Options, State};
use kvbaton_mil::Package;
use serde_json::Value;

fn testdata(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn load(fuse: bool, threads: usize) -> Executable {
    let package = Arc::new(Package::open(&testdata("stateful.mlpackage")).unwrap());
    Executable::load(package, "main", &Options::with_threads(threads).fused(fuse)).unwrap()
}

fn runs() -> Vec<Value> {
    serde_json::from_str(&std::fs::read_to_string(testdata("stateful.json")).unwrap()).unwrap()
}

fn numbers(value: &Value) -> (Vec<usize>, Vec<f32>) {
    let list = |v: &Value| v.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect::<Vec<_>>();
    (
        list(&value["shape"]).into_iter().map(|d| d as usize).collect(),
        list(&value["values"]).into_iter().map(|v| v as f32).collect(),
    )
}

fn inputs(run: &Value) -> Vec<(&str, Array)> {
    let array = |v: &Value| {
        let (shape, values) = numbers(v);
        match v["dtype"].as_str().unwrap() {
            "int32" => Array::from_i32(&shape, &values.iter().map(|v| *v as i32).collect::<Vec<_>>()),
            _ => Array::from_f16(&shape, &values.iter().map(|v| f16::from_f32(*v)).collect::<Vec<_>>()),
        }
        .unwrap()
    };
    run["inputs"].as_object().unwrap().iter().map(|(name, v)| (name.as_str(), array(v))).collect()
}

#[track_caller]
fn assert_close(name: &str, have: &[f32], want: &Value) {
    let (_, want) = numbers(want);
    assert_eq!(have.len(), want.len(), "{name}");
    let worst = have.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let scale = want.iter().fold(1.0f32, |m, v| m.max(v.abs()));
    assert!(worst <= 4e-3 * scale, "{name} is off by {worst} of {scale}");
}

fn advance(program: &Executable, state: &mut State, run: &Value) -> Vec<(String, Array)> {
    program.run_with(&inputs(run), state).unwrap()
}

#[test]
fn chunks_give_numpys_outputs_and_states() {
    for fuse in [false, true] {
        let program = load(fuse, 2);
        let names: Vec<&str> = program.states().iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["keys", "values", "window"]);
        let mut state = program.new_state().unwrap();
        for run in runs() {
            for (name, array) in advance(&program, &mut state, &run) {
                assert_close(&name, &array.to_f32().unwrap(), &run["outputs"][&name]);
            }
            for name in &names {
                let have = state.array(name).unwrap().to_f32().unwrap();
                assert_close(name, &have, &run["states"][*name]);
            }
        }
    }
}

/// Every update happens in the state's own memory, which nothing larger than a layer is copied from.
#[test]
fn states_stay_where_they_are() {
    for fuse in [false, true] {
        let program = load(fuse, 1);
        let mut state = program.new_state().unwrap();
        let start = |state: &State, name: &str| state.bytes(name).unwrap().as_ptr().addr();
        let before = [start(&state, "keys"), start(&state, "values")];
        for run in runs() {
            advance(&program, &mut state, &run);
        }
        assert_eq!([start(&state, "keys"), start(&state, "values")], before);
    }
}

/// An array that shares a state keeps its values when the program goes on.
#[test]
fn a_shared_array_is_not_written() {
    let program = load(true, 1);
    let mut state = program.new_state().unwrap();
    let runs = runs();
    advance(&program, &mut state, &runs[0]);
    let shared = state.array("keys").unwrap();
    advance(&program, &mut state, &runs[1]);
    assert_close("shared", &shared.to_f32().unwrap(), &runs[0]["states"]["keys"]);
    assert_close("keys", &state.array("keys").unwrap().to_f32().unwrap(), &runs[1]["states"]["keys"]);
    let shared = state.array("keys").unwrap();
    state.bytes_mut("keys").unwrap().fill(0);
    assert_close("shared", &shared.to_f32().unwrap(), &runs[1]["states"]["keys"]);
}

/// Rows written into a state as bytes are what the program reads: the second chunk from the first one's states.
#[test]
fn a_state_can_be_filled() {
    let program = load(true, 1);
    let runs = runs();
    let mut first = program.new_state().unwrap();
    advance(&program, &mut first, &runs[0]);
    let mut second = program.new_state().unwrap();
    second.bytes_mut("keys").unwrap().copy_from_slice(first.bytes("keys").unwrap());
    second.set("values", &first.array("values").unwrap()).unwrap();
    second.set("window", &first.array("window").unwrap()).unwrap();
    let want = advance(&program, &mut first, &runs[1]);
    for ((name, a), (_, b)) in advance(&program, &mut second, &runs[1]).iter().zip(&want) {
        assert_eq!(a.bytes()[..], b.bytes()[..], "{name}");
    }
}

/// States are found by name: one function's go on in another one, as prefill and decode of one package do.
#[test]
fn a_state_goes_on_in_another_function() {
    let (first, second) = (load(true, 1), load(false, 2));
    let mut state = first.new_state().unwrap();
    let runs = runs();
    advance(&first, &mut state, &runs[0]);
    for (name, array) in advance(&second, &mut state, &runs[1]) {
        assert_close(&name, &array.to_f32().unwrap(), &runs[1]["outputs"][&name]);
    }
    let stranger = Package::open(&testdata("attention.mlpackage")).unwrap();
    let stranger = Executable::load(Arc::new(stranger), "main", &Options::with_threads(1)).unwrap();
    let mut other = stranger.new_state().unwrap();
    let error = first.run_with(&inputs(&runs[0]), &mut other).unwrap_err().to_string();
    assert_eq!(error, "state `keys` is unknown; there are []");
}

#[test]
fn a_run_that_fails_loses_the_states_it_took() {
    let program = load(true, 1);
    let mut state = program.new_state().unwrap();
    let runs = runs();
    let mut inputs = inputs(&runs[0]);
    for (name, array) in &mut inputs {
        if *name == "position" {
            *array = Array::from_i32(&[1], &[11]).unwrap();
        }
    }
    let error = program.run_with(&inputs, &mut state).unwrap_err();
    assert!(matches!(&error, ExecError::Run { op, .. } if op == "slice_update"), "{error}");
    let error = program.run_with(&inputs, &mut state).unwrap_err().to_string();
    assert_eq!(error, "state `keys` was lost when a run failed; set or clear it first");
    assert_eq!(state.bytes("keys").unwrap_err().to_string(), error);
    state.clear();
    advance(&program, &mut state, &runs[0]);
    assert_close("keys", &state.array("keys").unwrap().to_f32().unwrap(), &runs[0]["states"]["keys"]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let program = load(true, 1);
    let error = program.run(&inputs(&runs()[0])).unwrap_err().to_string();
    let states = r#"["keys", "values", "window"]"#;
    assert_eq!(error, format!("function `main` has states ({states}), and was given none"));
    let mut state = program.new_state().unwrap();
    let error = state.bytes_mut("cache").unwrap_err().to_string();
    assert_eq!(error, format!("state `cache` is unknown; there are {states}"));
    let other = Array::from_f16(&[1], &[f16::ONE]).unwrap();
    let error = state.set("window", &other).unwrap_err().to_string();
    assert_eq!(error, "state `window` is fp16[1], the function has fp16[4, 32]");
}
