//! Boxes whose elements are neighbours along the same axis on both sides.

use super::route::Axis;
use super::{BoxMove, Job};
use crate::arch::Lines;

/// Elements of a block of lines that is converted, and if need be settled, at once.
const BLOCK: usize = 4096;

/// Bytes of the buffer in which lines are gathered before they are written, see [`copy`]: most of a first-level cache.
const STAGE: usize = 32768;

/// Bytes of one plane that are gathered at once.
const GATHERED: usize = 8192;

/// Lines at least this long are copied as they are.
const LONG_LINE: usize = 2048;

/// A gather buffer, a cache line's alignment.
#[repr(C, align(64))]
struct Stage([u8; STAGE]);

/// Copies lines without conversion; lines that touch on both sides move as one.
///
/// Long lines, and short ones that are whole cache lines, are copied as they are, past the caches if the box is large.
/// Other short lines of a box would have every cache line read that they overwrite: if they are packed in the
/// destination, they are gathered first and written as a long one.
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
    let stream = job.stream();
    let whole = job.whole_lines([outer.dst, middle.dst], line);
    let gather = cfg!(target_arch = "x86_64")
        && line < LONG_LINE
        && lines * line >= LONG_LINE
        && middle.dst == line.cast_signed()
        && !(stream && whole);
    if !gather {
        for plane in 0..planes.cast_signed() {
            // SAFETY: the plane's lines lie inside the box.
            unsafe {
                job.cpu.copy_lines(Lines {
                    src: job.src.offset(plane * outer.src),
                    src_stride: middle.src,
                    dst: job.dst.offset(plane * outer.dst),
                    dst_stride: middle.dst,
                    lines,
                    lanes: line,
                    stream: stream && (whole || line >= LONG_LINE),
                });
            }
        }
        return;
    }
    // Planes whose lines lie side by side in the source, as heads do in token-major rows, are gathered together: the
    // source is then read from its start to its end.
    let beside = outer.src.unsigned_abs() < middle.src.unsigned_abs();
    let together = if beside { planes.min(STAGE / line) } else { 1 };
    let at_once = (STAGE / (together * line)).min(GATHERED / line).max(1);
    let mut stage = Stage([0; STAGE]);
    for first_plane in (0..planes).step_by(together) {
        let planes = together.min(planes - first_plane);
        for first in (0..lines).step_by(at_once) {
            let count = at_once.min(lines - first);
            let plane_bytes = count * line;
            // SAFETY: these planes and lines lie inside the box, and lines of a plane are packed in the destination; the
            // buffer holds them all.
            unsafe {
                let at = |strides: (isize, isize)| {
                    first_plane.cast_signed() * strides.0 + first.cast_signed() * strides.1
                };
                let from = job.src.offset(at((outer.src, middle.src)));
                let to = job.dst.offset(at((outer.dst, middle.dst)));
                for n in 0..count {
                    for p in 0..planes {
                        let from = from.offset(p.cast_signed() * outer.src + n.cast_signed() * middle.src);
                        let staged = stage.0.as_mut_ptr().add(p * plane_bytes + n * line);
                        staged.copy_from_nonoverlapping(from, line);
                    }
                }
                job.cpu.copy_lines(Lines {
                    src: stage.0.as_ptr(),
                    src_stride: plane_bytes.cast_signed(),
                    dst: to,
                    dst_stride: outer.dst,
                    lines: planes,
                    lanes: plane_bytes,
                    stream,
                });
            }
        }
    }
}

/// Converts lines, block by block; the lines of a block that touch on both sides are converted as one.
///
/// # Safety
///
/// As for [`super::move_box`]; `lane` is packed on both sides, encodings are floats that differ.
pub(super) unsafe fn convert(job: &mut Job, outer: Axis, middle: Axis, lane: Axis) {
    let BoxMove { src: from, dst: to, .. } = *job.mv;
    let at_once = (BLOCK / lane.extent).max(1);
    let touches = middle.src == (lane.extent * from.bytes()).cast_signed()
        && middle.dst == (lane.extent * to.bytes()).cast_signed();
    let stream = job.stream();
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
                        lines: if touches { 1 } else { lines },
                        lanes: if touches { lines * lanes } else { lanes },
                        stream,
                    };
                    if job.cpu.convert(from, to, block) {
                        job.settle([(outer, plane, 1), (middle, first, lines), (lane, start, lanes)]);
                    }
                }
            }
        }
    }
}
