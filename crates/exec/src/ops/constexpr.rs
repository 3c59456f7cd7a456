//! `constexpr_*`: compressed weights, decompressed to fp16 at load.
//!
//! Opsets up to iOS 17 keep the parts in attributes, iOS 18 in inputs; sub-byte values are packed, the lowest bits
//! first.

use std::sync::Arc;

use half::f16;
use kvbaton_mil::program::{Constant, DataType};

use super::{Form, Reason, axis_of};
use crate::tensor::{Data, Tensor, count, integers, packed_strides};

type Decompress = fn(&Form<'_>) -> Result<Decompressed, Reason>;

struct Decompressed {
    shape: Vec<usize>,
    values: Vec<f32>,
}

const DECOMPRESSIONS: &[(&str, Decompress)] = &[
    ("constexpr_affine_dequantize", affine),
    ("constexpr_blockwise_shift_scale", blockwise),
    ("constexpr_cast", cast),
    ("constexpr_lut_to_dense", lookup),
];

/// The decompressed constant; `None` if the operation is no decompression the executor knows.
pub(crate) fn evaluate(form: &Form<'_>) -> Option<Result<Tensor, Reason>> {
    let (_, decompress) = DECOMPRESSIONS.iter().find(|(name, _)| *name == form.op.kind)?;
    Some(decompress(form).and_then(|d| {
        if count(&d.shape) != d.values.len() {
            return Err(format!("{} values for shape {:?}", d.values.len(), d.shape));
        }
        match form.dtype()? {
            DataType::Float16 => {
                let values = d.values.into_iter().map(f16::from_f32).collect();
                Ok(Tensor::new(DataType::Float16, d.shape, Data::Half(Arc::new(values))))
            }
            DataType::Float32 => {
                let values = crate::memory::FloatBuf::owned(d.values);
                Ok(Tensor::floats(DataType::Float32, d.shape, values))
            }
            other => Err(format!("to {other}")),
        }
    }))
}

/// MIL's names of the decompressions.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    DECOMPRESSIONS.iter().map(|(name, _)| *name)
}

/// Elements of a constant of any number type, as numbers.
fn numbers(form: &Form<'_>, constant: &Constant) -> Result<Vec<f32>, Reason> {
    let dtype = constant.ty.dtype;
    let shape = constant.ty.fixed_shape().ok_or("a constant of unknown shape")?;
    let bytes = form.package.constant_bytes(constant).ok_or("a constant of strings")?;
    let bits = dtype.bits().ok_or("a constant of strings")?;
    if bits < 8 {
        let signed = dtype == DataType::Int4;
        #[expect(clippy::cast_precision_loss, reason = "fewer than eight bits")]
        return Ok(unpacked(bytes, bits, count(&shape))?
            .into_iter()
            .map(|v| if signed && v >= 8 { v as f32 - 16.0 } else { v as f32 })
            .collect());
    }
    Ok(match dtype {
        DataType::Float16 => bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        DataType::Float32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        #[expect(clippy::cast_precision_loss, reason = "weights and their offsets have at most 16 bits")]
        _ => integers(dtype, bytes)
            .ok_or_else(|| format!("values of type {dtype}"))?
            .into_iter()
            .map(|v| v as f32)
            .collect(),
    })
}

/// `n` values of `bits` bits each, the lowest first.
fn unpacked(bytes: &[u8], bits: usize, n: usize) -> Result<Vec<u32>, Reason> {
    if n.checked_mul(bits).is_none_or(|total| total.div_ceil(8) > bytes.len()) {
        return Err(format!("{n} values of {bits} bits in {} bytes", bytes.len()));
    }
    let (mut held, mut have) = (0u32, 0);
    let mut bytes = bytes.iter();
    let mask = (1u32 << bits) - 1;
    Ok((0..n)
        .map(|_| {
            while have < bits {
                held |= u32::from(bytes.next().copied().unwrap_or(0)) << have;
                have += 8;
            }
            let v = held & mask;
            held >>= bits;
            have -= bits;
            v
        })
        .collect())
}

fn part<'a>(form: &Form<'a>, name: &str) -> Result<&'a Constant, Reason> {
    form.constant(name).ok_or_else(|| format!("`{name}` is missing or computed"))
}

fn shape_of(constant: &Constant) -> Result<Vec<usize>, Reason> {
    constant.ty.fixed_shape().ok_or_else(|| "a constant of unknown shape".to_owned())
}

/// For each element of `shape`, its place in a tensor of shape `coarse` of which every element stands for a block.
fn blocks(shape: &[usize], coarse: &[usize]) -> Result<Vec<usize>, Reason> {
    let divides =
        shape.len() == coarse.len() && shape.iter().zip(coarse).all(|(d, c)| *c > 0 && d.is_multiple_of(*c));
    if !divides {
        return Err(format!("blocks {coarse:?} of a tensor of shape {shape:?}"));
    }
    let mut places = vec![0];
    for ((d, c), stride) in shape.iter().zip(coarse).zip(packed_strides(coarse)) {
        let size = d / c;
        places = places.into_iter().flat_map(|p| (0..*d).map(move |i| p + i / size * stride)).collect();
    }
    Ok(places)
}

