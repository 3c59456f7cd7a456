//! Element types.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::LayoutError;

/// The type of one stored element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 half precision.
    Float16,
    /// The upper half of a float32.
    BFloat16,
    /// IEEE 754 single precision.
    Float32,
    /// Signed byte, with scales beside it.
    Int8,
    /// Packed quantised codes.
    UInt32,
}

impl DType {
    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            DType::Int8 => 1,
            DType::Float16 | DType::BFloat16 => 2,
            DType::Float32 | DType::UInt32 => 4,
        }
    }

    /// The name used in layouts, reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            DType::Float16 => "float16",
            DType::BFloat16 => "bfloat16",
            DType::Float32 => "float32",
            DType::Int8 => "int8",
            DType::UInt32 => "uint32",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<DType, LayoutError> {
        [DType::Float16, DType::BFloat16, DType::Float32, DType::Int8, DType::UInt32]
            .into_iter()
            .find(|d| d.name() == text)
            .ok_or_else(|| LayoutError::UnknownDType { name: text.to_owned() })
    }
}
