//! The hand-off itself: plan, copy, report.

use std::ops::Range;
use std::time::Instant;

use kvbaton_copy::{CopyOptions, CopyStats, OnOverflow, Threads, run, zero};
use kvbaton_layout::{Block, CacheSpec, Layout, LiveRows, Part, Resolved, TensorInfo};
use kvbaton_memory::resident_share;
use kvbaton_plan::{CopyPlan, plan};

use crate::cut;
use crate::{CacheView, Error};

/// A tensor to be filled.
#[derive(Debug)]
pub struct Target<'a> {
    /// Name, type, shape and strides.
    pub info: TensorInfo,
    /// Its memory, from the first element on.
    pub bytes: &'a mut [u8],
}

/// How to hand over.
#[derive(Clone, Copy, Debug, Default)]
pub struct HandoffOptions {
    /// What to do with values that the target's type cannot hold.
    pub on_overflow: OnOverflow,
    /// The targets hold nothing yet: zero what no row fills in the same go.
    pub fresh: bool,
}

/// What a target is to hold.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The target's layout.
    pub layout: &'a Layout,
    /// What the target keeps: its windows need not be the source's.
    pub cache: &'a CacheSpec,
    /// The target's rows.
    pub live: &'a LiveRows,
    /// Positions to copy; the others are there already. All when absent. Recurrent states are always copied.
    pub rows: Option<Range<i64>>,
    /// Layers of which all rows are copied all the same.
    pub whole: &'a [usize],
}

/// What filling a target did.
#[derive(Clone, Debug, PartialEq)]
pub struct Filled {
    /// Counts and seconds of the copy.
    pub stats: CopyStats,
    /// Seconds of planning.
    pub plan_seconds: f64,
    /// Whether elements changed their type.
    pub converted: bool,
    /// The share of the target's pages that existed before, where the system says.
    pub resident_share: Option<f64>,
}

impl Filled {
    /// What several fills did together.
    pub(crate) fn sum(parts: Vec<Filled>) -> Filled {
        let mut sum = Filled {
            stats: CopyStats::default(),
            plan_seconds: 0.0,
            converted: false,
            resident_share: Some(0.0),
        };
        let all: usize = parts.iter().map(|p| p.stats.bytes_written).sum();
        for part in parts {
            let weight = part.stats.bytes_written as f64 / all.max(1) as f64;
            sum.resident_share = sum.resident_share.zip(part.resident_share).map(|(a, b)| a + b * weight);
            sum.plan_seconds += part.plan_seconds;
            sum.converted |= part.converted;
            add_stats(&mut sum.stats, part.stats);
        }
        sum
    }
}

/// Adds what another copy did.
pub(crate) fn add_stats(sum: &mut CopyStats, one: CopyStats) {
    sum.seconds += one.seconds;
    sum.bytes_read += one.bytes_read;
    sum.bytes_written += one.bytes_written;
    sum.operations += one.operations;
    sum.overflow += one.overflow;
    sum.nan += one.nan;
    sum.infinity += one.infinity;
    sum.first = sum.first.take().or(one.first);
}

