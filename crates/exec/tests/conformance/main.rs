//! Every operation against coremltools' own definition of it, or numpy's: the cases of `testdata/ops`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "numbers of test cases are small"
)]

mod einsum;
mod numerics;
mod states;
mod text;
mod types;
mod wire;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, Executable, Numerics, Options, WeightStorage, supported_ops};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::Package;
use kvbaton_mil::program::DataType;
use text::{Call, Case, Literal, Type, Values};

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

/// The elements of an array, read from its bytes.
fn numbers(array: &Array) -> Vec<f64> {
    let bytes = array.bytes();
    match array.dtype() {
        DataType::Float16 => {
            bytes.as_chunks().0.iter().map(|b| f64::from(f16::from_le_bytes(*b).to_f32())).collect()
        }
        DataType::Float32 => bytes.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
        DataType::Int32 => bytes.as_chunks().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect(),
        DataType::Int16 => bytes.as_chunks().0.iter().map(|b| f64::from(i16::from_le_bytes(*b))).collect(),
        DataType::UInt16 => bytes.as_chunks().0.iter().map(|b| f64::from(u16::from_le_bytes(*b))).collect(),
        DataType::Int8 => bytes.iter().map(|b| f64::from(*b as i8)).collect(),
        DataType::UInt8 | DataType::Bool => bytes.iter().map(|b| f64::from(*b)).collect(),
        other => panic!("{other}"),
    }
}

/// What is wrong with a result, if anything.
fn difference(have: &Array, want: &Values) -> Option<String> {
    let ty = want.ty.as_ref().expect("what is expected has a type");
    let (dtype, shape) = (have.dtype().to_string(), have.shape());
    let dims: Vec<usize> = ty.dims.iter().map(|d| d.expect("what is expected has a fixed shape")).collect();
    if dtype != ty.dtype || shape != dims {
        return Some(format!("is {dtype}{shape:?}, not {}{dims:?}", ty.dtype));
    }
    let have_values = numbers(have);
    // Decimal numbers are exact in the type they were written for.
    let want_values: Vec<f64> = want
        .values
        .iter()
        .map(|v| match have.dtype() {
            DataType::Float16 => f64::from(f16::from_f64(v.number()).to_f32()),
            DataType::Float32 => f64::from(v.number() as f32),
            _ => v.number(),
        })
        .collect();
    if have_values.len() != want_values.len() {
        return Some(format!("{} values, not {}", have_values.len(), want_values.len()));
    }
    let largest = want_values.iter().filter(|v| v.is_finite()).fold(1.0f64, |m, v| m.max(v.abs()));
    let allowed = want.within * largest;
    for (i, (a, b)) in have_values.iter().zip(&want_values).enumerate() {
        let same = a == b || (a.is_nan() && b.is_nan());
        if !same && (a - b).abs().total_cmp(&allowed).is_gt() {
            return Some(format!("value {i} is {a}, not {b} (allowed: {allowed:e})"));
        }
    }
    None
}

fn load(case: &Case, options: &Options) -> Result<Executable, String> {
    let package = Package::from_memory(&wire::model(case), BTreeMap::new()).map_err(|e| e.to_string())?;
    Executable::load(Arc::new(package), "main", options).map_err(|e| e.to_string())
}

/// What each run gives: its results, then every state as it is afterwards.
fn run(case: &Case, options: &Options) -> Result<Vec<Vec<(String, Array)>>, String> {
    let program = load(case, options)?;
    let mut state = program.new_state().map_err(|e| e.to_string())?;
    let one = |call: &Call| {
        let given = |name: &str| call.given.iter().find(|v| v.name == name);
        let (states, inputs): (Vec<_>, Vec<_>) = case.body.inputs.iter().partition(|(_, ty)| ty.state);
        for (name, ty) in &states {
            if let Some(values) = given(name) {
                state.set(name, &array(ty, &values.values)).map_err(|e| e.to_string())?;
            }
        }
        let value = |name: &str| &given(name).expect("every input is given").values;
        let inputs: Vec<_> =
            inputs.iter().map(|(name, ty)| (name.as_str(), array(ty, value(name)))).collect();
        let mut results = program.run_with(&inputs, &mut state).map_err(|e| e.to_string())?;
        for (name, _) in states {
            // A copy: an array that shares a state would make the next update copy it.
            let held = state.array(name).map_err(|e| e.to_string())?;
            let bytes = Bytes::new(Buffer::copy_of(held.bytes()));
            let copy = Array::new(held.dtype(), held.shape().to_vec(), bytes).map_err(|e| e.to_string())?;
            results.push((name.clone(), copy));
        }
        Ok(results)
    };
    case.calls.iter().map(one).collect()
}

