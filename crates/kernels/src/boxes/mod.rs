//! Moves of strided boxes: the step a copy plan is made of.

mod definition;
mod lines;
mod route;
mod scan;
mod transpose;

use crate::arch::Cpu;
use crate::{Elem, Tally, Writing};
use route::{Axis, Route};

pub(crate) use definition::write_value;
pub use scan::scan_box;

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
    fn offsets(&self, place: [usize; 3]) -> (isize, isize) {
        let along = |strides: [isize; 3]| (0..3).map(|axis| place[axis].cast_signed() * strides[axis]).sum();
        (along(self.src_strides), along(self.dst_strides))
    }
}

/// Copies a box, converting where the encodings differ.
///
/// Conversions round to nearest, ties to even. A NaN stays a NaN and becomes quiet. `tally` gains the conversion's counts;
/// a move without a conversion reads no values and counts nothing.
///
/// # Safety
///
/// `src` is readable and `dst` writable at every element of the box, the two boxes do not overlap, no two places of the
/// destination overlap, and nothing else writes the source or touches the destination meanwhile.
///
/// # Panics
///
/// When [`Elem::can_become`] says that `mv.src` cannot become `mv.dst`.
pub unsafe fn move_box(mv: &BoxMove, src: *const u8, dst: *mut u8, writing: Writing, tally: &mut Tally) {
    // SAFETY: the caller's promise is the same.
    unsafe { move_box_on(Cpu::best(), mv, src, dst, writing, tally) }
}

/// [`move_box`] on a given instruction set.
///
/// # Safety
///
/// As for [`move_box`].
pub(crate) unsafe fn move_box_on(
    cpu: Cpu,
    mv: &BoxMove,
    src: *const u8,
    dst: *mut u8,
    writing: Writing,
    tally: &mut Tally,
) {
    assert!(mv.src.can_become(mv.dst), "no conversion from {:?} to {:?}", mv.src, mv.dst);
    if mv.elements() == 0 {
        return;
    }
    let mut job = Job { cpu, mv, src, dst, writing, tally };
    // SAFETY: the caller's promise covers the whole box, which every route stays inside.
    unsafe {
        match route::choose(mv) {
            Route::Lines { outer, middle, lane } if mv.src == mv.dst => {
                lines::copy(&job, outer, middle, lane);
            }
            Route::Lines { outer, middle, lane } => lines::convert(&mut job, outer, middle, lane),
            Route::Transpose { outer, row, col } if mv.src == mv.dst => {
                transpose::copy(&job, outer, row, col);
            }
            Route::Transpose { outer, row, col } => transpose::convert(&mut job, outer, row, col),
            Route::Scattered => definition::move_box(mv, src, dst, writing.on_overflow, job.tally),
        }
    }
    cpu.fence();
}

/// A move under way.
struct Job<'a> {
    cpu: Cpu,
    mv: &'a BoxMove,
    src: *const u8,
    dst: *mut u8,
    writing: Writing,
    tally: &'a mut Tally,
}

impl Job<'_> {
    /// Whether the destination is written past the caches.
    fn stream(&self) -> bool {
        self.writing.past_caches && self.cpu.can_stream()
    }

    /// Whether lines at these strides of the destination, `line` bytes long, are whole cache lines.
    fn whole_lines(&self, dst_strides: [isize; 2], line: usize) -> bool {
        self.dst.addr().is_multiple_of(64)
            && line.is_multiple_of(64)
            && dst_strides.iter().all(|stride| stride.unsigned_abs().is_multiple_of(64))
    }

    /// Does a part again by the definition, which counts and clamps: the fast bodies only notice that there is a need.
    ///
    /// # Safety
    ///
    /// The job's own, and the part lies inside the box.
    unsafe fn settle(&mut self, part: [(Axis, usize, usize); 3]) {
        let (mut origin, mut extents) = ([0; 3], [0; 3]);
        for (axis, start, len) in part {
            origin[axis.index] = start;
            extents[axis.index] = len;
        }
        let mv = BoxMove { extents, ..*self.mv };
        let (from, to) = mv.offsets(origin);
        let mut counts = Tally::default();
        // SAFETY: the part lies inside the box.
        unsafe {
            definition::move_box(
                &mv,
                self.src.offset(from),
                self.dst.offset(to),
                self.writing.on_overflow,
                &mut counts,
            );
        }
        self.tally.merge(&counts.offset_by(origin));
    }
}

#[cfg(test)]
mod tests;
