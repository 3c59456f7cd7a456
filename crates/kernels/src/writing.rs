//! How a kernel writes its destination.

use crate::OnOverflow;
use crate::arch::Cpu;

/// What a kernel is told of its destination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Writing {
    /// What is written for a finite value that the target cannot hold.
    pub on_overflow: OnOverflow,
    /// Whether the memory was written before.
    pub memory: Memory,
}

/// Whether memory was written before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Memory {
    /// Its pages exist. A large destination may be written past the caches, so that what is overwritten need not be read.
    #[default]
    Used,
    /// The first write to a page has the system make it, zeros and all. The zeros are then in the caches, and going past
    /// those would have them written to memory once more.
    New,
}

/// Bytes of a destination from which it is written past the caches: the rows of a cache are read by the decoder's next
/// step, after everything else was written.
pub(crate) const PAST_CACHES_FROM: usize = 1 << 17;

impl Writing {
    /// Whether a destination of `bytes` is written past the caches: it is too large to be found in a near one by its
    /// reader.
    pub(crate) fn past_caches(self, cpu: Cpu, bytes: usize) -> bool {
        cpu.can_stream() && self.memory == Memory::Used && bytes >= PAST_CACHES_FROM
    }
}

impl From<OnOverflow> for Writing {
    fn from(on_overflow: OnOverflow) -> Writing {
        Writing { on_overflow, memory: Memory::default() }
    }
}
