//! The definition of a box move: one element after the other, in index order.

use half::{bf16, f16};

use super::BoxMove;
use crate::arch::scalar::{read, write};
use crate::{Elem, OnOverflow, Tally};

/// What [`super::move_box`] does, without a thought for speed.
///
/// # Safety
///
/// As for [`super::move_box`].
pub(super) unsafe fn move_box(
    mv: &BoxMove,
    src: *const u8,
    dst: *mut u8,
    policy: OnOverflow,
    tally: &mut Tally,
) {
    let [heads, rows, lanes] = mv.extents;
    for head in 0..heads {
        for row in 0..rows {
            for lane in 0..lanes {
                let (from, to) = mv.offsets([head, row, lane]);
                // SAFETY: the element at `[head, row, lane]` lies inside both boxes.
                unsafe {
                    let (src, dst) = (src.offset(from), dst.offset(to));
                    if mv.src == mv.dst {
                        dst.copy_from_nonoverlapping(src, mv.src.bytes());
                    } else {
                        write_value(mv.dst, dst, read(mv.src, src), policy, tally, [head, row, lane]);
                    }
                }
            }
        }
    }
}

/// Writes one value as `elem`, and counts it at `place` if it is unusual.
///
/// # Safety
///
/// `dst` is writable for one element.
pub(crate) unsafe fn write_value(
    elem: Elem,
    dst: *mut u8,
    value: f32,
    policy: OnOverflow,
    tally: &mut Tally,
    place: [usize; 3],
) {
    tally.note(value, !holds(elem, value), place);
    // SAFETY: the caller's promise.
    unsafe { write(elem, dst, narrow(elem, value, policy)) }
}

/// Whether `elem` can hold a finite value near `value`, or `value` is not finite to begin with.
pub(super) fn holds(elem: Elem, value: f32) -> bool {
    !value.is_finite()
        || match elem {
            Elem::F16 => f16::from_f32(value).is_finite(),
            Elem::BF16 => bf16::from_f32(value).is_finite(),
            _ => true,
        }
}

/// `value`, or under [`OnOverflow::Clamp`] the nearest finite value that `elem` holds.
fn narrow(elem: Elem, value: f32, policy: OnOverflow) -> f32 {
    if policy != OnOverflow::Clamp || holds(elem, value) {
        return value;
    }
    let largest = match elem {
        Elem::F16 => f16::MAX.to_f32(),
        Elem::BF16 => bf16::MAX.to_f32(),
        _ => f32::MAX,
    };
    largest.copysign(value)
}
