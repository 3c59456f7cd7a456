//! Every operation against coremltools' own definition of it, or numpy's: the cases of `testdata/ops`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "numbers of test cases are small"
)]

mod einsum;
mod states;
mod text;
mod wire;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, Executable, Options, supported_ops};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::Package;
use kvbaton_mil::program::DataType;
use text::{Case, Literal, Type, Values};

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/ops")
}

/// Cases by operation.
fn files() -> BTreeMap<String, Vec<Case>> {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|e| e == "mil"))
        .map(|path| {
            let op = path.file_stem().unwrap().to_string_lossy().into_owned();
            (op, text::cases(&std::fs::read_to_string(path).unwrap()))
        })
        .collect()
}

fn array(ty: &Type, values: &[Literal]) -> Array {
    let shape = ty.dims.iter().map(|d| d.expect("inputs of cases have fixed shapes")).collect();
    let numbers = || values.iter().map(Literal::number);
    let (dtype, bytes): (_, Vec<u8>) = match ty.dtype.as_str() {
        "fp16" => (DataType::Float16, numbers().flat_map(|v| f16::from_f64(v).to_le_bytes()).collect()),
        "fp32" => (DataType::Float32, numbers().flat_map(|v| (v as f32).to_le_bytes()).collect()),
        "int32" => (DataType::Int32, numbers().flat_map(|v| (v as i32).to_le_bytes()).collect()),
        "int16" => (DataType::Int16, numbers().flat_map(|v| (v as i16).to_le_bytes()).collect()),
        "uint16" => (DataType::UInt16, numbers().flat_map(|v| (v as u16).to_le_bytes()).collect()),
        "int8" => (DataType::Int8, numbers().map(|v| v as i8 as u8).collect()),
        "uint8" => (DataType::UInt8, numbers().map(|v| v as u8).collect()),
        "bool" => (DataType::Bool, numbers().map(|v| u8::from(v != 0.0)).collect()),
        other => panic!("{other}"),
    };
    Array::new(dtype, shape, Bytes::new(Buffer::copy_of(&bytes))).unwrap()
}

/// What is wrong with a result, if anything.
fn difference(have: &Array, want: &Values) -> Option<String> {
    let have_values = have.to_f32().unwrap();
    // Decimal numbers are exact in the type they were written for.
    let want_values: Vec<f32> = want
        .values
        .iter()
        .map(|v| match have.dtype() {
            DataType::Float16 => f16::from_f64(v.number()).to_f32(),
            _ => v.number() as f32,
        })
        .collect();
    if have_values.len() != want_values.len() {
        return Some(format!("{} values, not {}", have_values.len(), want_values.len()));
    }
    let largest = want_values.iter().filter(|v| v.is_finite()).fold(1.0f32, |m, v| m.max(v.abs()));
    let allowed = want.within * f64::from(largest);
    for (i, (a, b)) in have_values.iter().zip(&want_values).enumerate() {
        let same = a == b || (a.is_nan() && b.is_nan());
        if !same && (f64::from(*a) - f64::from(*b)).abs().total_cmp(&allowed).is_gt() {
            return Some(format!("value {i} is {a}, not {b} (allowed: {allowed:e})"));
        }
    }
    None
}

fn load(case: &Case, options: &Options) -> Result<Executable, String> {
    let package = Package::from_memory(&wire::model(case), BTreeMap::new()).map_err(|e| e.to_string())?;
    Executable::load(Arc::new(package), "main", options).map_err(|e| e.to_string())
}

fn run(case: &Case, options: &Options) -> Result<Vec<(String, Array)>, String> {
    let program = load(case, options)?;
    let given = |name: &str| case.given.iter().find(|v| v.name == name).expect("every input is given");
    let inputs: Vec<(&str, Array)> =
        case.body.inputs.iter().map(|(name, ty)| (name.as_str(), array(ty, &given(name).values))).collect();
    program.run(&inputs).map_err(|e| e.to_string())
}

/// What is wrong with a case, if anything.
fn check(case: &Case, options: &Options) -> Option<String> {
    match (run(case, options), &case.fails) {
        (Ok(_), Some(_)) => Some("did not fail".to_owned()),
        (Err(error), Some(part)) => (!error.contains(part)).then(|| format!("failed with `{error}`")),
        (Err(error), None) => Some(error),
        (Ok(outputs), None) => {
            if outputs.len() != case.expected.len() {
                return Some(format!("{} results, not {}", outputs.len(), case.expected.len()));
            }
            outputs
                .iter()
                .zip(&case.expected)
                .find_map(|((name, have), want)| difference(have, want).map(|d| format!("{name}: {d}")))
        }
    }
}

fn check_all(options: &Options) {
    let (mut wrong, mut cases) = (Vec::new(), 0);
    for (op, list) in files() {
        cases += list.len();
        for case in &list {
            wrong.extend(check(case, options).map(|problem| format!("{op} {}: {problem}", case.name)));
        }
    }
    assert!(wrong.is_empty(), "{} of {cases} cases:\n{}", wrong.len(), wrong.join("\n"));
    assert!(cases > 1000, "{cases} cases");
}

#[test]
fn operations_equal_their_definitions() {
    check_all(&Options::with_threads(1).fused(false));
}

#[test]
fn fused_operations_equal_their_definitions() {
    check_all(&Options::with_threads(2));
}

#[test]
fn fused_operations_give_the_bits_of_single_ones() {
    for (op, list) in files() {
        for case in list.iter().filter(|case| case.fails.is_none()) {
            let fused = run(case, &Options::with_threads(2)).unwrap();
            let plain = run(case, &Options::with_threads(1).fused(false)).unwrap();
            for ((name, a), (_, b)) in fused.iter().zip(&plain) {
                let (a, b) = (a.to_f32().unwrap(), b.to_f32().unwrap());
                let same = a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits() || a.is_nan());
                assert!(same, "{op} {}: {name}", case.name);
            }
        }
    }
}

/// The operation is taken apart at load, and becomes one node again.
#[test]
fn attention_of_one_operation_is_fused() {
    for case in &files()["scaled_dot_product_attention"] {
        let census = load(case, &Options::with_threads(1)).unwrap().census();
        assert!(census.iter().any(|(name, _)| name == "(attention)"), "{}: {census:?}", case.name);
    }
}

#[test]
fn every_operation_has_cases() {
    let files = files();
    let missing: Vec<&str> = supported_ops()
        // Decompressions and states have golden packages of their own.
        .filter(|op| !op.starts_with("constexpr_") && !op.ends_with("_state"))
        .filter(|op| !files.contains_key(*op))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
