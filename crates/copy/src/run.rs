//! Running a plan.

use std::sync::Mutex;
use std::time::Instant;

use kvbaton_kernels::{BoxMove, Elem, OnOverflow, Tally, Writing, move_box};
use kvbaton_layout::{DType, Part};
use kvbaton_memory::is_resident;
use kvbaton_plan::{CopyOp, CopyPlan, ZeroOp};

use crate::Threads;
use crate::coded::Coder;
use crate::pieces::{Piece, Work, cut};

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
    #[error("{encoding} elements cannot be coded: {problem}")]
    Encoding { encoding: kvbaton_layout::Encoding, problem: String },
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
    let moves = plan.ops().iter().map(box_move).collect::<Result<Vec<_>, _>>()?;
    let coders = plan.coded().iter().map(Coder::new).collect::<Result<Vec<_>, _>>()?;
    check_bounds(plan, sources, targets);
    let (work, bytes) = cut(plan.ops(), plan.coded(), threads);
    let tallies: Mutex<Vec<(Operation, Tally)>> = Mutex::new(Vec::new());

    let start = Instant::now();
    let past_caches = plan.bytes_written() >= PAST_CACHES_FROM && !is_new(plan, targets);
    let writing = Writing { on_overflow: options.on_overflow, past_caches };
    for zero in plan.zeros() {
        zero_box(zero, targets);
    }
    let bases: Vec<TargetBase> = targets.iter_mut().map(|t| TargetBase(t.as_mut_ptr())).collect();
    threads.for_each(work.len(), bytes, |i| {
        let mut tally = Tally::default();
        let mut origin = [0; 3];
        let operation = match work[i] {
            Work::Box(Piece { op: number, axis, start, count }) => {
                let (op, mut mv) = (&plan.ops()[number], moves[number]);
                mv.extents[axis] = count;
                origin[axis] = start;
                let src_at = op.src.offset_bytes + start * op.src.strides_bytes[axis];
                let dst_at = op.dst.offset_bytes + start * op.dst.strides_bytes[axis];
                let src = sources[op.src.tensor][src_at..].as_ptr();
                let base: &TargetBase = &bases[op.dst.tensor];
                // SAFETY: the box of the whole operation lies within both buffers (`check_bounds`) and a piece
                // lies within its operation. Sources are shared slices and targets exclusive ones, so the two do
                // not overlap. A plan writes no byte twice (see `CopyPlan`) and pieces of one operation are
                // disjoint, so no other thread touches this piece's bytes; `targets` itself is not used until
                // all threads are done.
                unsafe { move_box(&mv, src, base.0.add(dst_at), writing, &mut tally) };
                Operation::Box(number)
            }
            Work::Rows { op, start, count } => {
                origin[1] = start;
                // SAFETY: as above, for all boxes of the operation; rows of one operation are disjoint.
                unsafe { coders[op].code(start, count, sources, &bases, writing, &mut tally) };
                Operation::Coded(op)
            }
        };
        if !tally.is_clean() {
            tallies.lock().unwrap_or_else(|e| e.into_inner()).push((operation, tally.offset_by(origin)));
        }
    });
    let seconds = start.elapsed().as_secs_f64();

    let mut tallies = tallies.into_inner().unwrap_or_else(|e| e.into_inner());
    tallies.sort_unstable_by_key(|(operation, tally)| (*operation, tally.first()));
    let mut stats = CopyStats {
        seconds,
        bytes_read: plan.bytes_read(),
        bytes_written: plan.bytes_written(),
        operations: plan.operations(),
        ..CopyStats::default()
    };
    for (operation, tally) in &tallies {
        stats.overflow += tally.overflow;
        stats.nan += tally.nan;
        stats.infinity += tally.infinity;
        if stats.first.is_none() {
            stats.first = tally.first().map(|index| operation.place(plan, index));
        }
    }
    if options.on_overflow == OnOverflow::Error && stats.overflow > 0 {
        let first = tallies.iter().find_map(|(op, tally)| tally.first_overflow.map(|index| (*op, index)));
        if let Some((operation, index)) = first {
            let (count, to) = (stats.overflow, operation.target(plan));
            return Err(CopyError::Overflow { count, to, place: operation.place(plan, index) });
        }
    }
    Ok(stats)
}

/// An operation of a plan, in the order in which its findings are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Box(usize),
    Coded(usize),
}

impl Operation {
    /// The place of the element at `index` of the operation.
    fn place(self, plan: &CopyPlan, index: [usize; 3]) -> Place {
        match self {
            Operation::Box(number) => {
                let op = &plan.ops()[number];
                let (head, row, lane) = op.place_of(index);
                Place { tensor: op.part, layer: op.layer, head, row, lane }
            }
            Operation::Coded(number) => {
                let op = &plan.coded()[number];
                let row = op.rows.start + i64::try_from(index[1]).unwrap_or(0);
                let head = op.heads.start + index[0];
                Place { tensor: op.part, layer: op.layer, head, row, lane: index[2] }
            }
        }
    }

