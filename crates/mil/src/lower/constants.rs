//! Values of the wire format → constants whose length was checked against their type.
//!
//! Which field of an immediate holds which element type follows coremltools' writer: fp16, 8-bit, sub-byte and
//! unsigned 32-bit elements are raw little-endian bytes, 16- and 32-bit integers are `ints`, 64-bit ones
//! `longInts`.

use crate::error::ProgramError;
use crate::program::{ConstantData, DataType, Dim, TensorType, ValueType};
use crate::spec::{ImmediateKind, ImmediateValue, ListValue, TensorValues, Value, ValueKind};

use super::types;

/// A constant whose blob, if it has one, is still to be found.
pub(super) enum Unplaced {
    Ready(ConstantData),
    Blob { file: String, offset: u64 },
}

/// Elements, bits and bytes of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) elements: usize,
    /// Packed, before padding to a whole byte; 0 for strings.
    pub(super) bits: usize,
    pub(super) bytes: usize,
}

/// How much the elements of the constant `name` take.
pub(super) fn size(name: &str, ty: &TensorType) -> Result<Size, ProgramError> {
    let (name, ty) = (|| name.to_owned(), || ty.clone());
    let shape =
        ty().fixed_shape().ok_or_else(|| ProgramError::ConstantOfUnknownShape { name: name(), ty: ty() })?;
    let too_large = || ProgramError::TooLarge { name: name(), ty: ty() };
    let elements = if shape.contains(&0) {
        0
    } else {
        shape.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim)).ok_or_else(too_large)?
    };
    let bits = elements.checked_mul(ty().dtype.bits().unwrap_or(0)).ok_or_else(too_large)?;
    Ok(Size { elements, bits, bytes: bits.div_ceil(8) })
}

