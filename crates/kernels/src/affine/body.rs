//! The fast bodies of quantisation, written once: straight loops over groups of lanes that compile to the vectors of
//! whichever instruction set they are inlined into.

use super::definition::range_to_scale;

/// Independent lanes of a reduction: as many as the widest register has.
const WIDE: usize = 16;

/// Codes, scales and biases of whole groups; see [`super::definition::encode`].
#[inline(always)]
pub(crate) fn encode(
    group: usize,
    bits: u32,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let bins = ((1_u32 << bits) - 1) as f32;
    let groups = values.chunks_exact(group).zip(codes.chunks_exact_mut(group));
    for ((values, codes), (scale, bias)) in groups.zip(scales.iter_mut().zip(biases.iter_mut())) {
        let (values, codes) = (values.as_chunks::<WIDE>().0, codes.as_chunks_mut::<WIDE>().0);
        let (mut min, mut max) = ([f32::INFINITY; WIDE], [f32::NEG_INFINITY; WIDE]);
        for values in values {
            for lane in 0..WIDE {
                max[lane] = if max[lane] < values[lane] { values[lane] } else { max[lane] };
                min[lane] = if values[lane] < min[lane] { values[lane] } else { min[lane] };
            }
        }
        let mut half = WIDE / 2;
        while half > 0 {
            for lane in 0..half {
                max[lane] = if max[lane] < max[lane + half] { max[lane + half] } else { max[lane] };
                min[lane] = if min[lane + half] < min[lane] { min[lane + half] } else { min[lane] };
            }
            half /= 2;
        }
        (*scale, *bias) = range_to_scale(min[0], max[0], bins);
        for (values, codes) in values.iter().zip(codes) {
            for lane in 0..WIDE {
                let code = ((values[lane] - *bias) / *scale).round_ties_even();
                codes[lane] = to_code(code, 0.0, bins) as u8;
            }
        }
    }
}

/// `code` within bounds of at most 255, as an integer; a NaN becomes `low`.
#[inline(always)]
fn to_code(code: f32, low: f32, high: f32) -> i32 {
    let code = if code > low { code } else { low };
    let code = if code < high { code } else { high };
    // SAFETY: `code` lies between `low` and `high`, which an i32 holds; neither comparison lets a NaN through.
    unsafe { code.to_int_unchecked() }
}

/// `code · scale` for whole groups, not yet rounded to the target's encoding.
#[inline(always)]
pub(crate) fn scale(group: usize, codes: &[u8], scales: &[f32], products: &mut [f32]) {
    let groups = products.chunks_exact_mut(group).zip(codes.chunks_exact(group));
    for ((products, codes), &scale) in groups.zip(scales) {
        let (products, codes) = (products.as_chunks_mut::<WIDE>().0, codes.as_chunks::<WIDE>().0);
        for (products, codes) in products.iter_mut().zip(codes) {
            for lane in 0..WIDE {
                products[lane] = f32::from(codes[lane]) * scale;
            }
        }
    }
}

/// Adds each group's bias.
#[inline(always)]
pub(crate) fn shift(group: usize, values: &mut [f32], biases: &[f32]) {
    for (values, &bias) in values.chunks_exact_mut(group).zip(biases) {
        for values in values.as_chunks_mut::<WIDE>().0 {
            for value in values {
                *value += bias;
            }
        }
    }
}
