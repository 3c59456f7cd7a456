use super::DataType::{Float16, Int4, UInt3};
use super::*;
use crate::spec::ValueKind;
use crate::testing::{Parts, fixed};

/// The blob of `embedding_x_0` in `plain`, fp16[48, 32].
const BLOB: &str = "function `main`, op `const`, output `embedding_x_0`: weight blob at byte 64 of \
                    `@model_path/weights/weight.bin`: ";

/// `plain` after `change` at `at` of the blob's metadata.
fn metadata(at: usize, bytes: &[u8]) -> String {
    let mut parts = Parts::of("plain");
    parts.weights[64 + at..][..bytes.len()].copy_from_slice(bytes);
    parts.refusal()
}

#[test]
fn a_missing_file_is_refused() {
    let mut parts = Parts::of("plain");
    let Some(ValueKind::BlobFile(blob)) = &mut parts.val("embedding_x_0").kind else { panic!() };
    blob.file_name = "@model_path/weights/other.bin".to_owned();
    assert_eq!(parts.refusal(), BLOB.replace("weight.bin", "other.bin") + "the file does not exist");
}

#[test]
fn a_file_without_a_header_is_refused() {
    let mut parts = Parts::of("plain");
    parts.weights.truncate(63);
    assert_eq!(parts.refusal(), format!("{BLOB}the file has 63 bytes; a weight file has a header of 64"));
}

#[test]
fn another_version_is_refused() {
    let mut parts = Parts::of("plain");
    parts.weights[4] = 3;
    assert_eq!(parts.refusal(), format!("{BLOB}the file has blob version 3; only version 2 is known"));
}

#[test]
fn a_file_cut_in_the_data_is_refused_with_wanted_and_available_bytes() {
    let mut parts = Parts::of("plain");
    parts.weights.truncate(1000);
    assert_eq!(parts.refusal(), format!("{BLOB}data needs bytes 128..3200 but the file has 1000"));
}

#[test]
fn a_file_cut_in_the_metadata_is_refused() {
    let mut parts = Parts::of("plain");
    parts.weights.truncate(100);
    assert_eq!(parts.refusal(), format!("{BLOB}metadata needs bytes 64..128 but the file has 100"));
}

#[test]
fn a_wrong_sentinel_is_refused() {
    let message = "no blob starts there: found 0x01020304 instead of 0xdeadbeef";
    assert_eq!(metadata(0, &[4, 3, 2, 1]), format!("{BLOB}{message}"));
}

#[test]
fn another_element_type_is_refused() {
    assert_eq!(metadata(4, &[4]), format!("{BLOB}the blob holds int8 but the constant is declared fp16"));
}

#[test]
fn an_unknown_element_type_is_refused() {
    let message = "the blob holds the unknown type 99 but the constant is declared fp16";
    assert_eq!(metadata(4, &[99]), format!("{BLOB}{message}"));
}

#[test]
fn a_blob_shorter_than_its_type_is_refused() {
    let message = "the blob has 3070 bytes but fp16[48, 32] needs 3072";
    assert_eq!(metadata(8, &3070_u64.to_le_bytes()), format!("{BLOB}{message}"));
}

#[test]
fn sizes_and_offsets_near_the_end_of_the_address_space_are_refused() {
    let message = format!("{BLOB}data needs bytes 128..18446744073709551743 but the file has ");
    assert!(metadata(8, &u64::MAX.to_le_bytes()).starts_with(&message));
    let message = format!("{BLOB}data needs bytes 18446744073709551552..18446744073709554624 but the file");
    assert!(metadata(16, &(u64::MAX - 63).to_le_bytes()).starts_with(&message));
}

#[test]
fn unaligned_data_is_refused() {
    assert_eq!(metadata(16, &[130]), format!("{BLOB}data at byte 130 is not aligned to 64 bytes"));
}

#[test]
fn an_unaligned_reference_is_refused() {
    let mut parts = Parts::of("plain");
    let Some(ValueKind::BlobFile(blob)) = &mut parts.val("embedding_x_0").kind else { panic!() };
    blob.offset = 65;
    let message = "metadata at byte 65 is not aligned to 64 bytes";
    assert_eq!(parts.refusal(), BLOB.replace("byte 64", "byte 65") + message);
}

#[test]
fn a_reference_near_the_end_of_the_address_space_is_refused() {
    let mut parts = Parts::of("plain");
    let Some(ValueKind::BlobFile(blob)) = &mut parts.val("embedding_x_0").kind else { panic!() };
    blob.offset = u64::MAX - 63;
    let error = parts.refusal();
    assert!(
        error.contains("op `const`, output `embedding_x_0`: weight blob at byte 18446744073709551552"),
        "{error}"
    );
    assert!(error.contains("metadata needs bytes 18446744073709551552..18446744073709551616"), "{error}");
}

#[test]
fn a_reference_to_the_header_is_refused() {
    let mut parts = Parts::of("plain");
    let Some(ValueKind::BlobFile(blob)) = &mut parts.val("embedding_x_0").kind else { panic!() };
    blob.offset = 0;
    let error = parts.refusal();
    assert!(error.contains("weight blob at byte 0 of") && error.contains("no blob starts there"), "{error}");
}

#[test]
fn a_shape_that_needs_more_than_the_blob_is_refused() {
    let mut parts = Parts::of("plain");
    crate::testing::tensor(&mut parts.val("embedding_x_0").r#type).dimensions[0] = fixed(49);
    parts.tensor("embedding_x_0").dimensions[0] = fixed(49);
    let message = "the blob has 3072 bytes but fp16[49, 32] needs 3136";
    assert_eq!(parts.refusal(), format!("{BLOB}{message}"));
}

/// A file with one blob of `data`.
fn file(dtype: u32, padding_bits: u64, data: &[u8]) -> Vec<u8> {
    let mut file = vec![0; 64];
    file[4] = 2;
    file.extend(SENTINEL.to_le_bytes());
    file.extend(dtype.to_le_bytes());
    file.extend((data.len() as u64).to_le_bytes());
    file.extend(128_u64.to_le_bytes());
    file.extend(padding_bits.to_le_bytes());
    file.resize(128, 0);
    file.extend(data);
    file
}

fn vector(dtype: DataType, elements: usize) -> TensorType {
    TensorType { dtype, shape: vec![crate::program::Dim::Fixed(elements)] }
}

#[test]
fn elements_below_a_byte_are_padded_to_a_whole_one() {
    let three = locate(&file(12, 1, &[0; 2]), 64, &vector(UInt3, 5), 2, 15).unwrap();
    assert_eq!(three, DataRange { offset_bytes: 128, len_bytes: 2 });
    assert!(locate(&file(8, 4, &[0; 2]), 64, &vector(Int4, 3), 2, 12).is_ok());
}

#[test]
fn wrong_padding_is_refused() {
    let error = locate(&file(8, 0, &[0; 2]), 64, &vector(Int4, 3), 2, 12).unwrap_err();
    assert_eq!(error.to_string(), "the blob states 0 bits of padding but int4[3] has 4");
}

#[test]
fn an_empty_blob_at_the_end_is_in_the_file() {
    assert!(locate(&file(1, 0, &[]), 64, &vector(Float16, 0), 0, 0).is_ok());
}
