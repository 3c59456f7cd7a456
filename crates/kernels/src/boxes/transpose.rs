//! Boxes whose elements are neighbours along one axis in the source and along another in the destination.

use std::mem::MaybeUninit;

use super::route::Axis;
use super::{BoxMove, Job};
use crate::arch::{Lines, Matrix};

/// Bytes of the buffer in which a block is turned before it is converted.
const STAGE: usize = 16384;

/// Bytes of the buffer in which lines are gathered: several cache lines of each source line, and well inside a
/// second-level cache.
const GATHER: usize = 65536;

/// Bytes of a source line in a block: several cache lines, so that each visit to a page pays.
const SRC_LINE: usize = 256;

#[repr(C, align(64))]
struct Gather([u8; GATHER]);

#[repr(C, align(64))]
struct Stage([u8; STAGE]);

/// Transposes without conversion.
///
/// A large destination of whole cache lines is written past the caches where the CPU can. Elsewhere, where it is packed,
/// blocks are turned in a buffer and written as one long line, for which what it overwrites need not be read.
///
/// # Safety
///
/// As for [`super::move_box`]; `col` is packed in the source, `row` in the destination, encodings are equal.
pub(super) unsafe fn copy(job: &Job, outer: Axis, row: Axis, col: Axis) {
    let bytes = job.mv.src.bytes();
    let line = row.extent * bytes;
    // Whole cache lines of the source.
    let grain = 64 / bytes;
    let cols_at_once = GATHER / line / grain * grain;
    let stream = job.stream();
    let whole = stream && job.whole_lines([outer.dst, col.dst], 64);
    let gather = !whole && cols_at_once > 0 && col.dst == line.cast_signed();
    let at_once = if gather { cols_at_once } else { col.extent };
    let mut lines = MaybeUninit::<Gather>::uninit();
    for plane in 0..outer.extent.cast_signed() {
        for first in (0..col.extent).step_by(at_once) {
            let cols = at_once.min(col.extent - first);
            // SAFETY: columns `first..first + cols` of the plane are a matrix inside the box, on both sides. The buffer
            // holds as many lines, which follow one another in the destination when they are gathered.
            unsafe {
                let src = job.src.offset(plane * outer.src + (first * bytes).cast_signed());
                let dst = job.dst.offset(plane * outer.dst + first.cast_signed() * col.dst);
                let (to, dst_stride) = if gather {
                    (lines.as_mut_ptr().cast::<u8>(), line.cast_signed())
                } else {
                    (dst, col.dst)
                };
                let matrix = Matrix {
                    src,
                    src_stride: row.src,
                    dst: to,
                    dst_stride,
                    rows: row.extent,
                    cols,
                    stream: whole,
                };
                job.cpu.transpose(bytes, matrix);
                if gather {
                    let bytes = cols * line;
                    let src = lines.as_ptr().cast::<u8>();
                    job.cpu.copy_lines(Lines {
                        src,
                        src_stride: 0,
                        dst,
                        dst_stride: 0,
                        lines: 1,
                        lanes: bytes,
                        stream,
                    });
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
    let cols_at_once = SRC_LINE / from.bytes();
    let rows_at_once = STAGE / SRC_LINE;
    let mut stage = Stage([0; STAGE]);
    let stream = job.stream();
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
                    stream: false,
                };
                let block = Lines {
                    src: stage.0.as_ptr(),
                    src_stride: line,
                    // SAFETY: the block lies inside the box.
                    dst: unsafe { job.dst.offset(offset(outer.dst, row.dst, col.dst)) },
                    dst_stride: col.dst,
                    lines: cols,
                    lanes: rows,
                    stream,
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
