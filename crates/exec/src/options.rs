//! How a function is loaded.

use std::sync::Arc;

use crate::compressed::{WeightCache, WeightStorage};
use crate::numerics::Numerics;

/// How to load a function.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Threads; 0 takes all the machine has.
    pub threads: usize,
    /// Run chains of row operations, and attention, in one piece. Off, every operation runs by itself; the results
    /// are the same bits.
    pub fuse: bool,
    /// What is rounded.
    pub numerics: Numerics,
    /// Whether decompressed weights are kept.
    pub weights: WeightStorage,
    /// Bytes that the function may take; what the machine has available when `None`.
    pub max_memory: Option<u64>,
    /// Decompressed weights that functions loaded with clones of these options share.
    pub cache: Arc<WeightCache>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            threads: 0,
            fuse: true,
            numerics: Numerics::default(),
            weights: WeightStorage::default(),
            max_memory: None,
            cache: Arc::default(),
        }
    }
}

impl Options {
    /// The default with so many threads.
    pub fn with_threads(threads: usize) -> Options {
        Options { threads, ..Options::default() }
    }

    /// With fusion on or off.
    #[must_use]
    pub fn fused(mut self, fuse: bool) -> Options {
        self.fuse = fuse;
        self
    }

    /// With other roundings.
    #[must_use]
    pub fn with_numerics(mut self, numerics: Numerics) -> Options {
        self.numerics = numerics;
        self
    }

    /// With decompressed weights kept or not.
    #[must_use]
    pub fn with_weights(mut self, weights: WeightStorage) -> Options {
        self.weights = weights;
        self
    }

    /// With a bound on memory; `None` takes what the machine has available.
    #[must_use]
    pub fn with_max_memory(mut self, bytes: Option<u64>) -> Options {
        self.max_memory = bytes;
        self
    }

    /// Whether decompressed weights are kept.
    pub(crate) fn keeps_weights(&self) -> bool {
        self.weights == WeightStorage::Resident
    }
}