/// The type and the elements of `value`. A list of scalars becomes a tensor of rank 1.
pub(super) fn constant(name: &str, value: Value) -> Result<(TensorType, Unplaced), ProgramError> {
    let missing = || ProgramError::MissingValue { name: name.to_owned() };
    let ty = types::value_type(name, value.r#type.as_ref())?;
    match (ty, value.kind.ok_or_else(missing)?) {
        (ValueType::Tensor(ty), ValueKind::BlobFile(blob)) => {
            Ok((ty, Unplaced::Blob { file: blob.file_name, offset: blob.offset }))
        }
        (ValueType::Tensor(ty), ValueKind::Immediate(ImmediateValue { kind })) => {
            let Some(ImmediateKind::Tensor(tensor)) = kind else { return Err(missing()) };
            let data = immediate(name, &ty, tensor.values.ok_or_else(missing)?)?;
            Ok((ty, Unplaced::Ready(data)))
        }
        (ValueType::List(element), ValueKind::Immediate(ImmediateValue { kind })) => match (*element, kind) {
            (ValueType::Tensor(element), Some(ImmediateKind::List(list))) if element.shape.is_empty() => {
                let (ty, data) = list_of_scalars(name, element.dtype, list)?;
                Ok((ty, Unplaced::Ready(data)))
            }
            _ => Err(unsupported(name, "list constant of anything but scalars")),
        },
        (ValueType::List(_), _) => Err(unsupported(name, "list constant in a weight file")),
        (ValueType::Tuple(_), _) => Err(unsupported(name, "tuple constant")),
        (ValueType::Dictionary(..), _) => Err(unsupported(name, "dictionary constant")),
        (ValueType::State(_), _) => Err(unsupported(name, "state constant")),
    }
}

fn unsupported(name: &str, found: &'static str) -> ProgramError {
    ProgramError::UnsupportedType { name: name.to_owned(), found }
}

fn list_of_scalars(
    name: &str,
    dtype: DataType,
    list: ListValue,
) -> Result<(TensorType, ConstantData), ProgramError> {
    if dtype.bits().is_some_and(|bits| bits < 8) {
        return Err(unsupported(name, "list constant of elements below 8 bits"));
    }
    let ty = TensorType { dtype, shape: vec![Dim::Fixed(list.values.len())] };
    let (mut strings, mut bytes) = (Vec::new(), Vec::new());
    for value in list.values {
        match constant(name, value)? {
            (element, _) if element.dtype != dtype || !element.shape.is_empty() => {
                return Err(unsupported(name, "list constant of mixed types"));
            }
            (_, Unplaced::Ready(ConstantData::Strings(mut element))) => strings.append(&mut element),
            (_, Unplaced::Ready(ConstantData::Inline(mut element))) => bytes.append(&mut element),
            _ => return Err(unsupported(name, "list constant with elements in a weight file")),
        }
    }
    let data =
        if dtype == DataType::String { ConstantData::Strings(strings) } else { ConstantData::Inline(bytes) };
    Ok((ty, data))
}

/// The little-endian bytes of an immediate.
fn immediate(name: &str, ty: &TensorType, values: TensorValues) -> Result<ConstantData, ProgramError> {
    let size = size(name, ty)?;
    let check = |wanted, found, unit| {
        if wanted == found {
            return Ok(());
        }
        Err(ProgramError::WrongLength { name: name.to_owned(), ty: ty.clone(), wanted, found, unit })
    };
    let elements = |found| check(size.elements, found, "elements");
    let wrong = |found| Err(ProgramError::WrongField { name: name.to_owned(), ty: ty.clone(), found });
    let bytes = match (values, ty.dtype) {
        (TensorValues::Strings(strings), DataType::String) => {
            elements(strings.values.len())?;
            return Ok(ConstantData::Strings(strings.values));
        }
        (TensorValues::Bytes(bytes), dtype) if dtype != DataType::String && dtype != DataType::Bool => {
            check(size.bytes, bytes.values.len(), "bytes")?;
            bytes.values
        }
        (TensorValues::Floats(floats), DataType::Float32) => {
            elements(floats.values.len())?;
            floats.values.iter().flat_map(|v| v.to_le_bytes()).collect()
        }
        (TensorValues::Doubles(doubles), DataType::Float64) => {
            elements(doubles.values.len())?;
            doubles.values.iter().flat_map(|v| v.to_le_bytes()).collect()
        }
        (TensorValues::Bools(bools), DataType::Bool) => {
            elements(bools.values.len())?;
            bools.values.iter().map(|&v| u8::from(v)).collect()
        }
        (TensorValues::Ints(ints), dtype) => {
            let Some(width) = int_width(dtype) else { return wrong("ints") };
            elements(ints.values.len())?;
            let mut bytes = Vec::with_capacity(ints.values.len() * width.bytes);
            for &value in &ints.values {
                let value = i64::from(value);
                if !(width.min..=width.max).contains(&value) {
                    return Err(ProgramError::OutOfRange { name: name.to_owned(), value, dtype });
                }
                bytes.extend_from_slice(&value.to_le_bytes()[..width.bytes]);
            }
            bytes
        }
        // Unsigned 64-bit elements travel in the signed field with the same bits.
        (TensorValues::LongInts(longs), DataType::Int64 | DataType::UInt64) => {
            elements(longs.values.len())?;
            longs.values.iter().flat_map(|v| v.to_le_bytes()).collect()
        }
        (TensorValues::Floats(_), _) => return wrong("floats"),
        (TensorValues::Doubles(_), _) => return wrong("doubles"),
        (TensorValues::Bools(_), _) => return wrong("bools"),
        (TensorValues::Strings(_), _) => return wrong("strings"),
        (TensorValues::LongInts(_), _) => return wrong("longInts"),
        (TensorValues::Bytes(_), _) => return wrong("bytes"),
    };
    Ok(ConstantData::Inline(bytes))
}

struct IntWidth {
    bytes: usize,
    min: i64,
    max: i64,
}

/// Integer types that the `ints` field may hold.
fn int_width(dtype: DataType) -> Option<IntWidth> {
    let width = |bytes, min, max| Some(IntWidth { bytes, min, max });
    match dtype {
        DataType::Int8 => width(1, i8::MIN.into(), i8::MAX.into()),
        DataType::UInt8 => width(1, 0, u8::MAX.into()),
        DataType::Int16 => width(2, i16::MIN.into(), i16::MAX.into()),
        DataType::UInt16 => width(2, 0, u16::MAX.into()),
        DataType::Int32 => width(4, i32::MIN.into(), i32::MAX.into()),
        DataType::UInt32 => width(4, 0, u32::MAX.into()),
        _ => None,
    }
}
