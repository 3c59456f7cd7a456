//! 256-bit bodies.

use std::arch::x86_64::*;

use super::super::scalar;
use super::super::tile::{Gathered, rounds, walk};
use super::super::{Lines, Matrix};
use crate::Elem;

/// Elements of one step of a conversion.
const STEP: usize = 8;

/// # Safety
///
/// `at` is readable for 8 elements.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn load_f16(at: *const u8) -> __m256 {
    // SAFETY: 16 readable bytes.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
}

/// # Safety
///
/// `at` is readable for 8 elements.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn load_bf16(at: *const u8) -> __m256 {
    // SAFETY: 16 readable bytes.
    let upper = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(at.cast()) });
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper))
}

/// # Safety
///
/// `at` is readable for 8 elements.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn load_f32(at: *const u8) -> __m256 {
    // SAFETY: 32 readable bytes.
    unsafe { _mm256_loadu_ps(at.cast()) }
}

/// # Safety
///
/// `at` is readable for 8 codes.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn load_i8(at: *const u8, scale: __m256) -> __m256 {
    // SAFETY: 8 readable bytes.
    let codes = _mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(at.cast()) });
    _mm256_mul_ps(_mm256_cvtepi32_ps(codes), scale)
}

/// # Safety
///
/// `at` is writable for 8 elements.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn store_f16(at: *mut u8, v: __m256) {
    let narrow = _mm256_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(v);
    // SAFETY: 16 writable bytes.
    unsafe { _mm_storeu_si128(at.cast(), narrow) }
}

/// Rounds to nearest even in integers; a NaN may come out as anything, see [`super::super::Cpu::convert`].
///
/// # Safety
///
/// `at` is writable for 8 elements.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn store_bf16(at: *mut u8, v: __m256) {
    let bits = _mm256_castps_si256(v);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    let narrow = _mm256_srli_epi32::<16>(rounded);
    // Both halves pack into the lower 8 bytes of their 128-bit lane.
    let narrow = _mm256_packus_epi32(narrow, narrow);
    let narrow = _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(narrow));
    // SAFETY: 16 writable bytes.
    unsafe { _mm_storeu_si128(at.cast(), narrow) }
}

/// # Safety
///
/// `at` is writable for 8 elements.
#[target_feature(enable = "avx2,f16c")]
#[inline]
unsafe fn store_f32(at: *mut u8, v: __m256) {
    // SAFETY: 32 writable bytes.
    unsafe { _mm256_storeu_ps(at.cast(), v) }
}

/// Whether a lane, as an unsigned number below 2³¹, is at least `limit`.
#[target_feature(enable = "avx2")]
#[inline]
fn any_at_least(v: __m256i, limit: u32) -> bool {
    let below = _mm256_set1_epi32(limit.cast_signed() - 1);
    _mm256_movemask_epi8(_mm256_cmpgt_epi32(v, below)) != 0
}

/// The lanes of a line that fill no step.
macro_rules! tail {
    ($from:expr, $to:expr, $lines:expr,) => {
        scalar::convert($from, $to, $lines)
    };
    ($from:expr, $to:expr, $lines:expr, $scales:ident, $line:ident) => {
        scalar::convert_scaled($from, $to, $lines, &$scales[$line..=$line])
    };
}

