//! Sixteen lanes in one AVX-512 register or in two AVX2 registers.

use crate::rows::lanes::{BEFORE, Kernel, LANES, Lanes};
use half::f16;
use std::arch::x86_64::*;

/// AVX-512 (F, BW, DQ, VL) with FMA and F16C: exists only where the CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx512(());

/// AVX2 with FMA and F16C: exists only where the CPU has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// The capability, if this CPU has it.
    pub(crate) fn new() -> Option<Avx2> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Avx2(()))
    }

    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn body<K: Kernel>(l: Avx2, kernel: K) -> K::Out {
            kernel.run(l)
        }
        // SAFETY: `self` exists only if `new` saw these features on this CPU.
        unsafe { body(self, kernel) }
    }
}

impl Avx512 {
    /// The capability, if this CPU has it.
    pub(crate) fn new() -> Option<Avx512> {
        (Avx2::new().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl"))
        .then_some(Avx512(()))
    }

    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        fn body<K: Kernel>(l: Avx512, kernel: K) -> K::Out {
            kernel.run(l)
        }
        // SAFETY: `self` exists only if `new` saw these features on this CPU.
        unsafe { body(self, kernel) }
    }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// One expression of intrinsics that needs no more than the instruction set `self` proves.
macro_rules! proven {
    ($e:expr) => {{
        // SAFETY: the receiver exists only on a CPU with the instructions used here; loads and stores go through
        // references to arrays of sixteen elements and need no alignment.
        unsafe { $e }
    }};
}

impl Lanes for Avx512 {
    type V = __m512;
    const COLUMNS: usize = 2 * LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        proven!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        proven!(_mm512_loadu_ps(from.as_ptr()))
    }
    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32; LANES]) {
        proven!(_mm512_storeu_ps(to.as_mut_ptr(), v));
    }
    #[inline(always)]
    fn load_half(self, from: &[f16; LANES]) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }
    #[inline(always)]
    fn store_half(self, v: __m512, to: &mut [f16; LANES]) {
        proven!(_mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtps_ph::<NEAREST>(v)));
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        proven!(_mm512_sqrt_ps(a))
    }
    #[inline(always)]
    fn round_half(self, a: __m512) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm512_cvtps_ph::<NEAREST>(a)))
    }
    #[inline(always)]
    fn nearest(self, a: __m512) -> __m512 {
        proven!(_mm512_roundscale_ps::<NEAREST>(a))
    }
    #[inline(always)]
    fn scale(self, a: __m512, n: __m512) -> __m512 {
        proven!(_mm512_scalef_ps(a, n))
    }
    #[inline(always)]
    fn expand(self, bits: u16, from: &[f32; LANES]) -> __m512 {
        proven!(_mm512_maskz_expand_ps(bits, _mm512_loadu_ps(from.as_ptr())))
    }
    #[inline(always)]
    fn expand_codes(self, bits: u16, from: &[u8; LANES], to: &mut [u8; LANES]) {
        proven!({
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            let spread = _mm512_maskz_expand_epi32(bits, wide);
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(spread));
        });
    }
    #[inline(always)]
    fn keep(self, bits: u16, v: __m512) -> __m512 {
        proven!(_mm512_maskz_mov_ps(bits, v))
    }
    #[inline(always)]
    fn transpose(self, r: [__m512; LANES]) -> [__m512; LANES] {
        // Pairs of rows, then quadruples within each 128-bit lane, then the lanes themselves.
        proven!({
            let mut t = r;
            for i in (0..LANES).step_by(2) {
                t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
            }
            let mut q = t;
            for i in (0..LANES).step_by(4) {
                q[i] = _mm512_shuffle_ps::<0b01_00_01_00>(t[i], t[i + 2]);
                q[i + 1] = _mm512_shuffle_ps::<0b11_10_11_10>(t[i], t[i + 2]);
                q[i + 2] = _mm512_shuffle_ps::<0b01_00_01_00>(t[i + 1], t[i + 3]);
                q[i + 3] = _mm512_shuffle_ps::<0b11_10_11_10>(t[i + 1], t[i + 3]);
            }
            // q[4g + c] holds, in 128-bit lane b, column 4b + c of rows 4g..4g + 4.
            let mut out = q;
            for c in 0..4 {
                let low01 = _mm512_shuffle_f32x4::<0b10_00_10_00>(q[c], q[4 + c]);
                let high01 = _mm512_shuffle_f32x4::<0b11_01_11_01>(q[c], q[4 + c]);
                let low23 = _mm512_shuffle_f32x4::<0b10_00_10_00>(q[8 + c], q[12 + c]);
                let high23 = _mm512_shuffle_f32x4::<0b11_01_11_01>(q[8 + c], q[12 + c]);
                out[c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low01, low23);
                out[4 + c] = _mm512_shuffle_f32x4::<0b10_00_10_00>(high01, high23);
                out[8 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low01, low23);
                out[12 + c] = _mm512_shuffle_f32x4::<0b11_01_11_01>(high01, high23);
            }
            out
        })
    }
}

