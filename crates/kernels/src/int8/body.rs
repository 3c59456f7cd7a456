//! The bodies of int8 coding, written once and compiled for every instruction set.

use super::LARGEST_CODE;

/// `code · scale` for every lane.
#[inline(always)]
pub(crate) fn decode(codes: &[i8], scale: f32, values: &mut [f32]) {
    for (value, &code) in values.iter_mut().zip(codes) {
        *value = f32::from(code) * scale;
    }
}

/// `value / scale`, rounded to nearest even, within ±127; a NaN becomes -127.
#[inline(always)]
pub(crate) fn encode(values: &[f32], scale: f32, codes: &mut [i8]) {
    for (code, &value) in codes.iter_mut().zip(values) {
        let quotient = (value / scale).round_ties_even();
        let quotient = if quotient > -LARGEST_CODE { quotient } else { -LARGEST_CODE };
        let quotient = if quotient < LARGEST_CODE { quotient } else { LARGEST_CODE };
        // SAFETY: the quotient lies within ±127, which an i32 holds; neither comparison lets a NaN through.
        let integer: i32 = unsafe { quotient.to_int_unchecked() };
        *code = integer as i8;
    }
}
