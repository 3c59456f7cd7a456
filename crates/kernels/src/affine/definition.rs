//! Affine quantisation as MLX states it, a lane at a time.

#[cfg(test)]
use {crate::Elem, half::bf16, half::f16};

/// Codes, scale and bias of one group, after `mlx/backend/cpu/quantized.cpp`.
///
/// The end of the range farther from zero is coded without error. When the scale makes its code zero (a group whose
/// values are all tiny), there is no bias.
pub(crate) fn encode(bits: u32, values: &[f32], codes: &mut [u8]) -> (f32, f32) {
    let bins = ((1_u32 << bits) - 1) as f32;
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    for &value in values {
        max = if max < value { value } else { max };
        min = if value < min { value } else { min };
    }
    let (scale, bias) = range_to_scale(min, max, bins);
    for (code, value) in codes.iter_mut().zip(values) {
        *code = ((value - bias) / scale).round_ties_even().clamp(0.0, bins) as u8;
    }
    (scale, bias)
}

/// The scale and the bias for values from `min` to `max` in `bins` steps.
#[inline(always)]
pub(crate) fn range_to_scale(min: f32, max: f32, bins: f32) -> (f32, f32) {
    /// No group has a smaller scale before its edge is fitted.
    const SMALLEST: f32 = 1e-7;
    let steep = (max - min) / bins;
    let steep = if steep < SMALLEST { SMALLEST } else { steep };
    let (scale, edge) = if min.abs() > max.abs() { (steep, min) } else { (-steep, max) };
    let code = (edge / scale).round_ties_even();
    if code == 0.0 { (scale, 0.0) } else { (edge / code, edge) }
}

/// The value of a code before its last rounding: the product is rounded to `elem`, the sum is not yet.
#[cfg(test)]
pub(crate) fn decode(elem: Elem, code: u8, scale: f32, bias: f32) -> f32 {
    let product = f32::from(code) * scale;
    let product = match elem {
        Elem::F16 => f16::from_f32(product).to_f32(),
        Elem::BF16 => bf16::from_f32(product).to_f32(),
        _ => product,
    };
    product + bias
}