/// Applies a 256-bit intrinsic to both halves.
macro_rules! both {
    ($f:ident, $($v:expr),+) => {
        proven!([$f($($v[0]),+), $f($($v[1]),+)])
    };
}

impl Lanes for Avx2 {
    type V = [__m256; 2];
    const COLUMNS: usize = LANES;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        proven!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::V {
        proven!([_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))])
    }
    #[inline(always)]
    fn store(self, v: Self::V, to: &mut [f32; LANES]) {
        proven!({
            _mm256_storeu_ps(to.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), v[1]);
        });
    }
    #[inline(always)]
    fn load_half(self, from: &[f16; LANES]) -> Self::V {
        proven!([
            _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(8).cast())),
        ])
    }
    #[inline(always)]
    fn store_half(self, v: Self::V, to: &mut [f16; LANES]) {
        proven!({
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(
                to.as_mut_ptr().add(8).cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]),
            );
        });
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::V, b: Self::V) -> Self::V {
        both!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        both!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn sqrt(self, a: Self::V) -> Self::V {
        both!(_mm256_sqrt_ps, a)
    }
    #[inline(always)]
    fn round_half(self, a: Self::V) -> Self::V {
        proven!([
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[0])),
            _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(a[1])),
        ])
    }
    #[inline(always)]
    fn nearest(self, a: Self::V) -> Self::V {
        proven!([_mm256_round_ps::<NEAREST>(a[0]), _mm256_round_ps::<NEAREST>(a[1])])
    }
    #[inline(always)]
    fn scale(self, a: Self::V, n: Self::V) -> Self::V {
        proven!([scale_half(a[0], n[0]), scale_half(a[1], n[1])])
    }
    #[inline(always)]
    fn expand(self, bits: u16, from: &[f32; LANES]) -> Self::V {
        let [low, high] = bits.to_le_bytes();
        // At most 8 values are before the upper half's first one.
        let later = from[low.count_ones() as usize..].first_chunk().expect("8 of 16 are left");
        let first = from.first_chunk().expect("8 of 16");
        proven!([expand_half(low, first), expand_half(high, later)])
    }
    #[inline(always)]
    fn keep(self, bits: u16, v: Self::V) -> Self::V {
        let [low, high] = bits.to_le_bytes();
        proven!([
            _mm256_and_ps(v[0], _mm256_castsi256_ps(spread_bits(low))),
            _mm256_and_ps(v[1], _mm256_castsi256_ps(spread_bits(high))),
        ])
    }
}

/// `a * 2^n` in two steps, as 2^n itself may not be a normal number. The first step never rounds.
#[target_feature(enable = "avx2")]
#[inline]
fn scale_half(a: __m256, n: __m256) -> __m256 {
    let n = _mm256_cvtps_epi32(n);
    let first = _mm256_srai_epi32::<1>(n);
    let second = _mm256_sub_epi32(n, first);
    _mm256_mul_ps(_mm256_mul_ps(a, power_of_two(first)), power_of_two(second))
}

/// The next of eight values in the lanes whose bits are set, +0 in the others.
#[target_feature(enable = "avx2")]
#[inline]
fn expand_half(bits: u8, from: &[f32; 8]) -> __m256 {
    let before = u64::from_le_bytes(BEFORE[usize::from(bits)]);
    let places = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(before.cast_signed()));
    // SAFETY: eight readable values; the load needs no alignment.
    let values = unsafe { _mm256_loadu_ps(from.as_ptr()) };
    _mm256_and_ps(_mm256_permutevar8x32_ps(values, places), _mm256_castsi256_ps(spread_bits(bits)))
}

/// Each of eight bits in all bits of its lane.
#[target_feature(enable = "avx2")]
#[inline]
fn spread_bits(bits: u8) -> __m256i {
    let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(i32::from(bits)), lane), lane)
}

/// `2^n` for `n` in -126..=127.
#[target_feature(enable = "avx2")]
#[inline]
fn power_of_two(n: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(n, _mm256_set1_epi32(127))))
}
