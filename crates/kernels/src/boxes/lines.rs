//! Boxes whose elements are neighbours along the same axis on both sides.

use super::route::Axis;
use super::{BoxMove, Job};
use crate::arch::Lines;

/// Elements of a block of lines that is converted, and if need be settled, at once.
const BLOCK: usize = 4096;

/// Bytes that are gathered before they are written, see [`copy`].
const STAGE: usize = 8192;

/// Lines at least this long are handed to `memcpy` as they are.
const LONG_LINE: usize = 2048;

/// A gather buffer, a cache line's alignment.
#[repr(C, align(64))]
struct Stage([u8; STAGE]);

/// Copies lines without conversion; lines that touch on both sides move as one.
///
/// Short lines that are strided in the source and packed in the destination are gathered first: one long `memcpy` to the
/// destination avoids reading the lines that it overwrites (with string moves or streaming stores, as the C library
/// sees fit), which short ones cannot.
///
/// # Safety
///
/// As for [`super::move_box`]; `lane` is packed on both sides, encodings are equal.
pub(super) unsafe fn copy(job: &Job, outer: Axis, middle: Axis, lane: Axis) {
    let BoxMove { src: elem, .. } = *job.mv;
    let mut line = lane.extent * elem.bytes();
    let (mut planes, mut lines) = (outer.extent, middle.extent);
    let touches = |axis: Axis, line: usize| axis.src == line.cast_signed() && axis.dst == line.cast_signed();
    if lines == 1 || touches(middle, line) {
        line *= lines;
        lines = 1;
        if planes == 1 || touches(outer, line) {
            line *= planes;
            planes = 1;
        }
    }
    let gather = cfg!(target_arch = "x86_64")
        && line < LONG_LINE
        && lines * line >= LONG_LINE
        && middle.dst == line.cast_signed();
    let mut stage = Stage([0; STAGE]);
    let at_once = if gather { STAGE / line } else { 1 };
    for plane in 0..planes.cast_signed() {
        for first in (0..lines).step_by(at_once) {
            let count = at_once.min(lines - first);
            let first = first.cast_signed();
            // SAFETY: lines `first..first + count` of the plane lie inside the box, and are packed in the destination
            // when there are several.
            unsafe {
                let from = job.src.offset(plane * outer.src + first * middle.src);
                let to = job.dst.offset(plane * outer.dst + first * middle.dst);
                if gather {
                    for n in 0..count {
                        let from = from.offset(n.cast_signed() * middle.src);
                        stage.0.as_mut_ptr().add(n * line).copy_from_nonoverlapping(from, line);
                    }
                    to.copy_from_nonoverlapping(stage.0.as_ptr(), count * line);
                } else {
                    to.copy_from_nonoverlapping(from, line);
                }
            }
        }
    }
}

/// Converts lines, block by block.
///
/// # Safety
///
/// As for [`super::move_box`]; `lane` is packed on both sides, encodings are floats that differ.
pub(super) unsafe fn convert(job: &mut Job, outer: Axis, middle: Axis, lane: Axis) {
    let BoxMove { src: from, dst: to, .. } = *job.mv;
    let at_once = (BLOCK / lane.extent).max(1);
    for plane in 0..outer.extent {
        for first in (0..middle.extent).step_by(at_once) {
            let lines = at_once.min(middle.extent - first);
            for start in (0..lane.extent).step_by(BLOCK) {
                let lanes = BLOCK.min(lane.extent - start);
                let offset = |outer: isize, middle: isize, elem: usize| {
                    plane.cast_signed() * outer + first.cast_signed() * middle + (start * elem).cast_signed()
                };
                // SAFETY: the block lies inside the box.
                unsafe {
                    let block = Lines {
                        src: job.src.offset(offset(outer.src, middle.src, from.bytes())),
                        src_stride: middle.src,
                        dst: job.dst.offset(offset(outer.dst, middle.dst, to.bytes())),
                        dst_stride: middle.dst,
                        lines,
                        lanes,
                    };
                    if job.cpu.convert(from, to, block) {
                        job.settle([(outer, plane, 1), (middle, first, lines), (lane, start, lanes)]);
                    }
                }
            }
        }
    }
}
