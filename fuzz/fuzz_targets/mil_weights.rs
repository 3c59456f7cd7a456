//! A weight file, beside programs that are sound. Every blob that is accepted is read in full.

#![no_main]

use std::collections::BTreeMap;

use kvbaton_memory::Bytes;
use kvbaton_mil::Package;
use kvbaton_mil::program::Argument;

static MODELS: [&[u8]; 2] = [
    include_bytes!("../../crates/mil/testdata/plain.mlpackage/Data/com.apple.CoreML/model.mlmodel"),
    include_bytes!("../../crates/mil/testdata/int4_block.mlpackage/Data/com.apple.CoreML/model.mlmodel"),
];

libfuzzer_sys::fuzz_target!(|file: &[u8]| {
    let file = Bytes::new(file.to_vec());
    for model in MODELS {
        let weights = BTreeMap::from([("@model_path/weights/weight.bin".to_owned(), file.clone())]);
        let Ok(package) = Package::from_memory(model, weights) else { continue };
        for op in package.program().functions.values().flat_map(|function| function.all_ops()) {
            let inline = op.inputs.values().flatten().filter_map(|argument| match argument {
                Argument::Constant(constant) => Some(constant),
                Argument::Value(_) => None,
            });
            for constant in op.attributes.values().chain(inline) {
                std::hint::black_box(package.constant_bytes(constant).map(<[u8]>::to_vec));
            }
        }
    }
});
