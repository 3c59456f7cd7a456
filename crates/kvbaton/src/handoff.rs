//! The hand-off itself: plan, copy, report.

use kvbaton_copy::{CopyOptions, CopyStats, Threads, run};
use kvbaton_layout::{CacheSpec, DType, LayerSpec, Layout, LiveRows, TensorInfo};
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

/// What filling a target did.
#[derive(Clone, Debug, PartialEq)]
pub struct Filled {
    /// Counts and seconds of the copy.
    pub stats: CopyStats,
    /// Seconds of planning.
    pub plan_seconds: f64,
    /// Whether elements changed their type.
    pub converted: bool,
}

/// Fills `targets`, laid out as `layout`, with the rows of `view` that a cache of `live` rows holds.
///
/// Everything is checked before the first byte is written. Rows of the target beyond its live rows are left as
/// they are.
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
    options: CopyOptions,
) -> Result<Filled, Error> {
    let start = std::time::Instant::now();
    let infos: Vec<TensorInfo> = targets.iter().map(|t| t.info.clone()).collect();
    let target = layout.resolve(view.cache(), &infos, live)?;
    let plan = plan(&view.resolve()?, &target, view.cache())?;
    let plan_seconds = start.elapsed().as_secs_f64();
    let mut buffers: Vec<&mut [u8]> = targets.iter_mut().map(|t| &mut *t.bytes).collect();
    let stats = run(&plan, &view.bytes(), &mut buffers, threads, options)?;
    Ok(Filled { stats, plan_seconds, converted: plan.converts() })
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
