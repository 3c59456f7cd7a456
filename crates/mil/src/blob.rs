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
mod tests;
