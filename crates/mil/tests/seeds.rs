//! The models that fuzzing starts from are sound.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::collections::BTreeMap;
use std::path::PathBuf;

use kvbaton_mil::{FeatureKind, Flexibility, Package};

fn open(name: &str) -> Package {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/mil_program");
    Package::from_memory(&std::fs::read(folder.join(name)).unwrap(), BTreeMap::new()).unwrap()
}

#[test]
fn constants_of_every_element_type_are_read() {
    let package = open("types.mlmodel");
    let function = package.function(None).unwrap();
    let constants = function.all_ops().into_iter().filter(|op| op.kind == "const");
    let lengths: BTreeMap<&str, usize> = constants
        .filter_map(|op| {
            let bytes = package.constant_bytes(&op.attributes["val"])?;
            Some((function.value(op.outputs[0]).name.as_str(), bytes.len()))
        })
        .collect();
    // Three elements, packed.
    let wanted = [("floats_FLOAT32", 12), ("longInts_UINT64", 24), ("bytes_UINT3", 2), ("bytes_UINT6", 3)];
    for (name, len_bytes) in wanted {
        assert_eq!(lengths.get(name), Some(&len_bytes), "{name}");
    }
    assert_eq!(lengths.len(), 31);
}

#[test]
fn features_of_every_kind_are_described() {
    let package = open("features.mlmodel");
    let features = &package.description().functions["main"].inputs;
    let others = features.iter().filter(|f| matches!(f.kind, FeatureKind::Other(_))).count();
    let flexible = features
        .iter()
        .filter(|f| matches!(&f.kind, FeatureKind::Array(array) if array.flexibility != Flexibility::Fixed));
    assert_eq!((others, flexible.count(), features.len()), (6, 2, 11));
}