macro_rules! conversion {
    ($name:ident, $load:ident, $from:expr, $store:ident, $to:expr) => {
        conversion!($name, $load(), $from, $store, $to,);
    };
    ($name:ident, $load:ident($($scale:ident)?), $from:expr, $store:ident, $to:expr, $($scales:ident)?) => {
        /// # Safety
        ///
        /// As for [`super::super::Cpu::convert`].
        #[target_feature(enable = "avx2,f16c")]
        unsafe fn $name(block: Lines $(, $scales: &[f32])?) -> bool {
            const FROM: usize = $from.bytes();
            const TO: usize = $to.bytes();
            let sign = _mm256_set1_epi32(0x7FFF_FFFF);
            let mut largest = _mm256_setzero_si256();
            let mut unusual = false;
            let body = block.lanes / STEP * STEP;
            for line in 0..block.lines {
                $(let $scale = _mm256_set1_ps($scales[line]);)?
                let at = line.cast_signed();
                // SAFETY: `line` stays inside the block, the steps inside the line.
                unsafe {
                    let src = block.src.offset(at * block.src_stride);
                    let dst = block.dst.offset(at * block.dst_stride);
                    for lane in (0..body).step_by(STEP) {
                        let v = $load(src.add(lane * FROM) $(, $scale)?);
                        let magnitude = _mm256_and_si256(_mm256_castps_si256(v), sign);
                        largest = _mm256_max_epu32(largest, magnitude);
                        $store(dst.add(lane * TO), v);
                    }
                    if body < block.lanes {
                        let tail = Lines {
                            src: src.add(body * FROM),
                            dst: dst.add(body * TO),
                            lines: 1,
                            lanes: block.lanes - body,
                            ..block
                        };
                        unusual |= tail!($from, $to, tail, $($scales, line)?);
                    }
                }
            }
            let limit = scalar::limit_bits($to);
            unusual || any_at_least(largest, limit)
        }
    };
}

conversion!(f16_to_bf16, load_f16, Elem::F16, store_bf16, Elem::BF16);
conversion!(f16_to_f32, load_f16, Elem::F16, store_f32, Elem::F32);
conversion!(bf16_to_f16, load_bf16, Elem::BF16, store_f16, Elem::F16);
conversion!(bf16_to_f32, load_bf16, Elem::BF16, store_f32, Elem::F32);
conversion!(f32_to_f16, load_f32, Elem::F32, store_f16, Elem::F16);
conversion!(f32_to_bf16, load_f32, Elem::F32, store_bf16, Elem::BF16);

conversion!(i8_to_f16, load_i8(scale), Elem::I8, store_f16, Elem::F16, scales);
conversion!(i8_to_bf16, load_i8(scale), Elem::I8, store_bf16, Elem::BF16, scales);
conversion!(i8_to_f32, load_i8(scale), Elem::I8, store_f32, Elem::F32, scales);

/// # Safety
///
/// As for [`super::super::Cpu::int8_decode`].
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn int8_decode(to: Elem, block: Lines, scales: &[f32]) -> bool {
    // SAFETY: the caller's promise is the body's.
    unsafe {
        match to {
            Elem::F16 => i8_to_f16(block, scales),
            Elem::BF16 => i8_to_bf16(block, scales),
            _ => i8_to_f32(block, scales),
        }
    }
}

/// # Safety
///
/// As for [`super::super::Cpu::convert`].
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn convert(from: Elem, to: Elem, block: Lines) -> bool {
    // SAFETY: the caller's promise is the body's.
    unsafe {
        match (from, to) {
            (Elem::F16, Elem::BF16) => f16_to_bf16(block),
            (Elem::F16, Elem::F32) => f16_to_f32(block),
            (Elem::BF16, Elem::F16) => bf16_to_f16(block),
            (Elem::BF16, Elem::F32) => bf16_to_f32(block),
            (Elem::F32, Elem::F16) => f32_to_f16(block),
            (Elem::F32, Elem::BF16) => f32_to_bf16(block),
            _ => scalar::convert(from, to, block),
        }
    }
}

/// Two 16-byte pieces, `apart` lines between them, side by side.
#[target_feature(enable = "avx2")]
#[inline]
fn load_pieces<const ROWS: usize>(g: &Gathered<ROWS>, first: usize, apart: usize, piece: usize) -> __m256i {
    let at = |n: usize| g.0[first + n * apart][piece * 16..][..16].as_ptr().cast();
    // SAFETY: each slice above has 16 readable bytes.
    unsafe {
        let v = _mm256_castsi128_si256(_mm_loadu_si128(at(0)));
        _mm256_inserti128_si256::<1>(v, _mm_loadu_si128(at(1)))
    }
}

