//! Running a plan.

use std::sync::Mutex;
use std::time::Instant;

use kvbaton_kernels::{BoxMove, Elem, OnOverflow, Tally, move_box};
use kvbaton_layout::{DType, Part};
use kvbaton_plan::{CopyOp, CopyPlan};

use crate::Threads;
use crate::pieces::{Piece, cut};

/// How to run a plan.
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyOptions {
    /// What to do with values that the target's type cannot hold.
    pub on_overflow: OnOverflow,
}

/// A place in a cache.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Place {
    /// `key`, `value`, `conv` or `state`.
    pub tensor: Part,
    /// Layer.
    pub layer: usize,
    /// Head.
    pub head: usize,
    /// Position of the token.
    pub row: i64,
    /// Lane.
    pub lane: usize,
}

/// What a copy did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CopyStats {
    /// Seconds from the first byte to the last.
    pub seconds: f64,
    /// Bytes read.
    pub bytes_read: usize,
    /// Live bytes written.
    pub bytes_written: usize,
    /// Boxes copied.
    pub operations: usize,
    /// Finite values that the target's type could not hold.
    pub overflow: u64,
    /// Values that were not a number, as far as a conversion read them.
    pub nan: u64,
    /// Infinite values, as far as a conversion read them.
    pub infinity: u64,
    /// The first of them.
    pub first: Option<Place>,
}

/// A plan that could not be run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages name every field")]
pub enum CopyError {
    #[error("the plan has {want} {side} tensors, {have} buffers were given")]
    Buffers { side: &'static str, want: usize, have: usize },
    #[error("the plan needs {want_bytes} bytes of {side} tensor `{tensor}`, the buffer holds {have_bytes}")]
    Length { side: &'static str, tensor: String, want_bytes: usize, have_bytes: usize },
    #[error("no conversion from {from} to {to}")]
    Conversion { from: DType, to: DType },
    #[error(
        "{count} values do not fit {to}, the first in the {} of layer {}, head {}, row {}, lane {}",
        place.tensor, place.layer, place.head, place.row, place.lane
    )]
    Overflow { count: u64, to: DType, place: Place },
}

/// Copies what `plan` says from `sources` to `targets`, both in the order of the plan's tensors.
///
/// # Errors
///
/// When buffers are missing or too short, when a conversion does not exist (both before anything is written),
/// or when values overflow and the options make that an error; the targets are then partly written and must be
/// thrown away.
pub fn run(
    plan: &CopyPlan,
    sources: &[&[u8]],
    targets: &mut [&mut [u8]],
    threads: &Threads,
    options: CopyOptions,
) -> Result<CopyStats, CopyError> {
    let lengths: Vec<usize> = sources.iter().map(|s| s.len()).collect();
    check_buffers("source", plan.sources(), &lengths)?;
    let lengths: Vec<usize> = targets.iter().map(|t| t.len()).collect();
    check_buffers("target", plan.targets(), &lengths)?;
    let mut moves = Vec::with_capacity(plan.ops().len());
    for op in plan.ops() {
        moves.push(box_move(op)?);
        // What the unsafe block below relies on, whatever the plan promised.
        assert!(op.src.end_bytes(op.extents) <= sources[op.src.tensor].len(), "the plan stays in its source");
        assert!(op.dst.end_bytes(op.extents) <= targets[op.dst.tensor].len(), "the plan stays in its target");
    }
    let bases: Vec<TargetBase> = targets.iter_mut().map(|t| TargetBase(t.as_mut_ptr())).collect();
    let pieces = cut(plan.ops(), threads.count());
    let tallies: Mutex<Vec<(usize, Tally)>> = Mutex::new(Vec::new());

    let start = Instant::now();
    for zero in plan.zeros() {
        zero_box(zero, targets);
    }
    threads.for_each(pieces.len(), |i| {
        let Piece { op: number, axis, start, count } = pieces[i];
        let (op, mut mv) = (&plan.ops()[number], moves[number]);
        mv.extents[axis] = count;
        let src_at = op.src.offset_bytes + start * op.src.strides_bytes[axis];
        let dst_at = op.dst.offset_bytes + start * op.dst.strides_bytes[axis];
        let mut tally = Tally::default();
        let src = sources[op.src.tensor][src_at..].as_ptr();
        let base: &TargetBase = &bases[op.dst.tensor];
        // SAFETY: the box of the whole operation lies within both buffers (asserted above) and a piece lies within
        // its operation. Sources are shared slices and targets exclusive ones, so the two do not overlap. A plan
        // writes no byte twice (see `CopyPlan`) and pieces of one operation are disjoint, so no other thread touches
        // this piece's bytes; `targets` itself is not used until all threads are done.
        unsafe { move_box(&mv, src, base.0.add(dst_at), options.on_overflow, &mut tally) };
        if !tally.is_clean() {
            let mut origin = [0; 3];
            origin[axis] = start;
            tallies.lock().unwrap_or_else(|e| e.into_inner()).push((number, tally.offset_by(origin)));
        }
    });
    let seconds = start.elapsed().as_secs_f64();

    let mut stats = CopyStats {
        seconds,
        bytes_read: plan.bytes_read(),
        bytes_written: plan.bytes_written(),
        operations: plan.ops().len(),
        ..CopyStats::default()
    };
    let mut tallies = tallies.into_inner().unwrap_or_else(|e| e.into_inner());
    tallies.sort_unstable_by_key(|(op, tally)| (*op, tally.first()));
    let place = |op: &CopyOp, index| {
        let (head, row, lane) = op.place_of(index);
        Place { tensor: op.part, layer: op.layer, head, row, lane }
    };
    for (number, tally) in &tallies {
        stats.overflow += tally.overflow;
        stats.nan += tally.nan;
        stats.infinity += tally.infinity;
        if stats.first.is_none() {
            stats.first = tally.first().map(|index| place(&plan.ops()[*number], index));
        }
    }
    if options.on_overflow == OnOverflow::Error && stats.overflow > 0 {
        let first = tallies.iter().find_map(|(op, tally)| tally.first_overflow.map(|index| (*op, index)));
        if let Some((number, index)) = first {
            let op = &plan.ops()[number];
            let (count, to) = (stats.overflow, op.dst.dtype);
            return Err(CopyError::Overflow { count, to, place: place(op, index) });
        }
    }
    Ok(stats)
}

