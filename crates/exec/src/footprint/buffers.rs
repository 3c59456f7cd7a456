//! Buffers while a run is followed: what is allocated, and what shows it.

use std::collections::HashMap;

use kvbaton_mil::program::ValueId;

/// A buffer that values show.
struct Held {
    bytes: usize,
    /// Whether it came from the pool of floats.
    pooled: bool,
    users: usize,
    /// Buffers that live as long as this one.
    keeps: Vec<usize>,
}

/// What a value shows.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub(super) buffer: usize,
    /// Whether its elements are side by side.
    pub(super) packed: bool,
}

/// A run that is followed with sizes alone.
#[derive(Default)]
pub(super) struct Sim {
    held: Vec<Held>,
    pub(super) values: HashMap<ValueId, Seen>,
    /// Free buffers of the pool by size.
    free: HashMap<usize, usize>,
    /// What the pool ever gave out. It keeps that, so of each size it has as many buffers as were in use at a time, in
    /// this run or another one.
    pool: usize,
    other: usize,
    other_peak: usize,
}

impl Sim {
    /// A buffer that nothing shows yet.
    pub(super) fn allocate(&mut self, bytes: usize, pooled: bool) -> usize {
        if pooled {
            match self.free.get_mut(&bytes) {
                Some(n) if *n > 0 => *n -= 1,
                _ => self.pool += bytes,
            }
        } else {
            self.other += bytes;
            self.others_at_most(0);
        }
        self.hold(Held { bytes, pooled, users: 0, keeps: Vec::new() })
    }

    /// Nothing of its own, and all of `buffers`: where only a run knows which of them a value shows.
    pub(super) fn any_of(&mut self, buffers: Vec<usize>) -> usize {
        buffers.iter().for_each(|buffer| self.held[*buffer].users += 1);
        self.hold(Held { bytes: 0, pooled: false, users: 0, keeps: buffers })
    }

    fn hold(&mut self, held: Held) -> usize {
        self.held.push(held);
        self.held.len() - 1
    }

    /// Notes that so many bytes more than now may be in use outside the pool.
    pub(super) fn others_at_most(&mut self, more: usize) {
        self.other_peak = self.other_peak.max(self.other + more);
    }

    /// The most that is allocated at a time. A later run finds the pool as an earlier one left it.
    pub(super) fn bytes(&self) -> usize {
        self.pool + self.other_peak
    }

    pub(super) fn release(&mut self, buffer: usize) {
        let held = &mut self.held[buffer];
        let keeps = std::mem::take(&mut held.keeps);
        if held.pooled {
            *self.free.entry(held.bytes).or_default() += 1;
        } else {
            self.other -= held.bytes;
        }
        keeps.into_iter().for_each(|kept| self.drop_user(kept));
    }

    pub(super) fn add_user(&mut self, buffer: usize) {
        self.held[buffer].users += 1;
    }

    pub(super) fn drop_user(&mut self, buffer: usize) {
        self.held[buffer].users -= 1;
        if self.held[buffer].users == 0 {
            self.release(buffer);
        }
    }

    pub(super) fn define(&mut self, id: ValueId, seen: Seen) {
        self.add_user(seen.buffer);
        if let Some(before) = self.values.insert(id, seen) {
            self.drop_user(before.buffer);
        }
    }

    pub(super) fn forget(&mut self, id: ValueId) {
        if let Some(seen) = self.values.remove(&id) {
            self.drop_user(seen.buffer);
        }
    }
}
