//! The hand-off itself: plan, copy, report.

use std::time::Instant;

use kvbaton_copy::{CopyOptions, CopyStats, OnOverflow, Threads, run, zero};
use kvbaton_layout::{CacheSpec, DType, LayerSpec, Layout, LiveRows, TensorInfo};
use kvbaton_memory::{advise_huge_pages, resident_share};
use kvbaton_plan::plan;

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
    /// The targets hold nothing yet and are those of [`mlx_tensors`]: zero their free rows in the same go, and
    /// take huge pages for memory that was never touched.
    pub fresh: bool,
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
    /// Whether the system agreed to huge pages.
    pub huge_pages: bool,
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
    let start = Instant::now();
    let infos: Vec<TensorInfo> = targets.iter().map(|t| t.info.clone()).collect();
    let target = layout.resolve(view.cache(), &infos, live)?;
    let plan = plan(&view.resolve()?, &target, view.cache())?;
    let plan_seconds = start.elapsed().as_secs_f64();

    let resident_share = resident(targets);
    let start = Instant::now();
    let mut huge_pages = false;
    if options.fresh {
        if resident_share.is_none_or(|share| share < 0.5) {
            for target in targets.iter_mut() {
                huge_pages |= advise_huge_pages(target.bytes);
            }
        }
        zero(targets.iter_mut().flat_map(|t| free_rows(t, live.tokens_seen)).collect(), threads);
    }
    let prepared = start.elapsed().as_secs_f64();
    let mut buffers: Vec<&mut [u8]> = targets.iter_mut().map(|t| &mut *t.bytes).collect();
    let options = CopyOptions { on_overflow: options.on_overflow };
    let mut stats = run(&plan, &view.bytes(), &mut buffers, threads, options)?;
    // The free rows are part of the fill: without them the target would not be ready.
    stats.seconds += prepared;
    Ok(Filled { stats, plan_seconds, converted: plan.converts(), resident_share, huge_pages })
}

/// The share of pages that exist, over all targets by their size.
fn resident(targets: &[Target<'_>]) -> Option<f64> {
    let (mut existing, mut all) = (0.0, 0.0);
    for target in targets {
        existing += resident_share(target.bytes)? * target.bytes.len() as f64;
        all += target.bytes.len() as f64;
    }
    Some(if all > 0.0 { existing / all } else { 1.0 })
}

/// The rows of a packed `(1, kv_heads, capacity, head_dim)` tensor from `rows` on, a range a head.
fn free_rows<'a>(target: &'a mut Target<'_>, rows: usize) -> Vec<&'a mut [u8]> {
    let row_bytes = target.info.strides_bytes.get(2).copied().unwrap_or(0);
    let capacity = target.info.shape.get(2).copied().unwrap_or(0);
    if capacity * row_bytes == 0 {
        return Vec::new();
    }
    let used = rows.min(capacity) * row_bytes;
    target.bytes.chunks_mut(capacity * row_bytes).map(|head| &mut head[used..]).collect()
}

/// The tensors that mlx-lm's caches want for `rows` rows: for each layer that keeps one, keys and values of
/// shape `(1, kv_heads, capacity, head_dim)`.
///
/// A full layer gets at least one and at least `spare` free rows, rounded up to mlx-lm's step of 256, so that its
/// next steps write in place. A window gets its own size: more would be silently wrong.
pub fn mlx_tensors(cache: &CacheSpec, rows: usize, spare: usize, dtype: DType) -> Vec<TensorInfo> {
    let mut tensors = Vec::new();
    for (layer, spec) in cache.layers.iter().enumerate() {
        let Some((heads, key_dim, value_dim)) = spec.attention() else { continue };
        let capacity = match spec {
            LayerSpec::Sliding { window, .. } => window.size,
            _ if spare == 0 => rows,
            _ => (rows + spare).next_multiple_of(256),
        };
        for (name, dim) in [("keys", key_dim), ("values", value_dim)] {
            let shape = [1, heads, capacity, dim];
            tensors.push(TensorInfo::contiguous(format!("{name}_{layer}"), dtype, &shape));
        }
    }
    tensors
}
