//! Symmetric int8: signed codes and one scale for the lanes of a row.
//!
//! `value = code · scale`, rounded once to the target's encoding. Coding takes scale = max|value| / 127, at least
//! [`SMALLEST_SCALE`], and divides by the scale as it is stored, so that a decoded value is within half a step of the
//! original whatever the scale's encoding.

pub(crate) mod body;

use crate::arch::scalar::{read, write};
use crate::arch::{Cpu, Lines};
use crate::{BoxMove, Elem, OnOverflow, Tally, Writing, boxes};

/// Codes run from -127 to 127.
const LARGEST_CODE: f32 = 127.0;

/// The floor of a scale, which keeps rows of zeros from dividing by zero.
const SMALLEST_SCALE: f32 = 1e-6;

/// Lanes that are coded at once: the buffers of a piece stay in the nearest cache.
const PIECE: usize = 4096;

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
/// `writing` and `tally` are those of [`move_box`](crate::move_box), with `code · scale` as the source value.
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
    writing: Writing,
    tally: &mut Tally,
) {
    // SAFETY: the caller's promise is the same.
    unsafe { decode_on(Cpu::best(), rows, codes, scales, values, writing, tally) }
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

/// Lanes that are coded at once: rows of one head that fit the buffers together, or part of a long row.
#[derive(Clone, Copy, Debug)]
struct Piece {
    head: usize,
    row: usize,
    rows: usize,
    start: usize,
    lanes: usize,
}

impl Int8Rows {
    fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        let [heads, rows, lanes] = self.extents;
        let rows_at_once = (PIECE / lanes.max(1)).max(1);
        let starts = move |head, row| {
            (0..lanes).step_by(PIECE).map(move |start| Piece {
                head,
                row,
                rows: rows_at_once.min(rows - row),
                start,
                lanes: PIECE.min(lanes - start),
            })
        };
        (0..heads)
            .flat_map(move |head| (0..rows).step_by(rows_at_once).flat_map(move |row| starts(head, row)))
    }

    /// The move between a buffer of f32, `lanes` to a row, and the values of a piece.
    fn values_of(&self, piece: Piece) -> BoxMove {
        BoxMove {
            extents: [1, piece.rows, piece.lanes],
            src_strides: [0, (piece.lanes * 4).cast_signed(), 4],
            dst_strides: [0, self.value_strides[1], self.value.bytes().cast_signed()],
            src: Elem::F32,
            dst: self.value,
        }
    }

    /// Bytes from the first value to the first of a piece.
    fn value_at(&self, piece: Piece) -> isize {
        at(self.value_strides, piece.head, piece.row) + (piece.start * self.value.bytes()).cast_signed()
    }
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
    writing: Writing,
    tally: &mut Tally,
) {
    rows.check();
    let stream = writing.past_caches && cpu.can_stream();
    let mut factors = [0_f32; PIECE];
    for piece in rows.pieces() {
        let Piece { head, row, start, lanes, .. } = piece;
        let factors = &mut factors[..piece.rows];
        for (row, factor) in (row..).zip(factors.iter_mut()) {
            // SAFETY: `head` and `row` lie inside the box.
            *factor = unsafe { read(rows.scale, scales.offset(rows.scale_at(head, row))) };
        }
        let block = Lines {
            src: codes.wrapping_offset(at(rows.code_strides, head, row)).wrapping_add(start).cast(),
            src_stride: rows.code_strides[1],
            dst: values.wrapping_offset(rows.value_at(piece)),
            dst_stride: rows.value_strides[1],
            lines: piece.rows,
            lanes,
            stream,
        };
        // SAFETY: the piece lies inside the box.
        unsafe {
            if cpu.int8_decode(rows.value, block, factors) {
                let mut counts = Tally::default();
                settle(rows.value, block, factors, writing.on_overflow, &mut counts);
                tally.merge(&counts.offset_by([head, row, start]));
            }
        }
    }
    cpu.fence();
}

/// Decodes by the definition, which counts and clamps.
///
/// # Safety
///
/// As for [`Cpu::int8_decode`].
unsafe fn settle(to: Elem, block: Lines, factors: &[f32], policy: OnOverflow, tally: &mut Tally) {
    for (row, factor) in factors.iter().enumerate() {
        let line = row.cast_signed();
        for lane in 0..block.lanes {
            // SAFETY: `row` and `lane` lie inside the block.
            unsafe {
                let code = block.src.offset(line * block.src_stride).add(lane).cast::<i8>().read();
                let dst = block.dst.offset(line * block.dst_stride).add(lane * to.bytes());
                boxes::write_value(to, dst, f32::from(code) * factor, policy, tally, [0, row, lane]);
            }
        }
    }
}