/// `(data - offset) * scale`, both given per block.
fn blockwise(form: &Form<'_>) -> Result<Decompressed, Reason> {
    let (data, scale) = (part(form, "data")?, part(form, "scale")?);
    let shape = shape_of(data)?;
    let places = blocks(&shape, &shape_of(scale)?)?;
    let scales = numbers(form, scale)?;
    let mut values = numbers(form, data)?;
    if let Some(offset) = form.constant("offset") {
        if shape_of(offset)? != shape_of(scale)? {
            return Err(format!("offset {} and scale {}", offset.ty, scale.ty));
        }
        let offsets = numbers(form, offset)?;
        values.iter_mut().zip(&places).for_each(|(v, p)| *v -= offsets[*p]);
    }
    values.iter_mut().zip(&places).for_each(|(v, p)| *v *= scales[*p]);
    Ok(Decompressed { shape, values })
}

/// `(quantized_data - zero_point) * scale`, both one value or one for each index of an axis.
fn affine(form: &Form<'_>) -> Result<Decompressed, Reason> {
    let data = part(form, "quantized_data")?;
    let shape = shape_of(data)?;
    let axis = axis_of(form.int("axis")?.ok_or("`axis` is missing")?, shape.len())?;
    let mut values = numbers(form, data)?;
    let inner = count(&shape[axis + 1..]).max(1);
    for (name, apply) in [("zero_point", (|v, p| v - p) as fn(f32, f32) -> f32), ("scale", |v, p| v * p)] {
        let given = numbers(form, part(form, name)?)?;
        if given.len() != 1 && given.len() != shape[axis] {
            return Err(format!("{} values of `{name}` along an axis of size {}", given.len(), shape[axis]));
        }
        for (i, v) in values.iter_mut().enumerate() {
            let at = if given.len() == 1 { 0 } else { i / inner % shape[axis] };
            *v = apply(*v, given[at]);
        }
    }
    Ok(Decompressed { shape, values })
}

/// Palettes: iOS 18's one a block, the older one for the whole tensor.
fn lookup(form: &Form<'_>) -> Result<Decompressed, Reason> {
    let (indices, lut) = (part(form, "indices")?, part(form, "lut")?);
    let palette = numbers(form, lut)?;
    if form.constant("shape").is_some() {
        let dims = form.ints("shape")?.unwrap_or_default();
        let dims = dims.into_iter().map(|d| usize::try_from(d).map_err(|e| e.to_string()));
        let shape = dims.collect::<Result<Vec<_>, _>>()?;
        if !palette.len().is_power_of_two() || palette.len() > 256 {
            return Err(format!("a palette of {} values", palette.len()));
        }
        let bits = palette.len().trailing_zeros() as usize;
        let bytes = form.package.constant_bytes(indices).ok_or("indices of strings")?;
        let picked = unpacked(bytes, bits.max(1), count(&shape))?;
        let values = picked.into_iter().map(|i| palette[i as usize % palette.len()]).collect();
        return Ok(Decompressed { shape, values });
    }
    let shape = shape_of(indices)?;
    let lut_shape = shape_of(lut)?;
    let [coarse @ .., entries, 1] = lut_shape.as_slice() else {
        return Err(format!("a palette of vectors, {}", lut.ty));
    };
    let places = blocks(&shape, coarse)?;
    let picked = numbers(form, indices)?;
    let value = |(i, p): (f32, usize)| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small whole number")]
        let i = i as usize;
        if i < *entries {
            Ok(palette[p * entries + i])
        } else {
            Err(format!("index {i} of {entries} entries"))
        }
    };
    let values = picked.into_iter().zip(places).map(value).collect::<Result<_, _>>()?;
    Ok(Decompressed { shape, values })
}

fn cast(form: &Form<'_>) -> Result<Decompressed, Reason> {
    let source = part(form, "source_val")?;
    Ok(Decompressed { shape: shape_of(source)?, values: numbers(form, source)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_values_start_with_the_lowest_bits() {
        assert_eq!(unpacked(&[0b1110_0100], 2, 4).unwrap(), [0, 1, 2, 3]);
        assert_eq!(unpacked(&[0x21, 0x43], 4, 3).unwrap(), [1, 2, 3]);
        // Three six-bit values cross byte borders.
        assert_eq!(unpacked(&[0b1000_0001, 0b0011_0000, 0b0000_0000], 6, 3).unwrap(), [1, 2, 3]);
        assert!(unpacked(&[0], 4, 3).is_err());
    }

    #[test]
    fn blocks_divide_each_dimension() {
        assert_eq!(blocks(&[2, 4], &[2, 2]).unwrap(), [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(blocks(&[2, 2], &[1, 2]).unwrap(), [0, 1, 0, 1]);
        assert!(blocks(&[3, 4], &[2, 2]).is_err());
    }
}
