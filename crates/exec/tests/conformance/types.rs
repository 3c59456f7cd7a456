//! Which types of each operand the cases cover, of those that MIL allows: `testdata/ops/types.json`.

use std::collections::{BTreeMap, BTreeSet};

use kvbaton_exec::supported_ops;

use crate::text::Case;
use crate::{files, folder};

/// For each definition of an operation (by the version of iOS it came with) and operand, names of types.
type Types = BTreeMap<u32, BTreeMap<String, BTreeSet<String>>>;

fn allowed() -> BTreeMap<String, Types> {
    serde_json::from_str(&std::fs::read_to_string(folder().join("types.json")).unwrap()).unwrap()
}

/// What the cases cover, by the one of `defined` that each uses.
fn seen(kind: &str, cases: &[Case], defined: &Types) -> Types {
    let mut types = Types::new();
    for case in cases {
        let version = defined.keys().rev().find(|version| **version <= case.version());
        let version = version.unwrap_or_else(|| panic!("{kind} in {}", case.opset));
        let seen = types.entry(*version).or_default();
        for (name, given) in case.operands(kind).into_iter().flatten() {
            seen.entry(name).or_default().extend(given.into_iter().map(|ty| ty.dtype));
        }
    }
    types
}

#[test]
fn every_type_that_mil_allows_has_a_case() {
    let (files, allowed) = (files(), allowed());
    let (mut missing, mut types) = (Vec::new(), 0);
    for kind in supported_ops() {
        let Some(defined) = allowed.get(kind) else { continue };
        let have = seen(kind, files.get(kind).map_or(&[], Vec::as_slice), defined);
        for (version, operands) in defined {
            for (operand, wanted) in operands {
                let have = have.get(version).and_then(|operands| operands.get(operand)).cloned();
                let have = have.unwrap_or_default();
                types += wanted.len();
                let lacks: Vec<&String> = wanted.difference(&have).collect();
                if !lacks.is_empty() {
                    missing.push(format!("{kind} iOS {version} {operand}: {lacks:?}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(types > 900, "{types} types");
}
