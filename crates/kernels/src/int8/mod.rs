//! Symmetric int8: signed codes and one scale for the lanes of a row.
//!
//! `value = code · scale`, rounded once to the target's encoding. Coding takes scale = max|value| / 127, at least
//! [`SMALLEST_SCALE`], and divides by the scale as it is stored, so that a decoded value is within half a step of the
//! original whatever the scale's encoding.

pub(crate) mod body;

use crate::arch::scalar::{read, write};
use crate::arch::{Cpu, Lines};
use crate::{Elem, OnOverflow, Tally};

/// Codes run from -127 to 127.
const LARGEST_CODE: f32 = 127.0;

/// The floor of a scale, which keeps rows of zeros from dividing by zero.
const SMALLEST_SCALE: f32 = 1e-6;

/// Lanes that are coded at once: the buffers of a piece stay in the nearest cache.
const PIECE: usize = 1024;

/// Which lanes share a scale.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ScalePer {
    /// The lanes of one head of one row.
    HeadRow,
    /// The lanes of all heads of a row.
    Row,
}

/// Codes, scales and values of a box `[head, row, lane]`.
///
/// Strides are in bytes. The lanes of a row lie side by side among the codes and among the values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Int8Rows {
    /// Elements along each axis. A zero makes the box empty.
    pub extents: [usize; 3],
    /// Bytes between neighbouring heads and between neighbouring rows of codes.
    pub code_strides: [isize; 2],
    /// Bytes between the scales of neighbouring heads and of neighbouring rows. With [`ScalePer::Row`] the first is unread.
    pub scale_strides: [isize; 2],
    /// Bytes between neighbouring heads and between neighbouring rows of values.
    pub value_strides: [isize; 2],
    /// Which lanes share a scale.
    pub per: ScalePer,
    /// Encoding of the scales: a float.
    pub scale: Elem,
    /// Encoding of the values: a float.
    pub value: Elem,
}

/// Bytes from a start to the given head and row.
fn at(strides: [isize; 2], head: usize, row: usize) -> isize {
    head.cast_signed() * strides[0] + row.cast_signed() * strides[1]
}

impl Int8Rows {
    fn check(&self) {
        assert!(self.scale.is_float(), "a scale is a float, not {:?}", self.scale);
        assert!(self.value.is_float(), "int8 codes stand for floats, not {:?}", self.value);
    }

    fn scale_at(&self, head: usize, row: usize) -> isize {
        match self.per {
            ScalePer::HeadRow => at(self.scale_strides, head, row),
            ScalePer::Row => at(self.scale_strides, 0, row),
        }
    }
}

/// Turns codes into values.
///
/// `policy` and `tally` are those of [`move_box`](crate::move_box), with `code · scale` as the source value.
///
/// # Safety
///
/// `codes` and `scales` are readable and `values` writable over the box; the values overlap neither, nor each other, and
/// nothing else touches them meanwhile.
///
/// # Panics
///
/// When `rows.scale` or `rows.value` is not a float.
pub unsafe fn int8_decode(
    rows: &Int8Rows,
    codes: *const i8,
    scales: *const u8,
    values: *mut u8,
    policy: OnOverflow,
    tally: &mut Tally,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { decode_on(Cpu::best(), rows, codes, scales, values, policy, tally) }
}

/// Turns finite values into codes and scales.
///
/// `tally` counts NaN (coded as -127), infinity (its row's scale is then infinite too), and as an overflow at lane 0 a
/// scale that is too large for its encoding.
///
/// # Safety
///
/// `values` are readable and `codes` and `scales` writable over the box; the three do not overlap, nor do the rows of one
/// of the written ones, and nothing else touches them meanwhile.
///
/// # Panics
///
/// As [`int8_decode`].
pub unsafe fn int8_encode(
    rows: &Int8Rows,
    values: *const u8,
    codes: *mut i8,
    scales: *mut u8,
    tally: &mut Tally,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { encode_on(Cpu::best(), rows, values, codes, scales, tally) }
}

