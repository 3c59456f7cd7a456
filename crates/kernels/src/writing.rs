//! How a kernel writes its destination.

use crate::OnOverflow;

/// How a kernel writes its destination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Writing {
    /// What is written for a finite value that the target cannot hold.
    pub on_overflow: OnOverflow,
    /// Whether whole cache lines are written past the caches, where the CPU can (AVX-512), so that what is overwritten need
    /// not be read. For destinations too large to be found in a near cache by their reader; not for new memory, whose pages
    /// the first write has the system fill with zeros: those are in the caches.
    pub past_caches: bool,
}

impl From<OnOverflow> for Writing {
    fn from(on_overflow: OnOverflow) -> Writing {
        Writing { on_overflow, past_caches: false }
    }
}
