//! Arrays that go into a program and come out of it.

use half::f16;
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::program::DataType;

/// A contiguous array, outermost dimension first.
#[derive(Clone, Debug)]
pub struct Array {
    dtype: DataType,
    shape: Vec<usize>,
    bytes: Bytes,
}

/// Bytes that do not make an array.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArrayError {
    /// The bytes are not as many as dtype and shape say.
    #[error("a {dtype} array of shape {shape:?} has {expected_bytes} bytes, not {have_bytes}")]
    Length {
        /// Element type.
        dtype: DataType,
        /// Shape.
        shape: Vec<usize>,
        /// Bytes that they need.
        expected_bytes: usize,
        /// Bytes that were given.
        have_bytes: usize,
    },
    /// Elements of this type do not fill whole bytes.
    #[error("an array cannot hold {dtype}")]
    DataType {
        /// Element type.
        dtype: DataType,
    },
}

impl Array {
    /// An array over `bytes`: elements little endian and packed, a `bool` is one byte.
    ///
    /// # Errors
    ///
    /// When the length does not fit dtype and shape, or elements of the type do not fill whole bytes.
    pub fn new(dtype: DataType, shape: Vec<usize>, bytes: Bytes) -> Result<Array, ArrayError> {
        let element = match dtype.bits() {
            Some(bits) if bits % 8 == 0 => bits / 8,
            _ => return Err(ArrayError::DataType { dtype }),
        };
        let expected = shape.iter().try_fold(element, |n, d| n.checked_mul(*d)).unwrap_or(usize::MAX);
        if expected != bytes.len() {
            return Err(ArrayError::Length {
                dtype,
                shape,
                expected_bytes: expected,
                have_bytes: bytes.len(),
            });
        }
        Ok(Array { dtype, shape, bytes })
    }

    /// An `int32` array.
    ///
    /// # Errors
    ///
    /// When `values` are not as many as `shape` says.
    pub fn from_i32(shape: &[usize], values: &[i32]) -> Result<Array, ArrayError> {
        Array::packed(DataType::Int32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// An `fp32` array.
    ///
    /// # Errors
    ///
    /// When `values` are not as many as `shape` says.
    pub fn from_f32(shape: &[usize], values: &[f32]) -> Result<Array, ArrayError> {
        Array::packed(DataType::Float32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    /// An `fp16` array.
    ///
    /// # Errors
    ///
    /// When `values` are not as many as `shape` says.
    pub fn from_f16(shape: &[usize], values: &[f16]) -> Result<Array, ArrayError> {
        Array::packed(DataType::Float16, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }

    fn packed(dtype: DataType, shape: &[usize], bytes: Vec<u8>) -> Result<Array, ArrayError> {
        Array::new(dtype, shape.to_vec(), Bytes::new(Buffer::copy_of(&bytes)))
    }

    /// Element type.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, little endian and packed. Those of a program's outputs start on a page.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Elements of an fp16, fp32, bool or integer array (up to 32 bits), as `f32`; `None` for other types.
    /// Integers beyond 2²⁴ are rounded.
    pub fn to_f32(&self) -> Option<Vec<f32>> {
        let bytes = &self.bytes;
        #[expect(clippy::cast_precision_loss, reason = "documented")]
        Some(match self.dtype {
            DataType::Float16 => {
                bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
            }
            DataType::Float32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            _ => crate::tensor::integers(self.dtype, bytes)?.into_iter().map(|v| v as f32).collect(),
        })
    }
}
