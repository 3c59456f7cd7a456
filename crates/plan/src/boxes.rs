//! The plan itself: boxes of elements that move.

use std::fmt::Write as _;
use std::ops::Range;

use kvbaton_layout::{BoundTensor, DType, Part};

/// One side of a copy: where its first element is and how to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the tensor.
    pub tensor: usize,
    /// The first element.
    pub offset_bytes: usize,
    /// Strides along the three axes of the box.
    pub strides_bytes: [usize; 3],
    /// Type of the elements.
    pub dtype: DType,
}

impl Place {
    /// One past the last byte of a box of `extents`.
    pub fn end_bytes(&self, extents: [usize; 3]) -> usize {
        let reach: usize = extents.iter().zip(self.strides_bytes).map(|(n, s)| n.saturating_sub(1) * s).sum();
        self.offset_bytes + reach + self.dtype.size_bytes()
    }
}

/// One copy: a box of up to three axes, from one tensor to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyOp {
    /// The layer it belongs to.
    pub layer: usize,
    /// What it moves.
    pub part: Part,
    /// Heads, rows and lanes it moves, as the model counts them.
    pub heads: Range<usize>,
    /// Positions of the rows.
    pub rows: Range<i64>,
    /// Lanes.
    pub lanes: Range<usize>,
    /// Elements along the three axes after merging; an axis that was merged away has 1.
    pub extents: [usize; 3],
    /// Where they come from.
    pub src: Place,
    /// Where they go.
    pub dst: Place,
}

impl CopyOp {
    /// Elements that move.
    pub fn elements(&self) -> usize {
        self.extents.iter().product()
    }

    /// The (head, row position, lane) of the element at `index` of the merged box.
    pub fn place_of(&self, index: [usize; 3]) -> (usize, i64, usize) {
        let linear = (index[0] * self.extents[1] + index[1]) * self.extents[2] + index[2];
        let (lanes, rows) = (self.lanes.len(), (self.rows.end - self.rows.start).unsigned_abs() as usize);
        let row = i64::try_from(linear / lanes % rows).unwrap_or(0);
        (self.heads.start + linear / lanes / rows, self.rows.start + row, self.lanes.start + linear % lanes)
    }

    /// Merges axes that are contiguous on both sides. Row-major order of the elements is kept.
    pub(crate) fn merged(mut self) -> CopyOp {
        for outer in [1, 0] {
            let inner = if outer == 1 || self.extents[1] > 1 { outer + 1 } else { 2 };
            let joins = |p: &Place, e: &[usize; 3]| {
                e[outer] == 1 || p.strides_bytes[outer] == e[inner] * p.strides_bytes[inner]
            };
            if joins(&self.src, &self.extents) && joins(&self.dst, &self.extents) {
                self.extents[inner] *= self.extents[outer];
                self.extents[outer] = 1;
            }
        }
        self
    }
}

/// Elements of the target that no source row covers and that must read as zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZeroOp {
    /// The layer it belongs to.
    pub layer: usize,
    /// What it would have held.
    pub part: Part,
    /// Positions of the rows.
    pub rows: Range<i64>,
    /// Elements along heads, rows and lanes.
    pub extents: [usize; 3],
    /// Where they are.
    pub dst: Place,
}

/// What a hand-off copies. Made by [`crate::plan`] alone, which proves that every box lies within its tensors
/// and that no two boxes write the same byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    pub(crate) ops: Vec<CopyOp>,
    pub(crate) zeros: Vec<ZeroOp>,
    pub(crate) sources: Vec<BoundTensor>,
    pub(crate) targets: Vec<BoundTensor>,
}

impl CopyPlan {
    /// The copies, in the order of the target's blocks.
    pub fn ops(&self) -> &[CopyOp] {
        &self.ops
    }

    /// Boxes of the target to be zeroed.
    pub fn zeros(&self) -> &[ZeroOp] {
        &self.zeros
    }

    /// The tensors that copies read.
    pub fn sources(&self) -> &[BoundTensor] {
        &self.sources
    }

    /// The tensors that copies write.
    pub fn targets(&self) -> &[BoundTensor] {
        &self.targets
    }

    /// Bytes read from the source.
    pub fn bytes_read(&self) -> usize {
        self.ops.iter().map(|op| op.elements() * op.src.dtype.size_bytes()).sum()
    }

    /// Live bytes written to the target.
    pub fn bytes_written(&self) -> usize {
        self.ops.iter().map(|op| op.elements() * op.dst.dtype.size_bytes()).sum()
    }

    /// Whether any copy changes the element type.
    pub fn converts(&self) -> bool {
        self.ops.iter().any(|op| op.src.dtype != op.dst.dtype)
    }

    /// One line a copy: what moves, the box, and both places.
    pub fn explain(&self) -> String {
        let mut text = String::new();
        for op in &self.ops {
            let side = |p: &Place, tensors: &[BoundTensor]| {
                format!(
                    "{}+{} step {:?} {}",
                    tensors[p.tensor].name, p.offset_bytes, p.strides_bytes, p.dtype
                )
            };
            let _ = writeln!(
                text,
                "layer {:>3} {:<6} heads {}..{} rows {}..{} lanes {}..{}: {:?} {} -> {}",
                op.layer,
                op.part.to_string(),
                op.heads.start,
                op.heads.end,
                op.rows.start,
                op.rows.end,
                op.lanes.start,
                op.lanes.end,
                op.extents,
                side(&op.src, &self.sources),
                side(&op.dst, &self.targets),
            );
        }
        for zero in &self.zeros {
            let _ = writeln!(
                text,
                "layer {:>3} {:<6} rows {}..{}: zeroed in {}",
                zero.layer,
                zero.part.to_string(),
                zero.rows.start,
                zero.rows.end,
                self.targets[zero.dst.tensor].name,
            );
        }
        text
    }
}
