//! Weight files: MILBlob storage, version 2, little endian.
//!
//! A file starts with a header of 64 bytes (blob count, version). Each blob is a 64-byte metadata record and its
//! data, both 64-byte aligned; a program refers to the metadata by its offset. Elements below 8 bits are packed
//! with the least significant bit first, and the metadata states the bits that pad the last byte.

use crate::error::BlobError;
use crate::program::{DataType, TensorType};

const HEADER_BYTES: usize = 64;
const METADATA_BYTES: usize = 64;
const ALIGNMENT: u64 = 64;
const SENTINEL: u32 = 0xDEAD_BEEF;
const VERSION: u32 = 2;

/// Where a checked blob's data is in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataRange {
    pub(crate) offset_bytes: usize,
    pub(crate) len_bytes: usize,
}

/// Checks that `file` starts as a weight file does.
pub(crate) fn check_header(file: &[u8]) -> Result<(), BlobError> {
    if file.len() < HEADER_BYTES {
        return Err(BlobError::TooShort { len_bytes: file.len() });
    }
    match u32_at(file, 4) {
        VERSION => Ok(()),
        found => Err(BlobError::Version { found }),
    }
}

/// The data of the blob whose metadata is at `offset`, which must hold exactly the elements of `ty`.
///
/// `wanted_bytes` is the packed length of `ty`; `file` has passed [`check_header`].
pub(crate) fn locate(
    file: &[u8],
    offset: u64,
    ty: &TensorType,
    wanted_bytes: usize,
    wanted_bits: usize,
) -> Result<DataRange, BlobError> {
    let metadata = range("metadata", file, offset, METADATA_BYTES as u64)?;
    let record = &file[metadata.offset_bytes..][..METADATA_BYTES];
    let found = u32_at(record, 0);
    if found != SENTINEL {
        return Err(BlobError::Sentinel { found });
    }
    let dtype_number = u32_at(record, 4);
    let size_bytes = u64_at(record, 8);
    let data_offset = u64_at(record, 16);
    let padding_bits = u64_at(record, 24);

    let dtype = data_type(dtype_number);
    if dtype != Some(ty.dtype) {
        let found = match dtype {
            Some(dtype) => dtype.to_string(),
            None => format!("the unknown type {dtype_number}"),
        };
        return Err(BlobError::WrongType { found, declared: ty.dtype });
    }
    let data = range("data", file, data_offset, size_bytes)?;
    if data.len_bytes != wanted_bytes {
        return Err(BlobError::WrongLength { found_bytes: size_bytes, wanted_bytes, ty: ty.clone() });
    }
    let pad = (wanted_bytes as u64) * 8 - wanted_bits as u64;
    if padding_bits != pad {
        return Err(BlobError::Padding { found_bits: padding_bits, wanted_bits: pad, ty: ty.clone() });
    }
    Ok(data)
}

/// An aligned range that lies in the file.
fn range(what: &'static str, file: &[u8], start: u64, wanted_bytes: u64) -> Result<DataRange, BlobError> {
    if !start.is_multiple_of(ALIGNMENT) {
        return Err(BlobError::Misaligned { what, offset_bytes: start });
    }
    let fits = start.checked_add(wanted_bytes).is_some_and(|end| end <= file.len() as u64);
    match (usize::try_from(start), usize::try_from(wanted_bytes)) {
        (Ok(offset_bytes), Ok(len_bytes)) if fits => Ok(DataRange { offset_bytes, len_bytes }),
        _ => Err(BlobError::OutOfFile { what, start, wanted_bytes, have_bytes: file.len() }),
    }
}

/// Numbers of MILBlob's `BlobDataType`; they are not those of MIL's `DataType`.
fn data_type(number: u32) -> Option<DataType> {
    Some(match number {
        1 => DataType::Float16,
        2 => DataType::Float32,
        3 => DataType::UInt8,
        4 => DataType::Int8,
        5 => DataType::BFloat16,
        6 => DataType::Int16,
        7 => DataType::UInt16,
        8 => DataType::Int4,
        9 => DataType::UInt1,
        10 => DataType::UInt2,
        11 => DataType::UInt4,
        12 => DataType::UInt3,
        13 => DataType::UInt6,
        14 => DataType::Int32,
        15 => DataType::UInt32,
        16 => DataType::Float8E4M3,
        17 => DataType::Float8E5M2,
        _ => return None,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes are four bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes are eight bytes"))
}

#[cfg(test)]
mod tests {
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
        let message =
            format!("{BLOB}data needs bytes 18446744073709551552..18446744073709554624 but the file");
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
}
