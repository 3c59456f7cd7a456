//! Compressed weights against coremltools' own decompression, bit for bit, kept and streamed; from
//! `testdata/constexpr.py`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::PathBuf;
use std::sync::Arc;

use half::f16;
use kvbaton_exec::{Array, Executable, Options, WeightStorage};
use kvbaton_mil::Package;
use serde_json::Value;

fn testdata(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn load(name: &str, options: &Options) -> Executable {
    let package = Arc::new(Package::open(&testdata(name)).unwrap());
    Executable::load(package, "main", options).unwrap()
}

fn check(name: &str, storage: WeightStorage) -> usize {
    let golden = std::fs::read_to_string(testdata("constexpr.json")).unwrap();
    let golden: Value = serde_json::from_str(&golden).unwrap();
    let program = load(name, &Options::with_threads(2).with_weights(storage));
    let half = Array::from_f16(&[1], &[f16::ZERO]).unwrap();
    let single = Array::from_f32(&[1], &[0.0]).unwrap();
    let inputs: Vec<(&str, Array)> = program
        .inputs()
        .iter()
        .map(|f| (f.name.as_str(), if f.name == "half" { half.clone() } else { single.clone() }))
        .collect();
    let outputs = program.run(&inputs).unwrap();
    for (name, got) in &outputs {
        let want = &golden[name];
        let shape: Vec<usize> =
            want["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap() as usize).collect();
        assert_eq!(got.shape(), shape, "{name}");
        let values = want["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32);
        for (i, (g, w)) in got.to_f32().unwrap().iter().zip(values).enumerate() {
            assert_eq!(*g, w, "`{name}` element {i}, {}", storage.name());
        }
    }
    outputs.len()
}

#[test]
fn weights_of_ios_18_equal_coremltools() {
    for storage in WeightStorage::ALL {
        assert_eq!(check("constexpr18.mlpackage", storage), 89);
    }
}

#[test]
fn weights_of_ios_16_equal_coremltools() {
    for storage in WeightStorage::ALL {
        assert_eq!(check("constexpr16.mlpackage", storage), 16);
    }
}

/// In a product, in both dimensions of a table, and in an operation that takes the whole weight.
#[test]
fn streamed_weights_give_the_same_bits() {
    let x: Vec<f16> = (0..9 * 64).map(|i| f16::from_f32((i % 23) as f32 * 0.25 - 2.5)).collect();
    let inputs = [
        ("x", Array::from_f16(&[9, 64], &x).unwrap()),
        ("ids", Array::from_i32(&[4], &[63, 0, -1, 17]).unwrap()),
    ];
    for fuse in [false, true] {
        let run = |storage| {
            load("products.mlpackage", &Options::with_threads(2).fused(fuse).with_weights(storage))
                .run(&inputs)
                .unwrap()
        };
        let (resident, streamed) = (run(WeightStorage::Resident), run(WeightStorage::Streamed));
        assert_eq!(resident.len(), 10);
        for ((name, a), (_, b)) in resident.iter().zip(&streamed) {
            assert_eq!(a.bytes()[..], b.bytes()[..], "{name}");
            assert!(a.to_f32().unwrap().iter().any(|v| *v != 0.0), "{name}");
        }
    }
}

#[test]
fn functions_loaded_with_the_same_options_share_decompressed_weights() {
    let options = Options::with_threads(1);
    let first = load("products.mlpackage", &options);
    assert_eq!(options.cache.kept(), 2);
    let second = load("products.mlpackage", &options);
    assert_eq!(options.cache.kept(), 2);
    drop((first, second));
    assert_eq!(options.cache.kept(), 0);
}
