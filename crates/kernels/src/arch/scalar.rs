//! Bodies that run on every CPU.

use half::{bf16, f16};

use super::{Lines, Matrix};
use crate::Elem;
use crate::affine::definition;

/// Reads one float of encoding `elem`.
///
/// # Safety
///
/// `at` is readable for one element.
pub(crate) unsafe fn read(elem: Elem, at: *const u8) -> f32 {
    // SAFETY: `at` is readable for the element's size, and every bit pattern is a value.
    unsafe {
        match elem {
            Elem::F16 => at.cast::<f16>().read_unaligned().to_f32(),
            Elem::BF16 => at.cast::<bf16>().read_unaligned().to_f32(),
            Elem::F32 => at.cast::<f32>().read_unaligned(),
            other => unreachable!("{other:?} is not a float"),
        }
    }
}

/// Writes one float in encoding `elem`, rounded to nearest, ties to even.
///
/// # Safety
///
/// `at` is writable for one element.
pub(crate) unsafe fn write(elem: Elem, at: *mut u8, value: f32) {
    // SAFETY: `at` is writable for the element's size.
    unsafe {
        match elem {
            Elem::F16 => at.cast::<f16>().write_unaligned(f16::from_f32(value)),
            Elem::BF16 => at.cast::<bf16>().write_unaligned(bf16::from_f32(value)),
            Elem::F32 => at.cast::<f32>().write_unaligned(value),
            other => unreachable!("{other:?} is not a float"),
        }
    }
}

/// Bits of the smallest positive f32 that `elem` cannot write as a finite value.
pub(crate) const fn limit_bits(elem: Elem) -> u32 {
    match elem {
        // 65520, halfway between the largest f16 and the next power of two: the tie goes up, to infinity.
        Elem::F16 => 0x477F_F000,
        // Halfway between the largest bf16 and infinity, likewise.
        Elem::BF16 => 0x7F7F_8000,
        _ => 0x7F80_0000,
    }
}

/// # Safety
///
/// As for [`super::Cpu::convert`].
pub(super) unsafe fn convert(from: Elem, to: Elem, block: Lines) -> bool {
    // SAFETY: the caller's promise is the same.
    unsafe { convert_scaled(from, to, block, &[]) }
}

/// [`convert`], where `from` may also be [`Elem::I8`], codes that `scales` has a factor for in every line.
///
/// # Safety
///
/// As for [`super::Cpu::convert`].
pub(super) unsafe fn convert_scaled(from: Elem, to: Elem, block: Lines, scales: &[f32]) -> bool {
    let limit = limit_bits(to);
    let mut unusual = false;
    for line in 0..block.lines {
        let scale = scales.get(line).copied().unwrap_or(1.0);
        let line = line.cast_signed();
        for lane in 0..block.lanes.cast_signed() {
            // SAFETY: `line` and `lane` stay inside the block.
            unsafe {
                let src = block.src.offset(line * block.src_stride + lane * from.bytes().cast_signed());
                let dst = block.dst.offset(line * block.dst_stride + lane * to.bytes().cast_signed());
                let value = match from {
                    Elem::I8 => f32::from(src.cast::<i8>().read()) * scale,
                    float => read(float, src),
                };
                write(to, dst, value);
                unusual |= value.to_bits() & 0x7FFF_FFFF >= limit;
            }
        }
    }
    unusual
}

/// # Safety
///
/// As for [`super::Cpu::copy_lines`].
pub(super) unsafe fn copy_lines(block: Lines) {
    for line in 0..block.lines.cast_signed() {
        // SAFETY: the line lies inside the block.
        unsafe {
            let src = block.src.offset(line * block.src_stride);
            let dst = block.dst.offset(line * block.dst_stride);
            dst.copy_from_nonoverlapping(src, block.lanes);
        }
    }
}

/// # Safety
///
/// As for [`super::Cpu::transpose`].
pub(super) unsafe fn transpose(bytes: usize, m: Matrix) {
    // SAFETY: the caller's promise is the body's.
    unsafe {
        match bytes {
            1 => transpose_as::<u8>(m),
            2 => transpose_as::<u16>(m),
            4 => transpose_as::<u32>(m),
            8 => transpose_as::<u64>(m),
            other => unreachable!("no element has {other} bytes"),
        }
    }
}

/// # Safety
///
/// As for [`super::Cpu::transpose`], elements of `T`'s size.
unsafe fn transpose_as<T>(m: Matrix) {
    // Columns in strips, so that the destination lines in use stay in the cache.
    const STRIP: usize = 16;
    for strip in (0..m.cols).step_by(STRIP) {
        for row in 0..m.rows {
            for col in strip..m.cols.min(strip + STRIP) {
                // SAFETY: `row` and `col` stay inside the matrix.
                unsafe {
                    let src = m.src.offset(row.cast_signed() * m.src_stride).cast::<T>().add(col);
                    let dst = m.dst.offset(col.cast_signed() * m.dst_stride).cast::<T>().add(row);
                    dst.write_unaligned(src.read_unaligned());
                }
            }
        }
    }
}

/// See [`super::Cpu::affine_encode`]: the definition itself.
pub(crate) fn affine_encode(
    group: usize,
    bits: u32,
    values: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
    biases: &mut [f32],
) {
    let groups = values.chunks_exact(group).zip(codes.chunks_exact_mut(group));
    for ((values, codes), (scale, bias)) in groups.zip(scales.iter_mut().zip(biases)) {
        (*scale, *bias) = definition::encode(bits, values, codes);
    }
}

pub(crate) use crate::affine::body::{scale as affine_scale, shift as affine_shift};
pub(crate) use crate::int8::body::encode as int8_encode;

/// See [`super::Cpu::range`].
pub(crate) fn range(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(min, max), &value| {
        (if value < min { value } else { min }, if value > max { value } else { max })
    })
}
