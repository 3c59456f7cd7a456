use std::collections::BTreeMap;

use prost::Message;

use super::{Package, spec};
use crate::testing::Parts;

#[test]
fn bytes_that_are_no_protobuf_are_refused() {
    let error = Package::from_memory(&[0xff; 40], BTreeMap::new()).unwrap_err().to_string();
    assert!(error.starts_with("`model.mlmodel` is not a Core ML model: "), "{error}");
}

#[test]
fn an_empty_model_is_refused() {
    let error = Package::from_memory(&[], BTreeMap::new()).unwrap_err().to_string();
    let message = "`model.mlmodel` holds no ML Program (it may be a neural network or a pipeline)";
    assert_eq!(error, message);
}

#[test]
fn a_model_larger_than_any_program_is_refused_before_it_is_decoded() {
    let model = vec![0; super::MODEL_LIMIT_BYTES + 1];
    let error = Package::from_memory(&model, BTreeMap::new()).unwrap_err().to_string();
    assert!(
        error.starts_with("`model.mlmodel` has 67108865 bytes; a program of more than 67108864"),
        "{error}"
    );
}

#[test]
fn broken_wire_format_is_refused_with_the_files_name() {
    let broken: [(&str, &[u8]); 5] = [
        (
            "a varint of eleven bytes",
            &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        ),
        ("a length beyond the end", &[0x12, 0x7f, 0x00]),
        (
            "a length near the end of the address space",
            &[0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        ),
        ("another wire type than the field has", &[0x0a, 0x01, 0x00]),
        ("a group that nothing ends", &[0xb3, 0x01]),
    ];
    for (what, model) in broken {
        let error = Package::from_memory(model, BTreeMap::new()).unwrap_err().to_string();
        assert!(error.starts_with("`model.mlmodel` is not a Core ML model: "), "{what}: {error}");
    }
}

#[test]
fn text_that_is_no_utf8_is_refused() {
    let mut model = Parts::of("plain").model.encode_to_vec();
    let name = b"embedding_x_0";
    let at = model.windows(name.len()).position(|w| w == name).unwrap();
    model[at] = 0xff;
    let error = Package::from_memory(&model, BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("UTF-8"), "{error}");
}

#[test]
fn a_neural_network_is_refused() {
    // Field 500, `neuralNetwork`, empty.
    let model = [0x08, 0x04, 0xa2, 0x1f, 0x00];
    let error = Package::from_memory(&model, BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("holds no ML Program"), "{error}");
}

#[test]
fn specification_versions_from_6_to_10_are_read() {
    let with_version = |version| {
        let mut parts = Parts::of("plain");
        parts.model.specification_version = version;
        parts
    };
    for version in 6..=10 {
        assert_eq!(with_version(version).open().unwrap().specification_version(), version);
    }
    for version in [i32::MIN, 0, 5, 11] {
        let message = format!("specification version {version} is not supported");
        assert!(with_version(version).refusal().starts_with(&message));
    }
}

#[test]
fn a_model_cut_anywhere_is_refused() {
    let model = Parts::of("plain").model.encode_to_vec();
    for length in 0..model.len() {
        // The program is the last field, so no prefix holds all of it.
        assert!(Package::from_memory(&model[..length], BTreeMap::new()).is_err(), "{length}");
    }
}

#[test]
fn a_function_that_does_not_exist_is_named_with_those_that_do() {
    let package = Parts::of("two_functions").open().unwrap();
    let error = package.function(Some("decode")).unwrap_err().to_string();
    assert_eq!(error, "the package has no function `decode`; it has [\"prefill_16\", \"prefill_8\"]");
    assert!(package.cache_interface("decode").is_err());
    assert_eq!(package.function(None).unwrap().name, "prefill_16");
}

#[test]
fn unknown_fields_are_skipped() {
    let parts = Parts::of("plain");
    let mut model = parts.model.encode_to_vec();
    // Field 9999, length-delimited, three bytes.
    model.extend([0xfa, 0xf0, 0x04, 0x03, 1, 2, 3]);
    assert_eq!(spec::Model::decode(model.as_slice()).unwrap(), parts.model);
}

#[test]
fn declared_metadata_comes_back_as_it_was_written() {
    let interface = Parts::of("plain").open().unwrap().cache_interface("main").unwrap();
    assert_eq!(interface.declared.layout.as_deref(), Some("name = \"stacked\"\n"));
    assert_eq!(interface.declared.model.as_deref(), Some("{\"layers\": 2}"));
}
