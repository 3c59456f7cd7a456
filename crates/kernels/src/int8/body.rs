//! The body of int8 coding, written once and compiled for every instruction set.

use super::LARGEST_CODE;
use crate::affine::body::Divisor;

/// `value / scale`, rounded to nearest even, within ±127; a NaN becomes -127.
#[inline(always)]
pub(crate) fn encode(values: &[f32], scale: f32, codes: &mut [i8]) {
    let divide = Divisor::new(scale);
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = divide.round(value, -LARGEST_CODE, LARGEST_CODE) as i8;
    }
}
