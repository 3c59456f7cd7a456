//! The executor's arrays as tensors of a cache.

use kvbaton_exec::Array;
use kvbaton_layout::{DType, TensorInfo};
use kvbaton_mil::program::DataType;
use kvbaton_runtime::Element;

use crate::Tensor;

/// An array as a cache tensor, if its type is one that caches have.
pub(crate) fn tensor(name: String, array: &Array) -> Option<Tensor> {
    let dtype = dtype(array.dtype())?;
    Some(Tensor { info: TensorInfo::contiguous(name, dtype, array.shape()), bytes: array.bytes().clone() })
}

/// A program's element type as a cache's.
pub(crate) fn dtype(dtype: DataType) -> Option<DType> {
    Some(match dtype {
        DataType::Float16 => DType::Float16,
        DataType::BFloat16 => DType::BFloat16,
        DataType::Float32 => DType::Float32,
        DataType::Int8 => DType::Int8,
        _ => return None,
    })
}

/// The reverse.
pub(crate) fn data_type(dtype: DType) -> Option<DataType> {
    Some(match dtype {
        DType::Float16 => DataType::Float16,
        DType::BFloat16 => DataType::BFloat16,
        DType::Float32 => DataType::Float32,
        DType::Int8 => DataType::Int8,
        _ => return None,
    })
}

/// A program's element type as a runtime's arrays have it.
pub(crate) fn element_of(dtype: DataType) -> Option<Element> {
    Some(match dtype {
        DataType::Float16 => Element::Float16,
        DataType::Float32 => Element::Float32,
        DataType::Int32 => Element::Int32,
        DataType::Int8 => Element::Int8,
        _ => return None,
    })
}

/// The reverse.
pub(crate) fn data_type_of(element: Element) -> DataType {
    match element {
        Element::Float16 => DataType::Float16,
        Element::Float32 => DataType::Float32,
        Element::Int32 => DataType::Int32,
        Element::Int8 => DataType::Int8,
    }
}