/// The results that a run must give, in their order, and the states among them by name.
fn compare(results: &[(String, Array)], call: &Call, body: &text::Block) -> Option<String> {
    let expected = call.expected.len();
    if results.len() != expected {
        return Some(format!("{} results, not {expected}", results.len()));
    }
    let states = body.inputs.iter().filter(|(_, ty)| ty.state).count();
    let ordered = results[..expected - states].iter().zip(&call.expected);
    let named = results[expected - states..].iter().map(|result| {
        let want = call.expected.iter().find(|want| want.name == result.0);
        (result, want.unwrap_or_else(|| panic!("state `{}` is expected", result.0)))
    });
    ordered
        .chain(named)
        .find_map(|((name, have), want)| difference(have, want).map(|d| format!("{name}: {d}")))
}

/// What is wrong with a case, if anything.
fn check(case: &Case, options: &Options) -> Option<String> {
    match (run(case, options), &case.fails) {
        (Ok(_), Some(_)) => Some("did not fail".to_owned()),
        (Err(error), Some(part)) => (!error.contains(part)).then(|| format!("failed with `{error}`")),
        (Err(error), None) => Some(error),
        (Ok(runs), None) => {
            runs.iter().zip(&case.calls).find_map(|(results, call)| compare(results, call, &case.body))
        }
    }
}

fn check_all(options: &Options) {
    let (mut wrong, mut cases) = (Vec::new(), 0);
    for (op, list) in files() {
        cases += list.len();
        for case in &list {
            wrong.extend(
                check(case, options)
                    .map(|problem| format!("{op} {} ({}): {problem}", case.name, case.oracle)),
            );
        }
    }
    assert!(wrong.is_empty(), "{} of {cases} cases:\n{}", wrong.len(), wrong.join("\n"));
    assert!(cases > 1000, "{cases} cases");
}

#[test]
fn operations_equal_their_definitions() {
    check_all(&Options::with_threads(1).fused(false));
}

/// Compressed weights are decompressed where they are used.
#[test]
fn operations_on_streamed_weights_equal_their_definitions() {
    check_all(&Options::with_threads(1).with_weights(WeightStorage::Streamed));
}

#[test]
fn fused_operations_equal_their_definitions() {
    check_all(&Options::with_threads(2));
}

/// Values between operations are not rounded, results and states are.
#[test]
fn operations_computed_in_f32_equal_their_definitions() {
    check_all(&Options::with_threads(1).with_numerics(Numerics::F32));
}

#[test]
fn fused_operations_give_the_bits_of_single_ones() {
    for (op, list) in files() {
        for case in list.iter().filter(|case| case.fails.is_none()) {
            for numerics in Numerics::ALL {
                let options =
                    |threads, fuse| Options::with_threads(threads).fused(fuse).with_numerics(numerics);
                let fused = run(case, &options(2, true)).unwrap().concat();
                let plain = run(case, &options(1, false)).unwrap().concat();
                for ((name, a), (_, b)) in fused.iter().zip(&plain) {
                    let (a, b) = (numbers(a), numbers(b));
                    let same = a
                        .iter()
                        .zip(&b)
                        .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
                    assert!(same, "{op} {} in {}: {name}", case.name, numerics.name());
                }
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
    let missing: Vec<&str> = supported_ops().filter(|op| !files.contains_key(*op)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