/// Counts values that are not finite, in rows of `lanes`.
fn count(wide: &[f32], lanes: usize, tally: &mut Tally) {
    if wide.iter().fold(true, |finite, value| finite & value.is_finite()) {
        return;
    }
    for (index, &value) in wide.iter().enumerate() {
        tally.note(value, false, [0, index / lanes, index % lanes]);
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
    let mut wide = [0_f32; PIECE];
    let mut factors = [0_f32; PIECE];
    // A first pass finds scales. Where rows have scales of their own and are short, it codes them too.
    let at_once = rows.per == ScalePer::HeadRow && rows.extents[2] <= PIECE;
    for piece in rows.pieces() {
        // SAFETY: pieces lie inside the box.
        unsafe {
            let wide = &mut wide[..piece.rows * piece.lanes];
            let counts = load(cpu, rows, piece, values, wide);
            tally.merge(&counts.offset_by([piece.head, piece.row, piece.start]));
            let factors = &mut factors[..piece.rows];
            for (wide, factor) in wide.chunks_exact(piece.lanes).zip(factors.iter_mut()) {
                let (min, max) = cpu.range(wide);
                *factor = max.max(-min) / LARGEST_CODE;
            }
            for (row, factor) in (piece.row..).zip(factors.iter_mut()) {
                let to = scales.offset(rows.scale_at(piece.head, row));
                let first = piece.start == 0 && (rows.per == ScalePer::HeadRow || piece.head == 0);
                // Rounding keeps order, so the largest of rounded scales is the rounded largest.
                let floor = if first { SMALLEST_SCALE } else { read(rows.scale, to) };
                let scale = if *factor > floor { *factor } else { floor };
                write(rows.scale, to, scale);
                *factor = read(rows.scale, to);
                if factor.is_infinite() && scale.is_finite() {
                    tally.note(scale, true, [piece.head, row, 0]);
                }
            }
            if at_once {
                for (n, wide) in wide.chunks_exact(piece.lanes).enumerate() {
                    code(cpu, rows, Piece { row: piece.row + n, ..piece }, wide, factors[n], codes);
                }
            }
        }
    }
    if at_once {
        return;
    }
    for piece in rows.pieces() {
        // SAFETY: pieces lie inside the box.
        unsafe {
            let wide = &mut wide[..piece.rows * piece.lanes];
            load(cpu, rows, piece, values, wide);
            for (row, wide) in (piece.row..).zip(wide.chunks_exact(piece.lanes)) {
                let scale = read(rows.scale, scales.offset(rows.scale_at(piece.head, row)));
                code(cpu, rows, Piece { row, ..piece }, wide, scale, codes);
            }
        }
    }
}

/// Reads the values of a piece, and counts those that are not finite.
///
/// # Safety
///
/// `values` are readable over the box; `wide` holds as many elements as the piece.
unsafe fn load(cpu: Cpu, rows: &Int8Rows, piece: Piece, values: *const u8, wide: &mut [f32]) -> Tally {
    let mut counts = Tally::default();
    let written = rows.values_of(piece);
    let mv = BoxMove {
        src_strides: written.dst_strides,
        dst_strides: written.src_strides,
        src: written.dst,
        dst: written.src,
        ..written
    };
    // SAFETY: the caller's promise.
    unsafe {
        let from = values.offset(rows.value_at(piece));
        let to = wide.as_mut_ptr().cast();
        boxes::move_box_on(cpu, &mv, from, to, OnOverflow::Count.into(), &mut counts);
    }
    if rows.value == Elem::F32 {
        // Nothing was converted, so nothing was counted.
        count(wide, piece.lanes, &mut counts);
    }
    counts
}

/// Codes the lanes of `piece` in its first row.
///
/// # Safety
///
/// `codes` are writable over the box.
unsafe fn code(cpu: Cpu, rows: &Int8Rows, piece: Piece, wide: &[f32], scale: f32, codes: *mut i8) {
    // SAFETY: the caller's promise.
    let codes = unsafe {
        let to = codes.offset(at(rows.code_strides, piece.head, piece.row)).add(piece.start);
        std::slice::from_raw_parts_mut(to, wide.len())
    };
    cpu.int8_encode(wide, scale, codes);
}

#[cfg(test)]
mod tests;
