//! Encodings by their definitions, a row at a time.

use half::{bf16, f16};
use kvbaton_layout::DType;

/// `value` as an element of `dtype` holds it.
pub(crate) fn round(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Float16 => f16::from_f32(value).to_f32(),
        DType::BFloat16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// The bytes of a float.
pub(crate) fn float_bytes(value: f32, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::Float16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::BFloat16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// A row as it is stored: codes, scales and biases.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Stored {
    /// Words of affine codes, bytes of int8 codes as they are.
    pub(crate) codes: Vec<u32>,
    pub(crate) scales: Vec<f32>,
    pub(crate) biases: Vec<f32>,
}

/// MLX's affine quantisation of a row, scales and biases of type `dtype`.
pub(crate) fn affine_encode(row: &[f32], bits: u32, group: usize, dtype: DType) -> Stored {
    let bins = ((1u32 << bits) - 1) as f32;
    let mut stored = Stored::default();
    let mut codes = Vec::new();
    for lanes in row.chunks(group) {
        let lanes: Vec<f32> = lanes.iter().map(|v| round(*v, dtype)).collect();
        let low = lanes.iter().copied().fold(f32::INFINITY, f32::min);
        let high = lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut scale = ((high - low) / bins).max(1e-7);
        let edge = if low.abs() > high.abs() { low } else { high };
        if edge == high && low.abs() <= high.abs() {
            scale = -scale;
        }
        let steps = (edge / scale).round_ties_even();
        let bias = if steps == 0.0 {
            0.0
        } else {
            scale = edge / steps;
            edge
        };
        codes.extend(lanes.iter().map(|v| ((v - bias) / scale).round_ties_even().clamp(0.0, bins) as u32));
        stored.scales.push(round(scale, dtype));
        stored.biases.push(round(bias, dtype));
    }
    stored.codes = pack(&codes, bits);
    stored
}

/// MLX's dequantisation: the product is rounded before the bias is added.
pub(crate) fn affine_decode(stored: &Stored, bits: u32, group: usize, dtype: DType) -> Vec<f32> {
    let lanes = stored.codes.len() * 32 / bits as usize;
    let codes = unpack(&stored.codes, bits, lanes);
    let value = |(lane, code): (usize, &u32)| {
        let product = round(*code as f32 * stored.scales[lane / group], dtype);
        round(product + stored.biases[lane / group], dtype)
    };
    codes.iter().enumerate().map(value).collect()
}

fn pack(codes: &[u32], bits: u32) -> Vec<u32> {
    let mut words = vec![0u32; codes.len() * bits as usize / 32];
    for (i, code) in codes.iter().enumerate() {
        for bit in 0..bits as usize {
            let at = i * bits as usize + bit;
            words[at / 32] |= (code >> bit & 1) << (at % 32);
        }
    }
    words
}

fn unpack(words: &[u32], bits: u32, count: usize) -> Vec<u32> {
    let bit = |at: usize| words[at / 32] >> (at % 32) & 1;
    (0..count).map(|i| (0..bits as usize).map(|b| bit(i * bits as usize + b) << b).sum()).collect()
}

/// Int8 codes of lanes that share a scale of type `dtype`.
pub(crate) fn int8_scale(lanes: impl Iterator<Item = f32>, dtype: DType) -> f32 {
    let largest = lanes.map(f32::abs).fold(0.0, f32::max);
    round((largest / 127.0).max(1e-6), dtype)
}

pub(crate) fn int8_code(value: f32, scale: f32) -> i8 {
    (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8
}