    /// The type that values are rounded to.
    fn target(self, plan: &CopyPlan) -> DType {
        match self {
            Operation::Box(number) => plan.ops()[number].dst.dtype,
            Operation::Coded(number) => {
                let dst = &plan.coded()[number].dst;
                dst.scale.unwrap_or(dst.elements).dtype
            }
        }
    }
}

/// Bytes from which targets are written past the caches: a decoder's next step reads them after weights and other layers, and
/// finds no more than this in a near cache.
const PAST_CACHES_FROM: usize = 1 << 20;

/// Bytes of a plan for each place of its targets that is asked whether its page exists, and the most of such places: asking
/// must cost nothing beside the copy.
const BYTES_A_PROBE: usize = 1 << 20;
const MOST_PROBES: usize = 8;

/// Whether what `plan` writes was never written before: what most of some places say, spread over its operations.
fn is_new(plan: &CopyPlan, targets: &[&mut [u8]]) -> bool {
    let (boxes, rows) = (plan.ops(), plan.coded());
    let all = boxes.len() + rows.len();
    let place = |n: usize| match boxes.get(n) {
        Some(op) => (&op.dst, op.extents),
        None => {
            let op = &rows[n - boxes.len()];
            (&op.dst.elements, [op.heads.len(), op.row_count(), 1])
        }
    };
    let probes = MOST_PROBES.min(plan.bytes_written() / BYTES_A_PROBE).min(all);
    let missing = |&probe: &usize| {
        let (place, extents) = place(probe * all / probes);
        // The middle: the page of a box's first byte may hold its neighbour's last.
        let middle: usize = (0..3).map(|axis| extents[axis] / 2 * place.strides_bytes[axis]).sum();
        is_resident(targets[place.tensor], place.offset_bytes + middle) == Some(false)
    };
    2 * (0..probes).filter(missing).count() > probes
}

/// The start of a target buffer, shared by the threads that fill it.
pub(crate) struct TargetBase(pub(crate) *mut u8);

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

/// What the unsafe blocks rely on, whatever the plan promised: every box lies within its buffer.
fn check_bounds(plan: &CopyPlan, sources: &[&[u8]], targets: &[&mut [u8]]) {
    let source = |p: &kvbaton_plan::Place, extents| {
        assert!(p.end_bytes(extents) <= sources[p.tensor].len(), "the plan stays in its source");
    };
    let target = |p: &kvbaton_plan::Place, extents| {
        assert!(p.end_bytes(extents) <= targets[p.tensor].len(), "the plan stays in its target");
    };
    for op in plan.ops() {
        source(&op.src, op.extents);
        target(&op.dst, op.extents);
    }
    for op in plan.coded() {
        for side in &op.sources {
            op.boxes(&side.coded, side.heads.len(), op.row_count()).for_each(|(_, p, e)| source(&p, e));
        }
        op.boxes(&op.dst, op.heads.len(), op.row_count()).for_each(|(_, p, e)| target(&p, e));
    }
}

pub(crate) fn elem(dtype: DType) -> Elem {
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
fn zero_box(zero: &ZeroOp, targets: &mut [&mut [u8]]) {
    let [heads, rows, lanes] = zero.extents;
    let [by_head, by_row, by_lane] = zero.dst.strides_bytes;
    let (target, size) = (&mut *targets[zero.dst.tensor], zero.dst.dtype.size_bytes());
    for (head, row) in (0..heads).flat_map(|h| (0..rows).map(move |r| (h, r))) {
        let at = zero.dst.offset_bytes + head * by_head + row * by_row;
        if by_lane == size {
            target[at..at + lanes * size].fill(0);
        } else {
            (0..lanes).map(|l| at + l * by_lane).for_each(|at| target[at..at + size].fill(0));
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use kvbaton_layout::{CacheSpec, LiveRows, Sizes, presets};
    use kvbaton_memory::Buffer;

    use super::*;

    /// A layer of 16 MiB a tensor, of whose rows the first half is live.
    #[test]
    fn memory_is_new_until_what_is_written_was_written_before() {
        let cache = CacheSpec::full(1, 8, 128);
        let layout = presets::get("mlx-lm").expect("a preset");
        let sizes = Sizes { capacity: 8192, dtype: DType::Float16, block_rows: 16, row_stride_bytes: None };
        let tensors = layout.tensors(&cache, &sizes).expect("its tensors");
        let side = layout.resolve(&cache, &tensors, &LiveRows::seen(4096)).expect("a side");
        let plan = kvbaton_plan::plan(&side, &side, &cache).expect("a plan");
        let mut buffers: Vec<Buffer> = tensors.iter().map(|t| Buffer::zeroed(t.len_bytes)).collect();
        let seen = |buffers: &mut [Buffer]| {
            let targets: Vec<&mut [u8]> = buffers.iter_mut().map(|b| &mut **b).collect();
            is_new(&plan, &targets)
        };
        assert!(seen(&mut buffers));
        buffers.iter_mut().for_each(|b| b.fill(0));
        assert!(!seen(&mut buffers));
    }
}
