//! Every operation against coremltools' own definition (or numpy's), from `testdata/generate.py`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, Executable, Numerics, Options};
use kvbaton_mil::Package;
use serde_json::Value;

fn testdata(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn numbers(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn shape(value: &Value) -> Vec<usize> {
    value["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect()
}

fn array(value: &Value) -> Array {
    let (shape, values) = (shape(value), numbers(&value["values"]));
    match value["dtype"].as_str().unwrap() {
        "float16" => Array::from_f16(&shape, &values.iter().map(|v| f16::from_f64(*v)).collect::<Vec<_>>()),
        "float32" => Array::from_f32(&shape, &values.iter().map(|v| *v as f32).collect::<Vec<_>>()),
        "int32" => Array::from_i32(&shape, &values.iter().map(|v| *v as i32).collect::<Vec<_>>()),
        other => panic!("{other}"),
    }
    .unwrap()
}

/// `slack`: of the largest expected value, more than the case itself allows.
fn check(options: Options, slack: f64) {
    let golden: Value =
        serde_json::from_str(&std::fs::read_to_string(testdata("ops.json")).unwrap()).unwrap();
    let package = Arc::new(Package::open(&testdata("ops.mlpackage")).unwrap());
    let program = Executable::load(package, "main", &options).unwrap();
    let inputs: Vec<(&str, Array)> =
        golden["inputs"].as_object().unwrap().iter().map(|(k, v)| (k.as_str(), array(v))).collect();
    let outputs = program.run(&inputs).unwrap();
    let expected = golden["outputs"].as_object().unwrap();
    assert_eq!(outputs.len(), expected.len());
    let mut wrong = Vec::new();
    for (name, got) in &outputs {
        let want = &expected[name];
        let values = numbers(&want["values"]);
        let tolerance = want["tolerance"].as_f64().unwrap() + slack;
        let largest = values.iter().fold(1.0f64, |m, v| m.max(v.abs()));
        let worst = got
            .to_f32()
            .unwrap()
            .iter()
            .zip(&values)
            // JSON's decimal numbers come back exact in f32 only.
            .map(|(g, w)| (f64::from(*g) - f64::from(*w as f32)).abs())
            .fold(0.0f64, |m, d| if d > m || d.is_nan() { d } else { m });
        if got.shape() != shape(want) {
            wrong.push(format!("{name}: shape {:?}, not {:?}", got.shape(), shape(want)));
        } else if worst.is_nan() || worst > tolerance * largest {
            wrong.push(format!("{name}: off by {worst:e}, allowed {:e}", tolerance * largest));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn operations_equal_coremltools() {
    check(Options::with_threads(2).fused(false), 0.0);
}

#[test]
fn fused_operations_equal_coremltools() {
    check(Options::with_threads(2), 0.0);
}

/// Unrounded results are within a step of fp16 of the rounded ones.
#[test]
fn operations_in_f32_are_close_to_coremltools() {
    for fuse in [false, true] {
        check(Options::with_threads(2).fused(fuse).with_numerics(Numerics::F32), 1e-3);
    }
}

#[test]
fn operations_with_fp16_sums_are_close_to_coremltools() {
    for fuse in [false, true] {
        check(Options::with_threads(2).fused(fuse).with_numerics(Numerics::F16Accumulate), 4e-3);
    }
}
