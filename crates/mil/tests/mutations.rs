//! Bytes changed at random: a package opens or is refused, and never panics. What opens can be used.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use kvbaton_memory::Bytes;
use kvbaton_mil::program::Argument;
use kvbaton_mil::{Manifest, Package, inspect};
use proptest::prelude::*;

const NAMES: [&str; 6] = ["plain", "stateful", "branching", "int4_block", "lut6_spec7", "ranged"];

fn file(name: &str, path: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(format!("{name}.mlpackage"));
    fs::read(folder.join(path)).unwrap_or_default()
}

#[derive(Clone, Debug)]
enum Change {
    Set(prop::sample::Index, u8),
    Insert(prop::sample::Index, Vec<u8>),
    Remove(prop::sample::Index, usize),
    Repeat(prop::sample::Index, usize),
    Truncate(prop::sample::Index),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let at = any::<prop::sample::Index>;
    let byte = prop_oneof![Just(0_u8), Just(0x7f), Just(0x80), Just(0xff), any::<u8>()];
    let change = prop_oneof![
        8 => (at(), byte).prop_map(|(at, byte)| Change::Set(at, byte)),
        2 => (at(), prop::collection::vec(any::<u8>(), 1..12)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        2 => (at(), 1..40_usize).prop_map(|(at, count)| Change::Remove(at, count)),
        1 => (at(), 1..80_usize).prop_map(|(at, count)| Change::Repeat(at, count)),
        1 => at().prop_map(Change::Truncate),
    ];
    prop::collection::vec(change, 0..5)
}

fn apply(mut bytes: Vec<u8>, changes: &[Change]) -> Vec<u8> {
    for change in changes {
        if bytes.is_empty() {
            break;
        }
        let length = bytes.len();
        match change {
            Change::Set(at, byte) => bytes[at.index(length)] = *byte,
            Change::Insert(at, inserted) => {
                let at = at.index(length);
                bytes.splice(at..at, inserted.iter().copied());
            }
            Change::Remove(at, count) => {
                let at = at.index(length);
                bytes.drain(at..length.min(at + count));
            }
            Change::Repeat(at, count) => {
                let at = at.index(length);
                let part = bytes[at..length.min(at + count)].to_vec();
                bytes.splice(at..at, part);
            }
            Change::Truncate(at) => bytes.truncate(at.index(length)),
        }
    }
    bytes
}

/// Reads all there is to read.
fn use_it(package: &Package) {
    let mut total = 0_usize;
    for function in package.program().functions.values() {
        for op in function.all_ops() {
            for constant in op.attributes.values() {
                total += package.constant_bytes(constant).map_or(0, <[u8]>::len);
            }
            for argument in op.inputs.values().flatten() {
                match argument {
                    Argument::Value(id) => total += function.value(*id).name.len(),
                    Argument::Constant(constant) => {
                        total += package.constant_bytes(constant).map_or(0, <[u8]>::len);
                    }
                }
            }
        }
    }
    std::hint::black_box((total, inspect(package)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn a_changed_package_opens_or_is_refused(
        name in prop::sample::select(&NAMES),
        model_changes in changes(),
        weight_changes in changes(),
    ) {
        let model = apply(file(name, "Data/com.apple.CoreML/model.mlmodel"), &model_changes);
        let weights = apply(file(name, "Data/com.apple.CoreML/weights/weight.bin"), &weight_changes);
        let weights = BTreeMap::from([("@model_path/weights/weight.bin".to_owned(), Bytes::new(weights))]);
        match Package::from_memory(&model, weights) {
            Ok(package) => use_it(&package),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn a_changed_manifest_is_read_or_refused(changes in changes()) {
        if let Ok(manifest) = Manifest::parse(&apply(file("plain", "Manifest.json"), &changes)) {
            prop_assert!(manifest.model.is_relative());
        }
    }
}
