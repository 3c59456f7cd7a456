//! Cutting a plan into pieces of work.

use kvbaton_plan::CopyOp;

/// A part of one copy: `count` steps of one axis, from `start` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) op: usize,
    pub(crate) axis: usize,
    pub(crate) start: usize,
    pub(crate) count: usize,
}

/// Below this a second thread costs more to wake than it saves.
const ALONE_BYTES: usize = 512 << 10;
/// Small enough to balance threads, large enough that taking a piece is free.
const PIECE_BYTES: usize = 1 << 20;

/// Cuts `ops` so that `threads` can share them. Each piece runs along the outermost axis that has a length,
/// so that a thread reads and writes neighbouring memory.
pub(crate) fn cut(ops: &[CopyOp], threads: usize) -> Vec<Piece> {
    let bytes = |op: &CopyOp| op.elements() * op.dst.dtype.size_bytes();
    let total: usize = ops.iter().map(bytes).sum();
    let share = threads > 1 && total > ALONE_BYTES;
    let target = PIECE_BYTES.min(total / threads.max(1)).max(64 << 10);
    let mut pieces = Vec::with_capacity(ops.len());
    for (i, op) in ops.iter().enumerate() {
        let axis = op.extents.iter().position(|&n| n > 1).unwrap_or(2);
        let length = op.extents[axis];
        let parts = if share { bytes(op).div_ceil(target).clamp(1, length.max(1)) } else { 1 };
        // Along lanes a piece ends on a multiple of 64 elements, so that no cache line has two writers.
        let grain = if axis == 2 { 64 } else { 1 };
        let step = length.div_ceil(parts).next_multiple_of(grain);
        let mut start = 0;
        while start < length {
            let count = step.min(length - start);
            pieces.push(Piece { op: i, axis, start, count });
            start += count;
        }
    }
    pieces
}
