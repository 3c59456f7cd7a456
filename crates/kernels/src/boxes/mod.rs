//! Moves of strided boxes: the step a copy plan is made of.

mod definition;
mod lines;

use crate::{Elem, OnOverflow, Tally};

/// One move: a box of elements read at one set of strides and written at another.
///
/// Axes are `[head, row, lane]` by custom; a kernel looks at the strides alone, so callers may merge axes or name others.
/// Strides are in bytes, of any sign, and 0 on the source repeats elements. Addresses need no alignment.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BoxMove {
    /// Elements along each axis. A zero makes the box empty.
    pub extents: [usize; 3],
    /// Bytes between neighbours along each axis of the source.
    pub src_strides: [isize; 3],
    /// Bytes between neighbours along each axis of the destination.
    pub dst_strides: [isize; 3],
    /// Encoding read.
    pub src: Elem,
    /// Encoding written.
    pub dst: Elem,
}

impl BoxMove {
    /// Elements in the box.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.extents[0] * self.extents[1] * self.extents[2]
    }

    /// Bytes from the start of the source and of the destination to the element at `place`.
    pub(crate) fn offsets(&self, place: [usize; 3]) -> (isize, isize) {
        let along = |strides: [isize; 3]| (0..3).map(|axis| place[axis].cast_signed() * strides[axis]).sum();
        (along(self.src_strides), along(self.dst_strides))
    }
}

/// Copies a box, converting where the encodings differ.
///
/// Conversions round to nearest, ties to even. A NaN stays a NaN and becomes quiet. `policy` says what is written for a
/// finite value that the target cannot hold. `tally` gains the conversion's counts; a move without a conversion reads no
/// values and counts nothing.
///
/// # Safety
///
/// `src` is readable and `dst` writable at every element of the box, the two boxes do not overlap, no two places of the
/// destination overlap, and nothing else writes the source or touches the destination meanwhile.
///
/// # Panics
///
/// When [`Elem::can_become`] says that `mv.src` cannot become `mv.dst`.
pub unsafe fn move_box(mv: &BoxMove, src: *const u8, dst: *mut u8, policy: OnOverflow, tally: &mut Tally) {
    assert!(mv.src.can_become(mv.dst), "no conversion from {:?} to {:?}", mv.src, mv.dst);
    if mv.elements() == 0 {
        return;
    }
    // SAFETY: the caller's promise covers the whole box, which every path below stays inside.
    unsafe {
        if mv.src == mv.dst && lines::contiguous(mv) {
            lines::move_lines(mv, src, dst);
        } else {
            definition::move_box(mv, src, dst, policy, tally);
        }
    }
}

#[cfg(test)]
mod tests;
