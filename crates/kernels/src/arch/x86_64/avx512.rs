//! 512-bit bodies.

use std::arch::x86_64::*;

use super::super::scalar;
use super::super::tile::{Gathered, rounds, walk};
use super::super::{Lines, Matrix};
use crate::Elem;

/// Elements of one step of a conversion: whole cache lines are written, which then need not be read first.
const STEP: usize = 32;

/// Stores a cache line, past the caches if `STREAM`.
///
/// # Safety
///
/// 64 bytes are writable at `at`, which is a multiple of 64 if `STREAM`.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn store_line<const STREAM: bool>(at: *mut u8, line: __m512i) {
    // SAFETY: the caller's promise.
    unsafe {
        if STREAM { _mm512_stream_si512(at.cast(), line) } else { _mm512_storeu_si512(at.cast(), line) }
    }
}

/// # Safety
///
/// `at` is readable for 16 elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
#[inline]
unsafe fn load_f16(at: *const u8) -> __m512 {
    // SAFETY: 32 readable bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(at.cast()) })
}

/// # Safety
///
/// `at` is readable for 16 elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
#[inline]
unsafe fn load_bf16(at: *const u8) -> __m512 {
    // SAFETY: 32 readable bytes.
    let upper = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(at.cast()) });
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper))
}

/// # Safety
///
/// `at` is readable for 16 elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
#[inline]
unsafe fn load_f32(at: *const u8) -> __m512 {
    // SAFETY: 64 readable bytes.
    unsafe { _mm512_loadu_ps(at.cast()) }
}

/// # Safety
///
/// `at` is readable for 16 codes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
#[inline]
unsafe fn load_i8(at: *const u8, scale: __m512) -> __m512 {
    // SAFETY: 16 readable bytes.
    let codes = _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(at.cast()) });
    _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale)
}

/// # Safety
///
/// `at` is writable for 32 elements, and a multiple of 64 if `STREAM`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
#[inline]
unsafe fn store_f16<const STREAM: bool>(at: *mut u8, low: __m512, high: __m512) {
    let low = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(low);
    let high = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT }>(high);
    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    // SAFETY: 64 writable bytes.
    unsafe { store_line::<STREAM>(at, both) }
}

/// Rounds to nearest even in integers; a NaN may come out as anything, see [`super::super::Cpu::convert`].
///
/// # Safety
///
/// `at` is writable for 32 elements, and a multiple of 64 if `STREAM`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
#[inline]
unsafe fn store_bf16<const STREAM: bool>(at: *mut u8, low: __m512, high: __m512) {
    let [low, high] = [low, high].map(|v| {
        let bits = _mm512_castps_si512(v);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd)
    });
    // The upper halves, in the order of the lanes.
    let (low, high) = (_mm512_srli_epi32::<16>(low), _mm512_srli_epi32::<16>(high));
    let both = _mm512_packus_epi32(low, high);
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    let both = _mm512_permutexvar_epi64(order, both);
    // SAFETY: 64 writable bytes.
    unsafe { store_line::<STREAM>(at, both) }
}

/// The instruction takes subnormal numbers for zero: right for floats that come from f16 alone, none of which is
/// subnormal in f32 or bf16.
///
/// # Safety
///
/// `at` is writable for 32 elements, and a multiple of 64 if `STREAM`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c,avx512bf16")]
#[inline]
unsafe fn store_bf16_of_f16<const STREAM: bool>(at: *mut u8, low: __m512, high: __m512) {
    let both = _mm512_cvtne2ps_pbh(high, low);
    // SAFETY: 64 writable bytes; both types are 512 bits without a meaning of their own.
    unsafe { store_line::<STREAM>(at, std::mem::transmute::<__m512bh, __m512i>(both)) }
}

/// # Safety
///
/// `at` is writable for 32 elements, and a multiple of 64 if `STREAM`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
#[inline]
unsafe fn store_f32<const STREAM: bool>(at: *mut u8, low: __m512, high: __m512) {
    // SAFETY: 128 writable bytes.
    unsafe {
        store_line::<STREAM>(at, _mm512_castps_si512(low));
        store_line::<STREAM>(at.add(64), _mm512_castps_si512(high));
    }
}

