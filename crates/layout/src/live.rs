//! Which rows are live, as far as the producer must say it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Axis, Layout, Placement, Sizes};

/// What a producer says of the rows it left behind. Positions count tokens from the start of the context.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveRows {
    /// Tokens the cache has seen: the position of the next one. It differs from the live rows in a window.
    pub tokens_seen: usize,
    /// Newest rows that are held, where that is fewer than the placement would hold.
    pub live: Option<usize>,
    /// Slots before the first row, for layouts that are padded on the left.
    pub pad: Option<usize>,
    /// Slot of the oldest row, for rings whose start is kept by an index; the rows that always stay do not count.
    pub ring_start: Option<usize>,
    /// Slot of the oldest step of convolution states that are rings.
    pub conv_start: Option<usize>,
    /// Physical block of each logical block, for paged layouts.
    pub block_table: Option<Vec<u32>>,
    /// Which sequence of a batch; without it a batch has one.
    pub sequence: Option<usize>,
    /// Layers whose rows differ from what is said above.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub layers: BTreeMap<usize, LayerRows>,
}

/// What a producer says of one layer; what is absent is as for all layers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayerRows {
    /// See [`LiveRows::live`].
    pub live: Option<usize>,
    /// See [`LiveRows::pad`].
    pub pad: Option<usize>,
    /// See [`LiveRows::ring_start`].
    pub ring_start: Option<usize>,
    /// See [`LiveRows::conv_start`].
    pub conv_start: Option<usize>,
    /// See [`LiveRows::block_table`].
    pub block_table: Option<Vec<u32>>,
}

impl LiveRows {
    /// Rows of a cache that has seen `tokens_seen` tokens and holds what its placement holds.
    pub fn seen(tokens_seen: usize) -> LiveRows {
        LiveRows { tokens_seen, ..LiveRows::default() }
    }

    /// Rows as a producer of `layout` would leave them, at their simplest: padding on the left fills the capacity,
    /// rings start in slot 0, cells follow one another, and blocks are handed out from the last to the first.
    pub fn made_for(layout: &Layout, sizes: &Sizes, live_rows: usize) -> LiveRows {
        let padded = layout.placement == Placement::LeftPadded;
        let cells = layout.tensors.iter().all(|rule| !rule.axes.has(Axis::Row));
        let blocks = if cells { sizes.capacity } else { sizes.capacity.div_ceil(sizes.block_rows.max(1)) };
        let blocks = 0..u32::try_from(blocks).unwrap_or(u32::MAX);
        LiveRows {
            pad: Some(if padded { sizes.capacity.saturating_sub(live_rows) } else { 0 }),
            ring_start: Some(0),
            conv_start: Some(0),
            block_table: Some(if cells { blocks.collect() } else { blocks.rev().collect() }),
            ..LiveRows::seen(live_rows)
        }
    }

    /// What holds for `layer`.
    pub(crate) fn of_layer(&self, layer: usize) -> LayerLive<'_> {
        let own = self.layers.get(&layer);
        let pick = |of: fn(&LayerRows) -> Option<usize>, all: Option<usize>| own.and_then(of).or(all);
        LayerLive {
            seen: self.tokens_seen,
            live: pick(|o| o.live, self.live),
            pad: pick(|o| o.pad, self.pad),
            ring_start: pick(|o| o.ring_start, self.ring_start),
            conv_start: pick(|o| o.conv_start, self.conv_start),
            block_table: own.and_then(|o| o.block_table.as_deref()).or(self.block_table.as_deref()),
        }
    }
}

/// [`LiveRows`] of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerLive<'a> {
    pub(crate) seen: usize,
    pub(crate) live: Option<usize>,
    pub(crate) pad: Option<usize>,
    pub(crate) ring_start: Option<usize>,
    pub(crate) conv_start: Option<usize>,
    pub(crate) block_table: Option<&'a [u32]>,
}