/// # Safety
///
/// As for [`int8_decode`].
unsafe fn decode_on(
    cpu: Cpu,
    rows: &Int8Rows,
    codes: *const i8,
    scales: *const u8,
    values: *mut u8,
    policy: OnOverflow,
    tally: &mut Tally,
) {
    rows.check();
    let mut wide = [0_f32; PIECE];
    let bytes = rows.value.bytes();
    for head in 0..rows.extents[0] {
        for row in 0..rows.extents[1] {
            // SAFETY: `head` and `row` lie inside the box.
            let scale = unsafe { read(rows.scale, scales.offset(rows.scale_at(head, row))) };
            for start in (0..rows.extents[2]).step_by(PIECE) {
                let lanes = PIECE.min(rows.extents[2] - start);
                let wide = &mut wide[..lanes];
                // SAFETY: the piece lies inside the row.
                let (codes, values) = unsafe {
                    (
                        std::slice::from_raw_parts(
                            codes.offset(at(rows.code_strides, head, row)).add(start),
                            lanes,
                        ),
                        values.offset(at(rows.value_strides, head, row)).add(start * bytes),
                    )
                };
                cpu.int8_decode(codes, scale, wide);
                // SAFETY: `values` is writable for `lanes` elements.
                unsafe {
                    if to_elem(cpu, rows.value, wide, values) {
                        let line = crate::BoxMove {
                            extents: [1, 1, lanes],
                            src_strides: [0, 0, 4],
                            dst_strides: [0, 0, bytes.cast_signed()],
                            src: Elem::F32,
                            dst: rows.value,
                        };
                        let mut counts = Tally::default();
                        crate::boxes::settle(&line, wide.as_ptr().cast(), values, policy, &mut counts);
                        tally.merge(&counts.offset_by([head, row, start]));
                    }
                }
            }
        }
    }
}

/// # Safety
///
/// As for [`int8_encode`].
unsafe fn encode_on(
    cpu: Cpu,
    rows: &Int8Rows,
    values: *const u8,
    codes: *mut i8,
    scales: *mut u8,
    tally: &mut Tally,
) {
    rows.check();
    let [heads, tokens, lanes] = rows.extents;
    let mut wide = [0_f32; PIECE];
    let shared = match rows.per {
        ScalePer::HeadRow => 1,
        ScalePer::Row => heads,
    };
    for first in (0..heads).step_by(shared.max(1)) {
        for row in 0..tokens {
            // SAFETY: pieces lie inside their rows, which lie inside the box.
            unsafe {
                let value = |head: usize, start: usize| {
                    values.offset(at(rows.value_strides, head, row)).add(start * rows.value.bytes())
                };
                let mut largest = 0.0_f32;
                for head in first..first + shared {
                    for start in (0..lanes).step_by(PIECE) {
                        let wide = &mut wide[..PIECE.min(lanes - start)];
                        if from_elem(cpu, rows.value, value(head, start), wide) {
                            for (lane, &value) in wide.iter().enumerate() {
                                tally.note(value, false, [head, row, start + lane]);
                            }
                        }
                        largest = largest.max(cpu.largest(wide));
                    }
                }
                let to = scales.offset(rows.scale_at(first, row));
                let mut scale = largest / LARGEST_CODE;
                if scale < SMALLEST_SCALE {
                    scale = SMALLEST_SCALE;
                }
                write(rows.scale, to, scale);
                let scale = read(rows.scale, to);
                if largest.is_finite() {
                    tally.note(largest, !scale.is_finite(), [first, row, 0]);
                }
                for head in first..first + shared {
                    for start in (0..lanes).step_by(PIECE) {
                        let wide = &mut wide[..PIECE.min(lanes - start)];
                        // A row that is one piece is still there from the search for its largest value.
                        if shared > 1 || lanes > PIECE {
                            from_elem(cpu, rows.value, value(head, start), wide);
                        }
                        let to = codes.offset(at(rows.code_strides, head, row)).add(start);
                        let codes = std::slice::from_raw_parts_mut(to, wide.len());
                        cpu.int8_encode(wide, scale, codes);
                    }
                }
            }
        }
    }
}

/// Reads a line of `elem`. Returns true when a value may not be finite.
///
/// # Safety
///
/// `src` is readable for as many elements as `wide` holds.
unsafe fn from_elem(cpu: Cpu, elem: Elem, src: *const u8, wide: &mut [f32]) -> bool {
    let lanes = wide.len();
    let dst = wide.as_mut_ptr().cast::<u8>();
    if elem == Elem::F32 {
        // SAFETY: both sides hold `lanes` floats.
        unsafe { dst.copy_from_nonoverlapping(src, lanes * 4) };
        return wide.iter().any(|value| !value.is_finite());
    }
    // SAFETY: as above.
    unsafe { cpu.convert(elem, Elem::F32, Lines { src, src_stride: 0, dst, dst_stride: 0, lines: 1, lanes }) }
}

/// Writes a line of `elem`, overflowing to infinity. Returns true when a written value may not be finite.
///
/// # Safety
///
/// `dst` is writable for as many elements as `wide` holds.
unsafe fn to_elem(cpu: Cpu, elem: Elem, wide: &[f32], dst: *mut u8) -> bool {
    let lanes = wide.len();
    let src = wide.as_ptr().cast::<u8>();
    if elem == Elem::F32 {
        // SAFETY: both sides hold `lanes` floats.
        unsafe { dst.copy_from_nonoverlapping(src, lanes * 4) };
        return wide.iter().any(|value| !value.is_finite());
    }
    // SAFETY: as above.
    unsafe { cpu.convert(Elem::F32, elem, Lines { src, src_stride: 0, dst, dst_stride: 0, lines: 1, lanes }) }
}

#[cfg(test)]
mod tests;