/// The start of a target buffer, shared by the threads that fill it.
struct TargetBase(*mut u8);

// SAFETY: threads write disjoint bytes through it, see `run`.
unsafe impl Sync for TargetBase {}

fn check_buffers(
    side: &'static str,
    tensors: &[kvbaton_layout::BoundTensor],
    lengths: &[usize],
) -> Result<(), CopyError> {
    if tensors.len() != lengths.len() {
        return Err(CopyError::Buffers { side, want: tensors.len(), have: lengths.len() });
    }
    for (tensor, &have_bytes) in tensors.iter().zip(lengths) {
        if tensor.len_bytes > have_bytes {
            let (tensor, want_bytes) = (tensor.name.clone(), tensor.len_bytes);
            return Err(CopyError::Length { side, tensor, want_bytes, have_bytes });
        }
    }
    Ok(())
}

fn elem(dtype: DType) -> Elem {
    match dtype {
        DType::Float16 => Elem::F16,
        DType::BFloat16 => Elem::BF16,
        DType::Float32 => Elem::F32,
        DType::Int8 => Elem::I8,
        _ => Elem::U32,
    }
}

fn box_move(op: &CopyOp) -> Result<BoxMove, CopyError> {
    let (src, dst) = (elem(op.src.dtype), elem(op.dst.dtype));
    if !src.can_become(dst) {
        return Err(CopyError::Conversion { from: op.src.dtype, to: op.dst.dtype });
    }
    Ok(BoxMove {
        extents: op.extents,
        src_strides: op.src.strides_bytes.map(usize::cast_signed),
        dst_strides: op.dst.strides_bytes.map(usize::cast_signed),
        src,
        dst,
    })
}

/// Zeroes a box; all element types read zero bytes as zero.
fn zero_box(zero: &kvbaton_plan::ZeroOp, targets: &mut [&mut [u8]]) {
    let [heads, rows, lanes] = zero.extents;
    let [by_head, by_row, by_lane] = zero.dst.strides_bytes;
    let target = &mut *targets[zero.dst.tensor];
    for (h, r, l) in (0..heads).flat_map(|h| (0..rows).flat_map(move |r| (0..lanes).map(move |l| (h, r, l))))
    {
        let at = zero.dst.offset_bytes + h * by_head + r * by_row + l * by_lane;
        target[at..at + zero.dst.dtype.size_bytes()].fill(0);
    }
}