macro_rules! transpose {
    ($name:ident, $bytes:literal, $low:ident, $high:ident, $rounds:tt, [$($n:literal)*]) => {
        /// # Safety
        ///
        /// As for [`super::super::Cpu::transpose`].
        #[target_feature(enable = "avx2")]
        unsafe fn $name(m: Matrix) {
            /// Elements of a 16-byte piece: pieces are square blocks, two side by side in a register.
            const SIDE: usize = 16 / $bytes;
            let tile = |g: &Gathered<{ 2 * SIDE }>, dst: *mut u8, stride: isize| {
                for piece in 0..4 {
                    let v = rounds!($rounds, [$(load_pieces(g, 2 * $n, SIDE, piece), load_pieces(g, 2 * $n + 1, SIDE, piece)),*], |v| [$($low(v[$n], v[$n + SIDE / 2]), $high(v[$n], v[$n + SIDE / 2])),*]);
                    let line = |c: usize| dst.wrapping_offset((piece * SIDE + c).cast_signed() * stride).cast();
                    // SAFETY: `walk` gives a destination of 64 / $bytes lines of 32 bytes.
                    unsafe {
                        $(_mm256_storeu_si256(line(2 * $n), v[2 * $n]);
                        _mm256_storeu_si256(line(2 * $n + 1), v[2 * $n + 1]);)*
                    }
                }
            };
            // SAFETY: the caller's promise; `tile` writes the lines it is told to.
            unsafe { walk::<{ 2 * SIDE }, $bytes>(m, tile) }
        }
    };
}

transpose!(transpose_1, 1, _mm256_unpacklo_epi8, _mm256_unpackhi_epi8, [+ + + +], [0 1 2 3 4 5 6 7]);
transpose!(transpose_2, 2, _mm256_unpacklo_epi16, _mm256_unpackhi_epi16, [+ + +], [0 1 2 3]);
transpose!(transpose_4, 4, _mm256_unpacklo_epi32, _mm256_unpackhi_epi32, [+ +], [0 1]);
transpose!(transpose_8, 8, _mm256_unpacklo_epi64, _mm256_unpackhi_epi64, [+], [0]);

/// # Safety
///
/// As for [`super::super::Cpu::transpose`].
#[target_feature(enable = "avx2")]
pub(super) unsafe fn transpose(bytes: usize, m: Matrix) {
    // SAFETY: the caller's promise is the body's.
    unsafe {
        match bytes {
            1 => transpose_1(m),
            2 => transpose_2(m),
            4 => transpose_4(m),
            8 => transpose_8(m),
            other => unreachable!("no element has {other} bytes"),
        }
    }
}

/// See [`super::super::Cpu::range`].
#[target_feature(enable = "avx2")]
pub(crate) fn range(values: &[f32]) -> (f32, f32) {
    let (chunks, tail) = values.as_chunks::<8>();
    let mut min = _mm256_set1_ps(f32::INFINITY);
    let mut max = _mm256_set1_ps(f32::NEG_INFINITY);
    for chunk in chunks {
        // SAFETY: `chunk` is 32 readable bytes.
        let v = unsafe { _mm256_loadu_ps(chunk.as_ptr()) };
        // Of a NaN and a number, the second operand is taken.
        min = _mm256_min_ps(v, min);
        max = _mm256_max_ps(v, max);
    }
    let rest = scalar::range(tail);
    let swap = |v| _mm256_permute2f128_ps::<1>(v, v);
    let (mut min, mut max) = (_mm256_min_ps(min, swap(min)), _mm256_max_ps(max, swap(max)));
    min = _mm256_min_ps(min, _mm256_permute_ps::<0b01_00_11_10>(min));
    max = _mm256_max_ps(max, _mm256_permute_ps::<0b01_00_11_10>(max));
    min = _mm256_min_ps(min, _mm256_permute_ps::<0b10_11_00_01>(min));
    max = _mm256_max_ps(max, _mm256_permute_ps::<0b10_11_00_01>(max));
    (_mm256_cvtss_f32(min).min(rest.0), _mm256_cvtss_f32(max).max(rest.1))
}

super::super::shared_bodies!(#[target_feature(enable = "avx2,fma")]);
