//! Boxes whose elements are neighbours along one axis in the source and along another in the destination.

use super::route::Axis;
use super::{BoxMove, Job};
use crate::arch::{Lines, Matrix};

/// Bytes of the buffer in which a block is turned before it is written or converted.
const STAGE: usize = 16384;

#[repr(C, align(64))]
struct Stage([u8; STAGE]);

/// Transposes without conversion.
///
/// Where the destination's lines touch, a block of them is turned in a small buffer and written by one `memcpy`, which
/// need not read what it overwrites.
///
/// # Safety
///
/// As for [`super::move_box`]; `col` is packed in the source, `row` in the destination, encodings are equal.
pub(super) unsafe fn copy(job: &Job, outer: Axis, row: Axis, col: Axis) {
    let bytes = job.mv.src.bytes();
    let line = row.extent * bytes;
    let tile = 64 / bytes;
    let gather = cfg!(target_arch = "x86_64")
        && col.dst == line.cast_signed()
        && line * tile <= STAGE
        && line * col.extent >= 2048;
    let cols_at_once = if gather { STAGE / (line * tile) * tile } else { col.extent };
    let mut stage = Stage([0; STAGE]);
    for plane in 0..outer.extent.cast_signed() {
        for first in (0..col.extent).step_by(cols_at_once) {
            let cols = cols_at_once.min(col.extent - first);
            let start = first.cast_signed();
            // SAFETY: the block lies inside the box; the buffer holds `cols` lines.
            unsafe {
                let dst = job.dst.offset(plane * outer.dst + start * col.dst);
                let mut matrix = Matrix {
                    src: job.src.offset(plane * outer.src + start * col.src),
                    src_stride: row.src,
                    dst,
                    dst_stride: col.dst,
                    rows: row.extent,
                    cols,
                };
                if gather {
                    (matrix.dst, matrix.dst_stride) = (stage.0.as_mut_ptr(), line.cast_signed());
                }
                job.cpu.transpose(bytes, matrix);
                if gather {
                    dst.copy_from_nonoverlapping(stage.0.as_ptr(), cols * line);
                }
            }
        }
    }
}

/// Transposes block by block into a small buffer, and converts from there.
///
/// # Safety
///
/// As for [`super::move_box`]; `col` is packed in the source, `row` in the destination, encodings are floats that differ.
pub(super) unsafe fn convert(job: &mut Job, outer: Axis, row: Axis, col: Axis) {
    let BoxMove { src: from, dst: to, .. } = *job.mv;
    let cols_at_once = 64 / from.bytes();
    let rows_at_once = STAGE / 64;
    let mut stage = Stage([0; STAGE]);
    for plane in 0..outer.extent {
        for first_col in (0..col.extent).step_by(cols_at_once) {
            let cols = cols_at_once.min(col.extent - first_col);
            for first_row in (0..row.extent).step_by(rows_at_once) {
                let rows = rows_at_once.min(row.extent - first_row);
                let offset = |outer: isize, row: isize, col: isize| {
                    plane.cast_signed() * outer
                        + first_row.cast_signed() * row
                        + first_col.cast_signed() * col
                };
                let line = (rows * from.bytes()).cast_signed();
                let matrix = Matrix {
                    // SAFETY: the block lies inside the box.
                    src: unsafe { job.src.offset(offset(outer.src, row.src, col.src)) },
                    src_stride: row.src,
                    dst: stage.0.as_mut_ptr(),
                    dst_stride: line,
                    rows,
                    cols,
                };
                let block = Lines {
                    src: stage.0.as_ptr(),
                    src_stride: line,
                    // SAFETY: the block lies inside the box.
                    dst: unsafe { job.dst.offset(offset(outer.dst, row.dst, col.dst)) },
                    dst_stride: col.dst,
                    lines: cols,
                    lanes: rows,
                };
                // SAFETY: the buffer holds `cols` lines of `rows` elements, at most `STAGE` bytes; the block lies inside
                // the box.
                unsafe {
                    job.cpu.transpose(from.bytes(), matrix);
                    if job.cpu.convert(from, to, block) {
                        job.settle([(outer, plane, 1), (row, first_row, rows), (col, first_col, cols)]);
                    }
                }
            }
        }
    }
}
