//! 128-bit bodies.

use std::arch::aarch64::*;

use super::super::scalar;
use super::super::tile::{Gathered, rounds, walk};
use super::super::{Lines, Matrix};
use crate::Elem;

/// Elements of one step of a conversion.
const STEP: usize = 8;

/// Eight floats.
type Eight = [float32x4_t; 2];

/// # Safety
///
/// `at` is readable for 8 elements.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn load_f16(at: *const u8) -> Eight {
    // SAFETY: 16 readable bytes.
    let v = vreinterpretq_u16_u8(unsafe { vld1q_u8(at) });
    [
        vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(v))),
        vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(v))),
    ]
}

/// # Safety
///
/// `at` is readable for 8 elements.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn load_bf16(at: *const u8) -> Eight {
    // SAFETY: 16 readable bytes.
    let v = vreinterpretq_u16_u8(unsafe { vld1q_u8(at) });
    [
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(v))),
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(v))),
    ]
}

/// # Safety
///
/// `at` is readable for 8 elements.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn load_f32(at: *const u8) -> Eight {
    // SAFETY: 32 readable bytes.
    unsafe { [vreinterpretq_f32_u8(vld1q_u8(at)), vreinterpretq_f32_u8(vld1q_u8(at.add(16)))] }
}

/// # Safety
///
/// `at` is readable for 8 codes.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn load_i8(at: *const u8, scale: float32x4_t) -> Eight {
    // SAFETY: 8 readable bytes.
    let v = vmovl_s8(vreinterpret_s8_u8(unsafe { vld1_u8(at) }));
    [vmovl_s16(vget_low_s16(v)), vmovl_s16(vget_high_s16(v))].map(|v| vmulq_f32(vcvtq_f32_s32(v), scale))
}

/// # Safety
///
/// `at` is writable for 8 elements.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn store_f16(at: *mut u8, v: Eight) {
    let [low, high] = v.map(|v| vreinterpret_u16_f16(vcvt_f16_f32(v)));
    // SAFETY: 16 writable bytes.
    unsafe { vst1q_u8(at, vreinterpretq_u8_u16(vcombine_u16(low, high))) }
}

/// Rounds to nearest even in integers; a NaN may come out as anything, see [`super::super::Cpu::convert`].
///
/// # Safety
///
/// `at` is writable for 8 elements.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn store_bf16(at: *mut u8, v: Eight) {
    let [low, high] = v.map(|v| {
        let bits = vreinterpretq_u32_f32(v);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        vshrn_n_u32::<16>(vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd))
    });
    // SAFETY: 16 writable bytes.
    unsafe { vst1q_u8(at, vreinterpretq_u8_u16(vcombine_u16(low, high))) }
}

/// # Safety
///
/// `at` is writable for 8 elements.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn store_f32(at: *mut u8, v: Eight) {
    // SAFETY: 32 writable bytes.
    unsafe {
        vst1q_u8(at, vreinterpretq_u8_f32(v[0]));
        vst1q_u8(at.add(16), vreinterpretq_u8_f32(v[1]));
    }
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
        #[target_feature(enable = "neon")]
        unsafe fn $name(block: Lines $(, $scales: &[f32])?) -> bool {
            const FROM: usize = $from.bytes();
            const TO: usize = $to.bytes();
            let mut largest = vdupq_n_u32(0);
            let mut unusual = false;
            let body = block.lanes / STEP * STEP;
            for line in 0..block.lines {
                $(let $scale = vdupq_n_f32($scales[line]);)?
                let at = line.cast_signed();
                // SAFETY: `line` stays inside the block, the steps inside the line.
                unsafe {
                    let src = block.src.offset(at * block.src_stride);
                    let dst = block.dst.offset(at * block.dst_stride);
                    for lane in (0..body).step_by(STEP) {
                        let v = $load(src.add(lane * FROM) $(, $scale)?);
                        for half in v {
                            let magnitude = vreinterpretq_u32_f32(vabsq_f32(half));
                            largest = vmaxq_u32(largest, magnitude);
                        }
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
            unusual || vmaxvq_u32(largest) >= limit
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
#[target_feature(enable = "neon")]
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
#[target_feature(enable = "neon")]
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

macro_rules! transpose {
    ($name:ident, $bytes:literal, $cast:ident, $back:ident, $low:ident, $high:ident, $rounds:tt, [$($n:literal)*]) => {
        /// # Safety
        ///
        /// As for [`super::super::Cpu::transpose`].
        #[target_feature(enable = "neon")]
        unsafe fn $name(m: Matrix) {
            /// Elements of a 16-byte piece: pieces are square blocks.
            const SIDE: usize = 16 / $bytes;
            let tile = |g: &Gathered<SIDE>, dst: *mut u8, stride: isize| {
                for piece in 0..4 {
                    // SAFETY: the slice has 16 readable bytes.
                    let load = |r: usize| $cast(unsafe { vld1q_u8(g.0[r][piece * 16..][..16].as_ptr()) });
                    let v = rounds!($rounds, [$(load(2 * $n), load(2 * $n + 1)),*], |v| [$($low(v[$n], v[$n + SIDE / 2]), $high(v[$n], v[$n + SIDE / 2])),*]);
                    let line = |c: usize| dst.wrapping_offset((piece * SIDE + c).cast_signed() * stride);
                    // SAFETY: `walk` gives a destination of 64 / $bytes lines of 16 bytes.
                    unsafe {
                        $(vst1q_u8(line(2 * $n), $back(v[2 * $n]));
                        vst1q_u8(line(2 * $n + 1), $back(v[2 * $n + 1]));)*
                    }
                }
            };
            // SAFETY: the caller's promise; `tile` writes the lines it is told to.
            unsafe { walk::<SIDE, $bytes>(m, tile) }
        }
    };
}

/// The identity, where a cast is asked for.
fn same(v: uint8x16_t) -> uint8x16_t {
    v
}

transpose!(transpose_1, 1, same, same, vzip1q_u8, vzip2q_u8, [+ + + +], [0 1 2 3 4 5 6 7]);
transpose!(transpose_2, 2, vreinterpretq_u16_u8, vreinterpretq_u8_u16, vzip1q_u16, vzip2q_u16, [+ + +], [0 1 2 3]);
transpose!(transpose_4, 4, vreinterpretq_u32_u8, vreinterpretq_u8_u32, vzip1q_u32, vzip2q_u32, [+ +], [0 1]);
transpose!(transpose_8, 8, vreinterpretq_u64_u8, vreinterpretq_u8_u64, vzip1q_u64, vzip2q_u64, [+], [0]);

/// # Safety
///
/// As for [`super::super::Cpu::transpose`].
#[target_feature(enable = "neon")]
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
#[target_feature(enable = "neon")]
pub(crate) fn range(values: &[f32]) -> (f32, f32) {
    let (chunks, tail) = values.as_chunks::<4>();
    let (mut min, mut max) = (vdupq_n_f32(f32::INFINITY), vdupq_n_f32(f32::NEG_INFINITY));
    for chunk in chunks {
        // SAFETY: `chunk` is 16 readable bytes.
        let v = unsafe { vld1q_f32(chunk.as_ptr()) };
        // Of a NaN and a number, these take the number.
        min = vminnmq_f32(v, min);
        max = vmaxnmq_f32(v, max);
    }
    let rest = scalar::range(tail);
    (vminnmvq_f32(min).min(rest.0), vmaxnmvq_f32(max).max(rest.1))
}

super::super::shared_bodies!(#[target_feature(enable = "neon")]);
