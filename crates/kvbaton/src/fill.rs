//! Filling a target that may keep other rows than its source, or has some of them already.

use std::ops::Range;
use std::time::Instant;

use kvbaton_copy::{CopyOptions, Threads, run};
use kvbaton_layout::{CacheSpec, Layout, LiveRows, Part, TensorInfo};
use kvbaton_plan::plan;

use crate::cut;
use crate::{CacheView, Error, HandoffReport, Target};

/// What a target is to hold.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The target's layout.
    pub layout: &'a Layout,
    /// What the target keeps, where its windows are not the source's.
    pub cache: &'a CacheSpec,
    /// The target's rows.
    pub live: &'a LiveRows,
    /// Positions to copy; the others are there already. All when absent. Recurrent states are always copied.
    pub rows: Option<Range<i64>>,
    /// Layers of which all rows are copied all the same.
    pub whole: &'a [usize],
}

/// Fills `targets` with what is wanted of `view`, and says what it did; `seconds` are those of planning and copying.
///
/// Everything is checked before the first byte is written.
///
/// # Errors
///
/// When the targets do not fit their layout, when the view lacks rows that are wanted, or when values do not fit the
/// target's type; in the last case the targets are partly written and must be dropped.
pub fn fill(
    view: &CacheView,
    wanted: &Wanted<'_>,
    targets: &mut [Target<'_>],
    threads: &Threads,
    options: CopyOptions,
) -> Result<HandoffReport, Error> {
    let start = Instant::now();
    let infos: Vec<TensorInfo> = targets.iter().map(|t| t.info.clone()).collect();
    let mut target = wanted.layout.resolve(wanted.cache, &infos, wanted.live)?;
    if let Some(rows) = &wanted.rows {
        let all = std::mem::take(&mut target.blocks);
        target.blocks = all
            .into_iter()
            .filter_map(|block| {
                let states = matches!(block.part, Part::Conv | Part::State);
                let kept = states || wanted.whole.contains(&block.layer);
                if kept { Some(block) } else { cut::clip(&block, rows.clone()) }
            })
            .collect();
    }
    let plan = plan(&view.resolve()?, &target, wanted.cache)?;
    let plan_seconds = start.elapsed().as_secs_f64();
    let mut buffers: Vec<&mut [u8]> = targets.iter_mut().map(|t| &mut *t.bytes).collect();
    let stats = run(&plan, &view.bytes(), &mut buffers, threads, options)?;
    let rows = match &wanted.rows {
        Some(rows) => usize::try_from(rows.end - rows.start).unwrap_or(0),
        None => wanted.live.tokens_seen,
    };
    Ok(HandoffReport::of_copy(&stats, plan.converts(), rows, plan_seconds + stats.seconds))
}
