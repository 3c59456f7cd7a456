//! A shorter past: which rows of a cache are left when its last tokens are taken away.
//!
//! Rows stay where they are. Only what counts as live changes, so a trimmed view costs nothing and the rows it no
//! longer shows are still there for other views.

use std::ops::Range;

use kvbaton_layout::{Block, CacheSpec, LayerSpec, Part, Resolved, Role, TensorInfo, Window};

use crate::{CacheView, Error, ErrorKind};

/// A cut through a cache, after so many tokens.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    tokens_seen: usize,
    /// The cache with windows as wide as they must be to show rows that only the shorter past attends to, where
    /// the memory still has them.
    reach: CacheSpec,
}

impl Cut {
    /// Cuts `view` after `tokens_seen` tokens, which is less than it has seen.
    pub(crate) fn new(view: &CacheView, tokens_seen: usize) -> Result<Cut, Error> {
        let cache = view.cache();
        let dropped = view.live().tokens_seen - tokens_seen;
        if let Some(layer) = cache.layers.iter().position(|l| matches!(l, LayerSpec::Recurrent { .. })) {
            let message = format!(
                "tokens cannot be taken from layer {layer}: its recurrent state holds all {} of them",
                view.tokens_seen()
            );
            return Err(Error::new(ErrorKind::Usage, message)
                .hint("prefill the shorter prompt, or keep a copy of the cache at that length")
                .field("layer", layer));
        }
        let cut = Cut { tokens_seen, reach: reach(view, dropped) };
        let infos: Vec<TensorInfo> = view.tensors().iter().map(|t| t.info.clone()).collect();
        let rest = cut.apply(view.layout().resolve(&cut.reach, &infos, view.live())?, cache);
        for (layer, spec) in cache.layers.iter().enumerate() {
            let Some(window) = spec.window() else { continue };
            for part in [Part::Key, Part::Value] {
                if let Some(lost) = first_lost(&runs(&rest, layer, part), window, tokens_seen) {
                    return Err(Error::new(
                        ErrorKind::Usage,
                        format!(
                            "cannot go back to {tokens_seen} of {} tokens: the window of {} of layer {layer} no \
                             longer holds row {lost}, which the next token would read",
                            view.tokens_seen(),
                            window.size
                        ),
                    )
                    .hint("prefill the shorter prompt, or keep a copy of the cache at that length")
                    .field("layer", layer)
                    .field("row", lost));
                }
            }
        }
        Ok(cut)
    }

    pub(crate) fn tokens_seen(&self) -> usize {
        self.tokens_seen
    }

    /// The cache spec that shows all rows that may be left.
    pub(crate) fn reach(&self) -> &CacheSpec {
        &self.reach
    }

    /// What is left of `all`.
    pub(crate) fn apply(&self, all: Resolved, cache: &CacheSpec) -> Resolved {
        let mut blocks = Vec::with_capacity(all.blocks.len());
        for block in &all.blocks {
            let window = cache.layers.get(block.layer).and_then(LayerSpec::window);
            blocks
                .extend(attended(window, self.tokens_seen).into_iter().filter_map(|rows| clip(block, rows)));
        }
        Resolved { blocks, tokens_seen: self.tokens_seen, ..all }
    }
}

/// The rows that a cache of `tokens_seen` tokens counts as live: those that stay, and the others.
fn attended(window: Option<Window>, tokens_seen: usize) -> [Range<i64>; 2] {
    let end = signed(tokens_seen);
    match window.filter(|w| tokens_seen > w.size) {
        None => [i64::MIN..0, 0..end],
        Some(window) => {
            let newest = signed(tokens_seen - window.size.saturating_sub(window.keep));
            [0..signed(window.keep).min(newest), newest..end]
        }
    }
}

/// The first row that the token at position `tokens_seen` reads and `runs` lack. That token itself takes one of the
/// window's places.
fn first_lost(runs: &[Range<i64>], window: Window, tokens_seen: usize) -> Option<i64> {
    let moving = signed(window.size.saturating_sub(window.keep));
    let end = signed(tokens_seen);
    let oldest = (end - moving + 1).max(0);
    let held = |row: &i64| runs.iter().any(|run| run.contains(row));
    (0..signed(window.keep).min(end)).chain(oldest..end).find(|row| !held(row))
}

/// The part of `block` whose rows are in `rows`.
pub(crate) fn clip(block: &Block, rows: Range<i64>) -> Option<Block> {
    let clipped = block.rows.start.max(rows.start)..block.rows.end.min(rows.end);
    let down = usize::try_from(clipped.start - block.rows.start).ok()?;
    (clipped.start < clipped.end).then(|| Block {
        offset_bytes: block.offset_bytes + down * block.strides_bytes[1],
        rows: clipped,
        ..block.clone()
    })
}

/// The cache with each window widened by `more` rows, where the layout can show that many.
fn reach(view: &CacheView, more: usize) -> CacheSpec {
    let infos: Vec<TensorInfo> = view.tensors().iter().map(|t| t.info.clone()).collect();
    let shows = |spec: &CacheSpec| view.layout().resolve(spec, &infos, view.live()).is_ok();
    let mut wide = view.cache().clone();
    wide.layers.iter_mut().for_each(|l| widen(l, more));
    if shows(&wide) {
        return wide;
    }
    let mut some = view.cache().clone();
    for layer in 0..some.layers.len() {
        let own = some.layers[layer];
        widen(&mut some.layers[layer], more);
        if some.layers[layer] != own && !shows(&some) {
            some.layers[layer] = own;
        }
    }
    some
}

fn widen(layer: &mut LayerSpec, more: usize) {
    if let LayerSpec::Sliding { window, .. } = layer {
        window.size += more;
    }
}

/// Rows of one part of one layer, oldest first, in runs of consecutive positions.
pub(crate) fn runs(resolved: &Resolved, layer: usize, part: Part) -> Vec<Range<i64>> {
    let mut rows: Vec<Range<i64>> =
        resolved.part(layer, part).filter(|b| b.role == Role::Elements).map(|b| b.rows.clone()).collect();
    rows.sort_unstable_by_key(|r| r.start);
    let mut runs: Vec<Range<i64>> = Vec::new();
    for range in rows {
        match runs.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => runs.push(range),
        }
    }
    runs
}

/// Rows in a range.
pub(crate) fn length(rows: &Range<i64>) -> usize {
    usize::try_from(rows.end - rows.start).unwrap_or(0)
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