/// Where a line's second step starts: at the first whole cache line of the destination, or one step on.
fn second_step(dst: *mut u8, bytes: usize) -> usize {
    let skip = dst.addr().next_multiple_of(64) - dst.addr();
    if skip == 0 || !skip.is_multiple_of(bytes) { STEP } else { skip / bytes }
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
    ($(#[$features:meta])* $name:ident, $load:ident, $from:expr, $store:ident, $to:expr) => {
        conversion!($(#[$features])* $name, $load(), $from, $store, $to,);
    };
    ($(#[$features:meta])* $name:ident, $load:ident($($scale:ident)?), $from:expr, $store:ident, $to:expr, $($scales:ident)?) => {
        /// # Safety
        ///
        /// As for [`super::super::Cpu::convert`].
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
        $(#[$features])*
        pub(super) unsafe fn $name<const STREAM: bool>(block: Lines $(, $scales: &[f32])?) -> bool {
            const FROM: usize = $from.bytes();
            const TO: usize = $to.bytes();
            let sign = _mm512_set1_epi32(0x7FFF_FFFF);
            let mut largest = _mm512_setzero_si512();
            let mut unusual = false;
            for line in 0..block.lines {
                $(let $scale = _mm512_set1_ps($scales[line]);)?
                let at = line.cast_signed();
                // SAFETY: `line` stays inside the block, the steps inside the line.
                unsafe {
                    let src = block.src.offset(at * block.src_stride);
                    let dst = block.dst.offset(at * block.dst_stride);
                    let mut step = |lane: usize, stream: bool| {
                        let (low, high) = ($load(src.add(lane * FROM) $(, $scale)?), $load(src.add((lane + 16) * FROM) $(, $scale)?));
                        for v in [low, high] {
                            let magnitude = _mm512_and_si512(_mm512_castps_si512(v), sign);
                            largest = _mm512_max_epu32(largest, magnitude);
                        }
                        let to = dst.add(lane * TO);
                        if stream { $store::<true>(to, low, high) } else { $store::<false>(to, low, high) }
                    };
                    if block.lanes < STEP {
                        let short = Lines { src, dst, lines: 1, ..block };
                        unusual |= tail!($from, $to, short, $($scales, line)?);
                        continue;
                    }
                    // The first and the last step may do some elements twice. The steps between write whole cache lines,
                    // unless elements lie across them.
                    let mut lane = second_step(dst, TO);
                    let stream = STREAM && dst.add(lane * TO).addr().is_multiple_of(64);
                    step(0, stream && lane == STEP);
                    while lane + STEP <= block.lanes {
                        step(lane, stream);
                        lane += STEP;
                    }
                    if lane < block.lanes {
                        step(block.lanes - STEP, false);
                    }
                }
            }
            let limit = scalar::limit_bits($to);
            unusual || _mm512_reduce_max_epu32(largest) >= limit
        }
    };
}

conversion!(
    #[target_feature(enable = "avx512bf16")]
    f16_to_bf16_directly,
    load_f16,
    Elem::F16,
    store_bf16_of_f16,
    Elem::BF16
);
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(crate) unsafe fn int8_decode(to: Elem, block: Lines, scales: &[f32]) -> bool {
    // SAFETY: the caller's promise is the body's.
    unsafe {
        match (to, block.stream) {
            (Elem::F16, false) => i8_to_f16::<false>(block, scales),
            (Elem::F16, true) => i8_to_f16::<true>(block, scales),
            (Elem::BF16, false) => i8_to_bf16::<false>(block, scales),
            (Elem::BF16, true) => i8_to_bf16::<true>(block, scales),
            (_, false) => i8_to_f32::<false>(block, scales),
            (_, true) => i8_to_f32::<true>(block, scales),
        }
    }
}

/// # Safety
///
/// As for [`super::super::Cpu::convert`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
pub(super) unsafe fn convert(from: Elem, to: Elem, block: Lines) -> bool {
    // SAFETY: the caller's promise is the body's.
    unsafe {
        match (from, to, block.stream) {
            (Elem::F16, Elem::BF16, false) => f16_to_bf16::<false>(block),
            (Elem::F16, Elem::BF16, true) => f16_to_bf16::<true>(block),
            (Elem::F16, Elem::F32, false) => f16_to_f32::<false>(block),
            (Elem::F16, Elem::F32, true) => f16_to_f32::<true>(block),
            (Elem::BF16, Elem::F16, false) => bf16_to_f16::<false>(block),
            (Elem::BF16, Elem::F16, true) => bf16_to_f16::<true>(block),
            (Elem::BF16, Elem::F32, false) => bf16_to_f32::<false>(block),
            (Elem::BF16, Elem::F32, true) => bf16_to_f32::<true>(block),
            (Elem::F32, Elem::F16, false) => f32_to_f16::<false>(block),
            (Elem::F32, Elem::F16, true) => f32_to_f16::<true>(block),
            (Elem::F32, Elem::BF16, false) => f32_to_bf16::<false>(block),
            (Elem::F32, Elem::BF16, true) => f32_to_bf16::<true>(block),
            _ => scalar::convert(from, to, block),
        }
    }
}

/// [`super::super::Cpu::copy_lines`] with whole cache lines written past the caches.
///
/// # Safety
///
/// As there.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn stream_lines(block: Lines) {
    for line in 0..block.lines.cast_signed() {
        // SAFETY: the line lies inside the block; what is streamed starts at a multiple of 64 bytes.
        unsafe {
            let src = block.src.offset(line * block.src_stride);
            let dst = block.dst.offset(line * block.dst_stride);
            let head = (dst.addr().next_multiple_of(64) - dst.addr()).min(block.lanes);
            let end = head + (block.lanes - head) / 64 * 64;
            // Most lines have neither head nor tail, and are short: a call for nothing would cost as much as the line.
            if head > 0 {
                dst.copy_from_nonoverlapping(src, head);
            }
            for at in (head..end).step_by(64) {
                store_line::<true>(dst.add(at), _mm512_loadu_si512(src.add(at).cast()));
            }
            if end < block.lanes {
                dst.add(end).copy_from_nonoverlapping(src.add(end), block.lanes - end);
            }
        }
    }
}

/// Four 16-byte pieces, `apart` lines between them, side by side.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[inline]
fn load_pieces<const ROWS: usize>(g: &Gathered<ROWS>, first: usize, apart: usize, piece: usize) -> __m512i {
    let at = |n: usize| g.0[first + n * apart][piece * 16..][..16].as_ptr().cast();
    // SAFETY: each slice above has 16 readable bytes.
    unsafe {
        let v = _mm512_castsi128_si512(_mm_loadu_si128(at(0)));
        let v = _mm512_inserti32x4::<1>(v, _mm_loadu_si128(at(1)));
        let v = _mm512_inserti32x4::<2>(v, _mm_loadu_si128(at(2)));
        _mm512_inserti32x4::<3>(v, _mm_loadu_si128(at(3)))
    }
}

macro_rules! transpose {
    ($name:ident, $bytes:literal, $low:ident, $high:ident, $rounds:tt, [$($n:literal)*]) => {
        /// # Safety
        ///
        /// As for [`super::super::Cpu::transpose`]; lines of the destination are whole cache lines if `STREAM`.
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn $name<const STREAM: bool>(m: Matrix) {
            /// Elements of a 16-byte piece: pieces are square blocks, four side by side in a register.
            const SIDE: usize = 16 / $bytes;
            let tile = |g: &Gathered<{ 4 * SIDE }>, dst: *mut u8, stride: isize| {
                for piece in 0..4 {
                    let v = rounds!($rounds, [$(load_pieces(g, 2 * $n, SIDE, piece), load_pieces(g, 2 * $n + 1, SIDE, piece)),*], |v| [$($low(v[$n], v[$n + SIDE / 2]), $high(v[$n], v[$n + SIDE / 2])),*]);
                    let line = |c: usize| dst.wrapping_offset((piece * SIDE + c).cast_signed() * stride);
                    // SAFETY: `walk` gives a destination of 64 / $bytes lines of 64 bytes. A tile starts at a multiple of
                    // 64 bytes from the start of a line of the matrix, or in a buffer whose lines are cache lines.
                    unsafe {
                        $(store_line::<STREAM>(line(2 * $n), v[2 * $n]);
                        store_line::<STREAM>(line(2 * $n + 1), v[2 * $n + 1]);)*
                    }
                }
            };
            // SAFETY: the caller's promise; `tile` writes the lines it is told to.
            unsafe { walk::<{ 4 * SIDE }, $bytes>(m, tile) }
        }
    };
}

transpose!(transpose_1, 1, _mm512_unpacklo_epi8, _mm512_unpackhi_epi8, [+ + + +], [0 1 2 3 4 5 6 7]);
transpose!(transpose_2, 2, _mm512_unpacklo_epi16, _mm512_unpackhi_epi16, [+ + +], [0 1 2 3]);
transpose!(transpose_4, 4, _mm512_unpacklo_epi32, _mm512_unpackhi_epi32, [+ +], [0 1]);
transpose!(transpose_8, 8, _mm512_unpacklo_epi64, _mm512_unpackhi_epi64, [+], [0]);

/// # Safety
///
/// As for [`super::super::Cpu::transpose`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn transpose(bytes: usize, m: Matrix) {
    let stream =
        m.stream && m.dst.addr().is_multiple_of(64) && m.dst_stride.unsigned_abs().is_multiple_of(64);
    // SAFETY: the caller's promise is the body's; what streaming needs was just checked.
    unsafe {
        match (bytes, stream) {
            (1, false) => transpose_1::<false>(m),
            (1, true) => transpose_1::<true>(m),
            (2, false) => transpose_2::<false>(m),
            (2, true) => transpose_2::<true>(m),
            (4, false) => transpose_4::<false>(m),
            (4, true) => transpose_4::<true>(m),
            (8, false) => transpose_8::<false>(m),
            (8, true) => transpose_8::<true>(m),
            (other, _) => unreachable!("no element has {other} bytes"),
        }
    }
}

/// See [`super::super::Cpu::range`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(crate) fn range(values: &[f32]) -> (f32, f32) {
    let (chunks, tail) = values.as_chunks::<16>();
    let mut min = _mm512_set1_ps(f32::INFINITY);
    let mut max = _mm512_set1_ps(f32::NEG_INFINITY);
    for chunk in chunks {
        // SAFETY: `chunk` is 64 readable bytes.
        let v = unsafe { _mm512_loadu_ps(chunk.as_ptr()) };
        // Of a NaN and a number, the second operand is taken.
        min = _mm512_min_ps(v, min);
        max = _mm512_max_ps(v, max);
    }
    let rest = scalar::range(tail);
    (_mm512_reduce_min_ps(min).min(rest.0), _mm512_reduce_max_ps(max).max(rest.1))
}

super::super::shared_bodies!(#[target_feature(enable = "avx512f,avx512bw,avx512vl")]);
