//! The fast bodies of quantisation, written once: straight loops over groups of lanes that compile to the vectors of
//! whichever instruction set they are inlined into.

use super::definition::range_to_scale;

/// Codes, scales and biases of whole groups; see [`super::definition::encode`]. `range` finds the smallest and the largest
/// of a group's values.
#[inline(always)]
pub(crate) fn encode(
    group: usize,
    bits: u32,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
    range: impl Fn(&[f32]) -> (f32, f32),
) {
    let bins = ((1_u32 << bits) - 1) as f32;
    let groups = values.chunks_exact(group).zip(codes.chunks_exact_mut(group));
    for ((values, codes), (to_scale, to_bias)) in groups.zip(scales.iter_mut().zip(biases)) {
        let (min, max) = range(values);
        let (scale, bias) = range_to_scale(min, max, bins);
        (*to_scale, *to_bias) = (scale, bias);
        for (code, &value) in codes.iter_mut().zip(values) {
            let quotient = ((value - bias) / scale).round_ties_even();
            let quotient = if quotient > 0.0 { quotient } else { 0.0 };
            let quotient = if quotient < bins { quotient } else { bins };
            // SAFETY: the quotient lies within 0..=255, which an i32 holds; neither comparison lets a NaN through.
            let integer: i32 = unsafe { quotient.to_int_unchecked() };
            *code = integer as u8;
        }
    }
}

/// `code · scale` for whole groups, not yet rounded to the target's encoding.
#[inline(always)]
pub(crate) fn scale(group: usize, codes: &[u8], scales: &[f32], products: &mut [f32]) {
    let groups = products.chunks_exact_mut(group).zip(codes.chunks_exact(group));
    for ((products, codes), &scale) in groups.zip(scales) {
        for (product, &code) in products.iter_mut().zip(codes) {
            *product = f32::from(code) * scale;
        }
    }
}

/// Adds each group's bias.
#[inline(always)]
pub(crate) fn shift(group: usize, values: &mut [f32], biases: &[f32]) {
    for (values, &bias) in values.chunks_exact_mut(group).zip(biases) {
        for value in values {
            *value += bias;
        }
    }
}