/// Fills `targets`, laid out as `layout`, with the rows of `view` that a cache of `live` rows holds.
///
/// Everything is checked before the first byte is written. Rows of the target beyond its live rows are left as
/// they are, unless the targets are fresh.
///
/// # Errors
///
/// When the targets do not fit the layout or the model, when the view lacks rows that the target wants, or when
/// values do not fit the target's type; in the last case the targets are partly written and must be dropped.
pub fn hand_off(
    view: &CacheView,
    layout: &Layout,
    live: &LiveRows,
    targets: &mut [Target<'_>],
    threads: &Threads,
    options: HandoffOptions,
) -> Result<Filled, Error> {
    let wanted = Wanted { layout, cache: view.cache(), live, rows: None, whole: &[] };
    hand_off_to(view, &wanted, targets, threads, options)
}

/// [`hand_off`] to a target that keeps other rows than its source, or has some of them already.
///
/// # Errors
///
/// As [`hand_off`].
pub fn hand_off_to(
    view: &CacheView,
    wanted: &Wanted<'_>,
    targets: &mut [Target<'_>],
    threads: &Threads,
    options: HandoffOptions,
) -> Result<Filled, Error> {
    let start = Instant::now();
    let infos: Vec<TensorInfo> = targets.iter().map(|t| t.info.clone()).collect();
    let (target, plan) = planned(view, wanted, &infos, None)?;
    let plan_seconds = start.elapsed().as_secs_f64();

    let resident_share = resident(targets);
    let start = Instant::now();
    if options.fresh {
        let mut free = Vec::new();
        for (index, bytes) in targets.iter_mut().map(|t| &mut *t.bytes).enumerate() {
            free.extend(unfilled(&target, index, bytes));
        }
        zero(free, threads);
    }
    let prepared = start.elapsed().as_secs_f64();
    let mut buffers: Vec<&mut [u8]> = targets.iter_mut().map(|t| &mut *t.bytes).collect();
    let options = CopyOptions { on_overflow: options.on_overflow };
    let mut stats = run(&plan, &view.bytes(), &mut buffers, threads, options)?;
    // The free rows are part of the fill: without them the target would not be ready.
    stats.seconds += prepared;
    Ok(Filled { stats, plan_seconds, converted: plan.converts(), resident_share })
}

/// Fills the tensor `one` of those that `infos` describe, of which only this one is there: for targets that show their
/// tensors one after the other.
///
/// # Errors
///
/// As [`hand_off_to`].
pub(crate) fn hand_off_one(
    view: &CacheView,
    wanted: &Wanted<'_>,
    infos: &[TensorInfo],
    one: usize,
    bytes: &mut [u8],
    threads: &Threads,
) -> Result<Filled, Error> {
    let start = Instant::now();
    let (_, plan) = planned(view, wanted, infos, Some(one))?;
    let plan_seconds = start.elapsed().as_secs_f64();
    let resident_share = resident_share(bytes, PROBES);
    let stats = run(&plan, &view.bytes(), &mut [bytes], threads, CopyOptions::default())?;
    Ok(Filled { stats, plan_seconds, converted: plan.converts(), resident_share })
}

/// The blocks of a target, or of its tensor `only` by itself, and the copies that fill them.
pub(crate) fn planned(
    view: &CacheView,
    wanted: &Wanted<'_>,
    infos: &[TensorInfo],
    only: Option<usize>,
) -> Result<(Resolved, CopyPlan), Error> {
    let mut target = wanted.layout.resolve(wanted.cache, infos, wanted.live)?;
    if let Some(rows) = &wanted.rows {
        let all = std::mem::take(&mut target.blocks);
        target.blocks = all.into_iter().filter_map(|block| missing(block, rows, wanted.whole)).collect();
    }
    if let Some(only) = only {
        target.blocks.retain(|block| block.tensor == only);
        target.blocks.iter_mut().for_each(|block| block.tensor = 0);
        target.tensors = vec![target.tensors.swap_remove(only)];
    }
    let plan = plan(&view.resolve()?, &target, wanted.cache)?;
    Ok((target, plan))
}

/// What is missing of a block of a target that has all but `rows`.
fn missing(block: Block, rows: &Range<i64>, whole: &[usize]) -> Option<Block> {
    let states = matches!(block.part, Part::Conv | Part::State);
    if states || whole.contains(&block.layer) { Some(block) } else { cut::clip(&block, rows.clone()) }
}

/// The bytes of a tensor that its blocks do not fill, as far as they fill whole stretches of rows. Of a tensor whose
/// rows are apart, all bytes: they are zeroed before rows are copied over them.
pub(crate) fn unfilled<'a>(target: &Resolved, tensor: usize, bytes: &'a mut [u8]) -> Vec<&'a mut [u8]> {
    let Some(free) = free_ranges(target, tensor, bytes.len()) else { return vec![bytes] };
    let (mut gaps, mut rest, mut at) = (Vec::new(), bytes, 0);
    for range in free {
        let (gap, after) = rest[range.start - at..].split_at_mut(range.len());
        gaps.push(gap);
        rest = after;
        at = range.end;
    }
    gaps
}

/// Where a tensor of `len` bytes is not filled by its blocks; `None` where its rows are apart.
pub(crate) fn free_ranges(target: &Resolved, tensor: usize, len: usize) -> Option<Vec<Range<usize>>> {
    let mut filled: Vec<Range<usize>> = Vec::new();
    for block in target.blocks.iter().filter(|b| b.tensor == tensor) {
        let [heads, rows, lanes] = block.extents();
        let [by_head, by_row, by_lane] = block.strides_bytes;
        let size = block.dtype.size_bytes();
        if (lanes > 1 && by_lane != size) || (rows > 1 && by_row != lanes * size) {
            return None;
        }
        filled.extend((0..heads).map(|head| {
            let start = block.offset_bytes + head * by_head;
            start..start + rows * lanes * size
        }));
    }
    filled.sort_unstable_by_key(|r| r.start);
    let (mut free, mut at) = (Vec::new(), 0);
    for stretch in filled {
        free.push(at..stretch.start.max(at));
        at = at.max(stretch.end);
    }
    free.push(at..len);
    free.retain(|gap| !gap.is_empty());
    Some(free)
}

/// Places at which all targets together are asked whether their page exists.
const PROBES: usize = 256;

/// The share of pages that exist, over all targets by their size.
fn resident(targets: &[Target<'_>]) -> Option<f64> {
    let probes = PROBES.div_ceil(targets.len().max(1));
    let (mut existing, mut all) = (0.0, 0.0);
    for target in targets {
        existing += resident_share(target.bytes, probes)? * target.bytes.len() as f64;
        all += target.bytes.len() as f64;
    }
    Some(if all > 0.0 { existing / all } else { 1.0 })
}
