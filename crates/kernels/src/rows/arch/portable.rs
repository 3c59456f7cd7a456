//! Sixteen lanes as an array: runs everywhere. On AArch64 the compiler turns the loops into NEON.

use crate::rows::lanes::{LANES, Lanes};
use half::f16;

/// The proof that needs none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Portable;

#[inline(always)]
fn each(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// `2^n` for integral `n` in -126..=127.
#[inline(always)]
fn power(n: f32) -> f32 {
    f32::from_bits(((n as i32 + 127) as u32) << 23)
}

impl Lanes for Portable {
    type V = [f32; LANES];
    const COLUMNS: usize = LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        *from
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn load_half(self, from: &[f16; LANES]) -> Self::V {
        from.map(f16::to_f32)
    }
    #[inline(always)]
    fn store_half(self, v: Self::V, to: &mut [f16; LANES]) {
        *to = v.map(f16::from_f32);
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        each(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        each(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        each(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        each(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        each(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        each(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn round_half(self, a: Self::V) -> Self::V {
        a.map(|x| f16::from_f32(x).to_f32())
    }
    #[inline(always)]
    fn nearest(self, a: Self::V) -> Self::V {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    fn scale(self, a: Self::V, n: Self::V) -> Self::V {
        // Two steps: 2^n itself may not be a normal number. The first step never rounds.
        each(a, n, |a, n| {
            let first = (n * 0.5).floor();
            (a * power(first)) * power(n - first)
        })
    }
}
