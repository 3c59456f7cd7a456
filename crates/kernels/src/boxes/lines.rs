//! Moves whose lanes lie side by side in both boxes: one `memcpy` for each run of bytes.

use super::BoxMove;

/// Whether lanes are packed on both sides.
pub(super) fn contiguous(mv: &BoxMove) -> bool {
    let packed = |stride: isize, bytes: usize| mv.extents[2] == 1 || stride == bytes.cast_signed();
    packed(mv.src_strides[2], mv.src.bytes()) && packed(mv.dst_strides[2], mv.dst.bytes())
}

/// Moves a box without conversion, line by line; neighbouring lines that touch on both sides move as one.
///
/// # Safety
///
/// As for [`super::move_box`], with `contiguous(mv)` and equal encodings.
pub(super) unsafe fn move_lines(mv: &BoxMove, src: *const u8, dst: *mut u8) {
    let [mut heads, mut rows, lanes] = mv.extents;
    let mut line = lanes * mv.src.bytes();
    let touches = |axis: usize, line: usize| {
        mv.src_strides[axis] == line.cast_signed() && mv.dst_strides[axis] == line.cast_signed()
    };
    if rows == 1 || touches(1, line) {
        line *= rows;
        rows = 1;
        if heads == 1 || touches(0, line) {
            line *= heads;
            heads = 1;
        }
    }
    for head in 0..heads {
        for row in 0..rows {
            let (from, to) = mv.offsets([head, row, 0]);
            // SAFETY: the line starts at an element of the box and covers packed elements of it alone.
            unsafe { dst.offset(to).copy_from_nonoverlapping(src.offset(from), line) };
        }
    }
}
