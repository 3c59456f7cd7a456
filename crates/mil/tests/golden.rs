//! Whole packages, written by coremltools, against what coremltools itself reads back from them.
//!
//! `testdata/generate.py` writes both.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use kvbaton_mil::program::{
    Argument, Block, Constant, ConstantData, DataType, Function, TensorType, ValueType,
};
use kvbaton_mil::{Feature, FeatureKind, Flexibility, Package, inspect};
use serde_json::{Value, json};

fn testdata(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn open(name: &str) -> Package {
    Package::open(&testdata(&format!("{name}.mlpackage"))).unwrap()
}

/// Every package of `testdata`, with what coremltools says about it.
fn packages() -> Vec<(String, Package, Value)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(testdata("")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let expected = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            all.push((name.clone(), open(&name), expected));
        }
    }
    assert_eq!(all.len(), 12, "a package is missing");
    all
}

fn tensor(ty: &TensorType) -> Value {
    let shape: Vec<_> = ty.shape.iter().map(|dim| dim.fixed()).collect();
    json!({"dtype": proto_name(ty.dtype), "shape": shape})
}

/// The name of a type in `MIL.proto`.
fn proto_name(dtype: DataType) -> String {
    match dtype {
        DataType::Float16 => "FLOAT16".to_owned(),
        DataType::Float32 => "FLOAT32".to_owned(),
        other => other.name().to_uppercase(),
    }
}

fn feature(feature: &Feature) -> Value {
    let FeatureKind::Array(array) = &feature.kind else { panic!("{feature:?}") };
    let mut out = json!({
        "name": feature.name,
        "optional": feature.optional,
        "dtype": proto_name(array.dtype.unwrap()),
        "shape": array.shape,
    });
    match &array.flexibility {
        Flexibility::Fixed => {}
        Flexibility::Enumerated(shapes) => out["enumerated"] = json!(shapes),
        Flexibility::Ranges(ranges) => {
            out["ranges"] = ranges.iter().map(|r| json!([r.min, r.max.map_or(-1, |m| m as i64)])).collect();
        }
    }
    out
}

fn fnv1a(bytes: &[u8]) -> String {
    let step = |h: u64, &byte: &u8| (h ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, step))
}

/// Elements below a byte as a byte each, bit by bit.
fn unpacked(bytes: &[u8], ty: &TensorType, elements: usize) -> Vec<u8> {
    let bits = ty.dtype.bits().unwrap();
    if bits >= 8 {
        return bytes.to_vec();
    }
    let bit = |i: usize| bytes[i / 8] >> (i % 8) & 1;
    (0..elements)
        .map(|e| {
            let value = (0..bits).fold(0, |v, b| v | bit(e * bits + b) << b);
            if ty.dtype == DataType::Int4 && value >= 8 { value | 0xf0 } else { value }
        })
        .collect()
}

fn constant(package: &Package, constant: &Constant) -> Value {
    let mut out = tensor(&constant.ty);
    match &constant.data {
        ConstantData::Strings(strings) => out["strings"] = json!(strings),
        ConstantData::Inline(bytes) => out["bytes"] = json!(bytes),
        ConstantData::Blob(_) => {
            let elements = constant.ty.fixed_shape().unwrap().iter().product();
            let bytes = unpacked(package.constant_bytes(constant).unwrap(), &constant.ty, elements);
            out["blob"] = json!(true);
            out["elements"] = json!(elements);
            out["fnv1a"] = json!(fnv1a(&bytes));
        }
    }
    out
}

fn constants(package: &Package, function: &Function) -> BTreeMap<String, Value> {
    let mut all = BTreeMap::new();
    for op in function.all_ops() {
        let Some(&output) = op.outputs.first() else { continue };
        let output = &function.value(output).name;
        for (key, value) in &op.attributes {
            match key.as_str() {
                "name" => {}
                "val" => drop(all.insert(output.clone(), constant(package, value))),
                key => drop(all.insert(format!("{output}.{key}"), constant(package, value))),
            }
        }
        for (key, arguments) in &op.inputs {
            for argument in arguments {
                if let Argument::Constant(value) = argument {
                    all.insert(format!("{output}.{key}"), constant(package, value));
                }
            }
        }
    }
    all
}

