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
    // Three passes: what one group waits for, a chain of divisions, then runs for many groups side by side.
    for (values, (min, max)) in values.chunks_exact(group).zip(scales.iter_mut().zip(biases.iter_mut())) {
        (*min, *max) = range(values);
    }
    for (scale, bias) in scales.iter_mut().zip(biases.iter_mut()) {
        (*scale, *bias) = range_to_scale(*scale, *bias, bins);
    }
    let groups = values.chunks_exact(group).zip(codes.chunks_exact_mut(group));
    for ((values, codes), (&scale, &bias)) in groups.zip(scales.iter().zip(biases.iter())) {
        let divide = Divisor::new(scale);
        for (code, &value) in codes.iter_mut().zip(values) {
            *code = divide.round(value - bias, 0.0, bins) as u8;
        }
    }
}

/// A divisor whose quotients are those of a division, bit by bit, and cheaper: two steps of Newton's method with a fused
/// multiply-add, from the divisor's rounded inverse, give the correctly rounded quotient (Markstein, "Computation of
/// elementary functions on the IBM RISC System/6000 processor", 1990) as long as nothing under- or overflows.
#[derive(Clone, Copy)]
pub(crate) struct Divisor {
    by: f32,
    inverse: f32,
    exact: bool,
}

impl Divisor {
    #[inline(always)]
    pub(crate) fn new(by: f32) -> Divisor {
        // Quotients that matter lie between 1/4 and 256: products with such a divisor stay far from both ends.
        let exact = (1e-18..1e18).contains(&by.abs());
        Divisor { by, inverse: 1.0 / by, exact }
    }

    /// `value / by` between `low` and `high`, at most 2²², rounded to nearest even; the integer's low bits. A NaN is
    /// `low`.
    #[inline(always)]
    pub(crate) fn round(self, value: f32, low: f32, high: f32) -> u32 {
        /// In this binade a float's last bit is worth one: adding rounds to an integer, and leaves it in the low bits.
        const ROUND: f32 = 12_582_912.0;
        let quotient = if self.exact {
            let first = value * self.inverse;
            let second = (-first).mul_add(self.by, value).mul_add(self.inverse, first);
            (-second).mul_add(self.by, value).mul_add(self.inverse, second)
        } else {
            value / self.by
        };
        let quotient = if quotient > low { quotient } else { low };
        let quotient = if quotient < high { quotient } else { high };
        (quotient + ROUND).to_bits()
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
