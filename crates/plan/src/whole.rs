//! The plan as a whole, and what it costs.

use kvbaton_layout::BoundTensor;
use serde::Serialize;

use crate::boxes::{CodedOp, CopyOp, ZeroOp};

/// What a hand-off copies. Made by [`crate::plan`] alone, which proves that every box lies within its tensors
/// and that no two boxes write the same byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    pub(crate) ops: Vec<CopyOp>,
    pub(crate) coded: Vec<CodedOp>,
    pub(crate) zeros: Vec<ZeroOp>,
    pub(crate) sources: Vec<BoundTensor>,
    pub(crate) targets: Vec<BoundTensor>,
}

/// What a plan costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// Boxes copied and coded.
    pub operations: usize,
    /// Bytes read from the source.
    pub bytes_read: usize,
    /// Live bytes written to the target.
    pub bytes_written: usize,
    /// Bytes of the target that are zeroed.
    pub bytes_zeroed: usize,
    /// Fewest bytes that lie side by side on both sides of a copy; absent where nothing is copied.
    pub smallest_run_bytes: Option<usize>,
    /// Bytes read, written and zeroed, at the speed that was given.
    pub seconds: f64,
}

impl CopyPlan {
    /// The copies, in the order of the target's blocks.
    pub fn ops(&self) -> &[CopyOp] {
        &self.ops
    }

    /// Rows to be coded anew.
    pub fn coded(&self) -> &[CodedOp] {
        &self.coded
    }

    /// Boxes of the target to be zeroed.
    pub fn zeros(&self) -> &[ZeroOp] {
        &self.zeros
    }

    /// Boxes copied and coded.
    pub fn operations(&self) -> usize {
        self.ops.len() + self.coded.len()
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
        let moved: usize = self.ops.iter().map(|op| op.elements() * op.src.dtype.size_bytes()).sum();
        let side = |op: &CodedOp| -> usize {
            op.sources.iter().map(|s| op.side_bytes(&s.coded, s.heads.len())).sum()
        };
        moved + self.coded.iter().map(side).sum::<usize>()
    }

    /// Live bytes written to the target.
    pub fn bytes_written(&self) -> usize {
        let moved: usize = self.ops.iter().map(|op| op.elements() * op.dst.dtype.size_bytes()).sum();
        moved + self.coded.iter().map(|op| op.side_bytes(&op.dst, op.heads.len())).sum::<usize>()
    }

    /// Whether any copy changes the element type or the encoding.
    pub fn converts(&self) -> bool {
        !self.coded.is_empty() || self.ops.iter().any(|op| op.src.dtype != op.dst.dtype)
    }

    /// What it costs on a machine that reads and writes `gigabytes_per_second` (10⁹ bytes, read and written).
    ///
    /// An estimate of the time that memory takes; many short runs and coding take longer.
    pub fn cost(&self, gigabytes_per_second: f64) -> Cost {
        let zeroed = |z: &ZeroOp| z.extents.iter().product::<usize>() * z.dst.dtype.size_bytes();
        let (bytes_read, bytes_written) = (self.bytes_read(), self.bytes_written());
        let bytes_zeroed = self.zeros.iter().map(zeroed).sum();
        Cost {
            operations: self.operations(),
            bytes_read,
            bytes_written,
            bytes_zeroed,
            smallest_run_bytes: self.ops.iter().map(CopyOp::run_bytes).min(),
            seconds: (bytes_read + bytes_written + bytes_zeroed) as f64 / (gigabytes_per_second * 1e9),
        }
    }
}
