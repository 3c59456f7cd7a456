//! Types of the wire format → types of the program.

use crate::error::ProgramError;
use crate::program::{DataType, Dim, TensorType, ValueType};
use crate::spec;

/// The type of the value `name`.
pub(super) fn value_type(name: &str, wire: Option<&spec::ValueType>) -> Result<ValueType, ProgramError> {
    let missing = || ProgramError::MissingType { name: name.to_owned() };
    match wire.and_then(|ty| ty.kind.as_ref()).ok_or_else(missing)? {
        spec::ValueTypeKind::Tensor(tensor) => Ok(ValueType::Tensor(tensor_type(name, tensor)?)),
        spec::ValueTypeKind::State(state) => match value_type(name, state.wrapped_type.as_deref())? {
            ValueType::Tensor(tensor) => Ok(ValueType::State(tensor)),
            _ => Err(ProgramError::StateWithoutTensor { name: name.to_owned() }),
        },
        spec::ValueTypeKind::List(list) => {
            Ok(ValueType::List(Box::new(value_type(name, list.r#type.as_deref())?)))
        }
        spec::ValueTypeKind::Tuple(tuple) => tuple
            .types
            .iter()
            .map(|ty| value_type(name, Some(ty)))
            .collect::<Result<_, _>>()
            .map(ValueType::Tuple),
        spec::ValueTypeKind::Dictionary(dictionary) => Ok(ValueType::Dictionary(
            Box::new(value_type(name, dictionary.key_type.as_deref())?),
            Box::new(value_type(name, dictionary.value_type.as_deref())?),
        )),
    }
}

/// The type of the tensor `name`. A dimension that says nothing is unknown.
pub(super) fn tensor_type(name: &str, wire: &spec::TensorType) -> Result<TensorType, ProgramError> {
    let number = wire.data_type;
    let dtype =
        data_type(number).ok_or_else(|| ProgramError::UnknownDataType { name: name.to_owned(), number })?;
    if usize::try_from(wire.rank) != Ok(wire.dimensions.len()) {
        return Err(ProgramError::RankMismatch {
            name: name.to_owned(),
            rank: wire.rank,
            dimensions: wire.dimensions.len(),
        });
    }
    let mut shape = Vec::with_capacity(wire.dimensions.len());
    for dimension in &wire.dimensions {
        shape.push(match &dimension.kind {
            Some(spec::DimensionKind::Constant(constant)) => {
                Dim::Fixed(usize::try_from(constant.size).map_err(|_| ProgramError::TooLarge {
                    name: name.to_owned(),
                    ty: TensorType { dtype, shape: vec![Dim::Unknown; wire.dimensions.len()] },
                })?)
            }
            Some(spec::DimensionKind::Unknown(unknown)) if unknown.variadic => {
                let found = "tensor of unknown rank";
                return Err(ProgramError::UnsupportedType { name: name.to_owned(), found });
            }
            Some(spec::DimensionKind::Unknown(_)) | None => Dim::Unknown,
        });
    }
    Ok(TensorType { dtype, shape })
}

/// Numbers of MIL's `DataType`.
fn data_type(number: i32) -> Option<DataType> {
    Some(match number {
        1 => DataType::Bool,
        2 => DataType::String,
        10 => DataType::Float16,
        11 => DataType::Float32,
        12 => DataType::Float64,
        13 => DataType::BFloat16,
        21 => DataType::Int8,
        22 => DataType::Int16,
        23 => DataType::Int32,
        24 => DataType::Int64,
        25 => DataType::Int4,
        31 => DataType::UInt8,
        32 => DataType::UInt16,
        33 => DataType::UInt32,
        34 => DataType::UInt64,
        35 => DataType::UInt4,
        36 => DataType::UInt2,
        37 => DataType::UInt1,
        38 => DataType::UInt6,
        39 => DataType::UInt3,
        40 => DataType::Float8E4M3,
        41 => DataType::Float8E5M2,
        _ => return None,
    })
}
