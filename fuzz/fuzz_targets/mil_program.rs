//! The model file: protobuf to typed program, beside a weight file that is sound.

#![no_main]

use std::collections::BTreeMap;

use kvbaton_memory::Bytes;
use kvbaton_mil::Package;

static WEIGHTS: &[u8] =
    include_bytes!("../../crates/mil/testdata/plain.mlpackage/Data/com.apple.CoreML/weights/weight.bin");

libfuzzer_sys::fuzz_target!(|model: &[u8]| {
    let weights = BTreeMap::from([("@model_path/weights/weight.bin".to_owned(), Bytes::new(WEIGHTS))]);
    if let Ok(package) = Package::from_memory(model, weights) {
        for function in package.program().functions.values() {
            for op in function.all_ops() {
                for constant in op.attributes.values() {
                    std::hint::black_box(package.constant_bytes(constant).map(<[u8]>::to_vec));
                }
            }
        }
        std::hint::black_box(kvbaton_mil::inspect(&package));
    }
});
