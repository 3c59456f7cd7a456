//! Values become arrays that callers see, and arrays values.

use kvbaton_kernels::rows::{self, Isa};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::program::{DataType, TensorType};

use crate::array::Array;
use crate::executable::Feature;
use crate::memory::FloatBuf;
use crate::tensor::{Context, Data, Tensor, integers, is_float};

/// Little-endian elements as a value; `None` when their type is not handled.
pub(crate) fn decode(cx: &Context, dtype: DataType, shape: &[usize], bytes: &[u8]) -> Option<Tensor> {
    let shape = shape.to_vec();
    Some(match dtype {
        DataType::Float16 => {
            let mut values = cx.pool.take(bytes.len() / 2);
            for (v, b) in values.iter_mut().zip(bytes.as_chunks().0) {
                *v = half::f16::from_le_bytes(*b).to_f32();
            }
            Tensor::floats(dtype, shape, values)
        }
        DataType::Float32 => {
            let mut values = cx.pool.take(bytes.len() / 4);
            for (v, b) in values.iter_mut().zip(bytes.as_chunks().0) {
                *v = f32::from_le_bytes(*b);
            }
            Tensor::floats(dtype, shape, values)
        }
        DataType::Bool => Tensor::bools(shape, bytes.iter().map(|b| *b != 0).collect()),
        dtype => Tensor::ints(dtype, shape, integers(dtype, bytes)?),
    })
}

/// A value as an array of the feature's type.
pub(crate) fn export(cx: &Context, feature: &Feature, tensor: &Tensor) -> Result<Array, String> {
    let bytes = match tensor.own_bytes(feature.ty.dtype) {
        Some(bytes) => bytes,
        None => Bytes::new(encode(cx, &feature.ty, tensor)?),
    };
    Array::new(feature.ty.dtype, tensor.shape.clone(), bytes).map_err(|e| e.to_string())
}

/// A value as little-endian elements of the type `ty`.
pub(crate) fn encode(cx: &Context, ty: &TensorType, tensor: &Tensor) -> Result<Buffer, String> {
    let dtype = ty.dtype;
    let element = dtype.bits().unwrap_or(8) / 8;
    let mut buffer = Buffer::zeroed(tensor.count() * element);
    match (&tensor.data, dtype) {
        (
            Data::Float(_) | Data::Weights(_) | Data::Half(_) | Data::Given(_) | Data::State(_),
            DataType::Float16,
        ) => {
            let packed = tensor.to_packed(cx)?;
            let values = packed.packed_singles().ok_or("not packed")?;
            let out = rows::as_halves_mut(&mut buffer).ok_or("the buffer is not aligned")?;
            narrow(cx.isa, values, out);
        }
        (
            Data::Float(_) | Data::Weights(_) | Data::Half(_) | Data::Given(_) | Data::State(_),
            DataType::Float32,
        ) => {
            let values = FloatBuf::owned(tensor.float_values(cx.isa)?);
            for (out, v) in buffer.chunks_exact_mut(4).zip(values.iter()) {
                out.copy_from_slice(&v.to_le_bytes());
            }
        }
        (Data::Bool(_), DataType::Bool) => {
            for (out, v) in buffer.iter_mut().zip(tensor.bool_values()?) {
                *out = u8::from(v);
            }
        }
        (Data::Int(_), _) if !is_float(dtype) => {
            for (out, v) in buffer.chunks_exact_mut(element).zip(tensor.int_values()?) {
                out.copy_from_slice(&v.to_le_bytes()[..element]);
            }
        }
        _ => return Err(format!("declared {ty}, computed as {}", tensor.dtype)),
    }
    Ok(buffer)
}

/// Rounds to fp16 with all threads.
pub(crate) fn narrow(isa: Isa, values: &[f32], out: &mut [half::f16]) {
    use rayon::prelude::*;
    const CHUNK: usize = 1 << 16;
    out.par_chunks_mut(CHUNK)
        .zip(values.par_chunks(CHUNK))
        .for_each(|(out, values)| rows::narrow(isa, values, out));
}
