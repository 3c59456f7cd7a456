//! Cutting a plan into pieces of work.

use kvbaton_plan::{CodedOp, CopyOp};

use crate::Threads;

/// Something for a thread to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// A part of a copy.
    Box(Piece),
    /// Some rows to be coded.
    Rows { op: usize, start: usize, count: usize },
}

/// A part of one copy: `count` steps of one axis, from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) op: usize,
    pub(crate) axis: usize,
    pub(crate) start: usize,
    pub(crate) count: usize,
}

/// Small enough to balance threads, large enough that taking a piece is free.
const PIECE_BYTES: usize = 1 << 20;

/// Cuts operations so that `threads` can share them, and counts their bytes. A piece of a copy runs along the outermost axis that has a
/// length, so that a thread reads and writes neighbouring memory.
pub(crate) fn cut(ops: &[CopyOp], coded: &[CodedOp], threads: &Threads) -> (Vec<Work>, usize) {
    let bytes = |op: &CopyOp| op.elements() * op.dst.dtype.size_bytes();
    let decoded = |op: &CodedOp| op.heads.len() * op.row_count() * op.lanes * 4;
    let total: usize = ops.iter().map(bytes).sum::<usize>() + coded.iter().map(decoded).sum::<usize>();
    let share = threads.share(total);
    let target = PIECE_BYTES.min(total / threads.count()).max(64 << 10);
    let parts = |bytes: usize, length: usize| {
        if share { bytes.div_ceil(target).clamp(1, length.max(1)) } else { 1 }
    };
    let mut work = Vec::with_capacity(ops.len() + coded.len());
    for (i, op) in ops.iter().enumerate() {
        let axis = op.extents.iter().position(|&n| n > 1).unwrap_or(2);
        let length = op.extents[axis];
        // Along lanes a piece ends on a multiple of 64 elements, so that no cache line has two writers.
        let grain = if axis == 2 { 64 } else { 1 };
        let step = length.div_ceil(parts(bytes(op), length)).next_multiple_of(grain);
        for start in (0..length).step_by(step.max(1)) {
            work.push(Work::Box(Piece { op: i, axis, start, count: step.min(length - start) }));
        }
    }
    for (i, op) in coded.iter().enumerate() {
        let length = op.row_count();
        let step = length.div_ceil(parts(decoded(op), length)).max(1);
        for start in (0..length).step_by(step) {
            work.push(Work::Rows { op: i, start, count: step.min(length - start) });
        }
    }
    (work, total)
}