#[test]
fn texts_and_features_are_those_coremltools_reads() {
    for (name, package, expected) in packages() {
        let description = package.description();
        assert_eq!(json!(package.specification_version()), expected["specification_version"], "{name}");
        assert_eq!(json!(package.program().default_function), expected["default_function"], "{name}");
        assert_eq!(json!(description.short_description), expected["short_description"], "{name}");
        assert_eq!(json!(description.author), expected["author"], "{name}");
        assert_eq!(json!(description.license), expected["license"], "{name}");
        assert_eq!(json!(description.version), expected["version"], "{name}");
        assert_eq!(json!(package.metadata()), expected["user_defined"], "{name}");
        for (function, expected) in expected["functions"].as_object().unwrap() {
            let features = &description.functions[function];
            for (what, found) in
                [("inputs", &features.inputs), ("outputs", &features.outputs), ("states", &features.states)]
            {
                let found: Vec<Value> = found.iter().map(feature).collect();
                assert_eq!(json!(found), expected[what], "{name}, {function}, {what}");
            }
        }
    }
}

#[test]
fn values_have_the_types_coremltools_reads() {
    for (name, package, expected) in packages() {
        assert_eq!(
            package.program().functions.len(),
            expected["functions"].as_object().unwrap().len(),
            "{name}"
        );
        for (function, expected) in expected["functions"].as_object().unwrap() {
            let function = &package.program().functions[function];
            assert_eq!(json!(function.opset), expected["opset"], "{name}");
            let values: BTreeMap<&str, Value> = function
                .values
                .iter()
                .map(|value| match &value.ty {
                    ValueType::Tensor(ty) => (value.name.as_str(), json!({"tensor": tensor(ty)})),
                    ValueType::State(ty) => (value.name.as_str(), json!({"state": tensor(ty)})),
                    other => panic!("{other:?}"),
                })
                .collect();
            assert_eq!(json!(values), expected["values"], "{name}");
            let outputs: Vec<_> = function.block.outputs.iter().map(|&id| &function.value(id).name).collect();
            assert_eq!(json!(outputs), expected["block_outputs"], "{name}");
        }
    }
}

#[test]
fn constants_hold_the_elements_coremltools_reads() {
    for (name, package, expected) in packages() {
        for (function, expected) in expected["functions"].as_object().unwrap() {
            let found = constants(&package, &package.program().functions[function]);
            let expected = expected["constants"].as_object().unwrap();
            assert_eq!(found.len(), expected.len(), "{name}");
            for (key, value) in found {
                assert_eq!(value, expected[&key], "{name}, {key}");
            }
        }
    }
}

#[test]
fn operations_are_counted_as_coremltools_counts_them() {
    for (name, package, expected) in packages() {
        for function in inspect(&package).functions {
            let mut operations = function.operations.clone();
            operations.insert("const".to_owned(), function.constants);
            let expected = &expected["functions"][&function.name]["ops"];
            assert_eq!(json!(operations), *expected, "{name}");
        }
    }
}

#[test]
fn every_argument_is_defined_before_its_use() {
    fn check(block: &Block, mut defined: Vec<bool>) {
        block.inputs.iter().for_each(|id| defined[id.0 as usize] = true);
        for op in &block.ops {
            for argument in op.inputs.values().flatten() {
                if let Argument::Value(id) = argument {
                    assert!(defined[id.0 as usize], "{} uses {id:?}", op.kind);
                }
            }
            op.blocks.iter().for_each(|inner| check(inner, defined.clone()));
            op.outputs.iter().for_each(|id| defined[id.0 as usize] = true);
        }
        block.outputs.iter().for_each(|id| assert!(defined[id.0 as usize]));
    }
    for (_, package, _) in packages() {
        for function in package.program().functions.values() {
            let mut defined = vec![false; function.values.len()];
            function.inputs.iter().chain(&function.states).for_each(|id| defined[id.0 as usize] = true);
            check(&function.block, defined);
        }
    }
}

#[test]
fn functions_share_their_weights() {
    let inspection = inspect(&open("two_functions"));
    let [weights] = inspection.weights.by_dtype.as_slice() else { panic!("{:?}", inspection.weights) };
    let plain = inspect(&open("plain"));
    assert!(weights.bytes < plain.weights.by_dtype[0].bytes, "two functions, each like `plain`, took more");
    assert_eq!(inspection.default_function, "prefill_16");
}
