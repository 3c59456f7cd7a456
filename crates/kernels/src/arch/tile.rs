//! The walk of a transpose, shared by every instruction set: cut the matrix into tiles whose source lines are read whole.
//!
//! A tile is gathered into a small aligned buffer first. Source lines are often a power of two apart, which maps them all
//! to the same few cache sets; reading each of them exactly once keeps that from mattering.

use super::Matrix;

/// Bytes of a source line that a tile takes: a cache line.
pub(super) const LINE: usize = 64;

/// The gathered source of a tile: `ROWS` lines.
#[repr(C, align(64))]
pub(super) struct Gathered<const ROWS: usize>(pub [[u8; LINE]; ROWS]);

/// Transposes `m`, elements of `BYTES` bytes, in tiles of `ROWS` lines of [`LINE`] bytes.
///
/// `tile` turns gathered lines into `LINE / BYTES` lines of `ROWS` elements at a pointer and a stride.
///
/// # Safety
///
/// As for [`super::Cpu::transpose`]; `tile` writes those lines and nothing else.
#[inline(always)]
pub(super) unsafe fn walk<const ROWS: usize, const BYTES: usize>(
    m: Matrix,
    tile: impl Fn(&Gathered<ROWS>, *mut u8, isize),
) {
    let width = LINE / BYTES;
    let mut gathered = Gathered([[0; LINE]; ROWS]);
    // A tile that sticks out of the matrix is written here first. Its line is at most `LINE` bytes.
    let mut edge = Gathered([[0; LINE]; LINE]);
    for col in (0..m.cols).step_by(width) {
        let cols = width.min(m.cols - col);
        for row in (0..m.rows).step_by(ROWS) {
            let rows = ROWS.min(m.rows - row);
            // SAFETY: `[row, row + rows) × [col, col + cols)` lies inside the matrix, on both sides.
            unsafe {
                let src = m.src.offset(row.cast_signed() * m.src_stride + (col * BYTES).cast_signed());
                let dst = m.dst.offset(col.cast_signed() * m.dst_stride + (row * BYTES).cast_signed());
                let line = |r: usize| src.offset(r.cast_signed() * m.src_stride);
                if rows == ROWS && cols == width {
                    for (r, to) in gathered.0.iter_mut().enumerate() {
                        to.as_mut_ptr().copy_from_nonoverlapping(line(r), LINE);
                    }
                    tile(&gathered, dst, m.dst_stride);
                } else {
                    for (r, to) in gathered.0[..rows].iter_mut().enumerate() {
                        to.as_mut_ptr().copy_from_nonoverlapping(line(r), cols * BYTES);
                    }
                    tile(&gathered, edge.0.as_mut_ptr().cast(), LINE.cast_signed());
                    for (c, from) in edge.0[..cols].iter().enumerate() {
                        let to = dst.offset(c.cast_signed() * m.dst_stride);
                        to.copy_from_nonoverlapping(from.as_ptr(), rows * BYTES);
                    }
                }
            }
        }
    }
}
