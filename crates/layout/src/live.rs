//! Which rows are live, as far as the producer must say it.

use serde::{Deserialize, Serialize};

/// What a producer says of the rows it left behind. Positions count tokens from the start of the context.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRows {
    /// Tokens the cache has seen: the position of the next one. It differs from the live rows in a window.
    pub tokens_seen: usize,
    /// Newest rows that are held, where that is fewer than the placement would hold.
    pub live: Option<usize>,
    /// Slots before the first row, for layouts that are padded on the left.
    pub pad: Option<usize>,
    /// Slot of the oldest row, for rings whose start is kept by an index.
    pub ring_start: Option<usize>,
    /// Physical block of each logical block, for paged layouts.
    pub block_table: Option<Vec<u32>>,
}

impl LiveRows {
    /// Rows of a cache that has seen `tokens_seen` tokens and holds what its placement holds.
    pub fn seen(tokens_seen: usize) -> LiveRows {
        LiveRows { tokens_seen, ..LiveRows::default() }
    }
}
