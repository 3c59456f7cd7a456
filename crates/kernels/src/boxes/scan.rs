//! Counting what a box holds that a cache should not, without moving it.

use super::{BoxMove, definition};
use crate::arch::scalar::read;
use crate::arch::{Cpu, Lines};
use crate::{Elem, Tally};

/// Lanes that are looked at together.
const PIECE: usize = 2048;

/// Counts the values of a box that are NaN or infinite, and those that would overflow in `target`.
///
/// Extents and strides are those of [`BoxMove`]; `target` is `elem` itself when nothing is to be converted.
///
/// # Safety
///
/// `src` is readable at every element of the box, and nothing writes it meanwhile.
///
/// # Panics
///
/// When `elem` or `target` is not a float.
pub unsafe fn scan_box(
    elem: Elem,
    target: Elem,
    extents: [usize; 3],
    strides: [isize; 3],
    src: *const u8,
    tally: &mut Tally,
) {
    assert!(elem.is_float() && target.is_float(), "{elem:?} and {target:?} are not both floats");
    let mv = BoxMove { extents, src_strides: strides, dst_strides: [0; 3], src: elem, dst: target };
    let cpu = Cpu::best();
    // Converted values go here and are not looked at: only whether one of them is unusual.
    let mut unread = [0_u8; PIECE * 4];
    let lanes_packed = strides[2] == elem.bytes().cast_signed();
    // A conversion to another encoding, the target's if it can overflow: bodies exist only for those.
    let through = match (elem.may_overflow(target), elem) {
        (true, _) => target,
        (false, Elem::F32) => Elem::BF16,
        (false, _) => Elem::F32,
    };
    for head in 0..extents[0] {
        for row in 0..extents[1] {
            for start in (0..extents[2]).step_by(PIECE) {
                let lanes = PIECE.min(extents[2] - start);
                let from = mv.offsets([head, row, start]).0;
                let line = Lines {
                    src: src.wrapping_offset(from),
                    src_stride: 0,
                    dst: unread.as_mut_ptr(),
                    dst_stride: 0,
                    lines: 1,
                    lanes,
                    stream: false,
                };
                // SAFETY: the piece lies inside the box; a converted one fits `unread`.
                if lanes_packed && !unsafe { cpu.convert(elem, through, line) } {
                    continue;
                }
                for lane in 0..lanes {
                    // SAFETY: `lane` lies inside the piece.
                    let value = unsafe { read(elem, line.src.offset(lane.cast_signed() * strides[2])) };
                    tally.note(value, !definition::holds(target, value), [head, row, start + lane]);
                }
            }
        }
    }
}
