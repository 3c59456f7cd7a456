//! Leases: who may read or write a buffer now.
//!
//! A producer that reuses its buffers writes into them again at its next prediction. A consumer that still
//! reads then would see the next prompt's rows, so the two take turns by lease, and the one who comes at the
//! wrong time is refused, not blocked.

use std::cell::UnsafeCell;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::WritableBytes;

/// A buffer that one writer or many readers may use at a time.
#[derive(Clone)]
pub struct Leased(Arc<Slot>);

struct Slot {
    state: Mutex<State>,
    buffer: UnsafeCell<WritableBytes>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Written,
    Read { readers: usize },
}

// SAFETY: the buffer is reached through leases alone, and `state` admits one writer or many readers.
unsafe impl Sync for Slot {}

/// A lease that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// The producer is writing.
    #[error("the buffer is being written: read it after the prediction has returned")]
    BeingWritten,
    /// Consumers still read.
    #[error("the buffer is still read by {readers} consumers: drop their views before the next prediction")]
    BeingRead {
        /// How many.
        readers: usize,
    },
}

impl Leased {
    /// Puts memory under leases.
    pub fn new(memory: WritableBytes) -> Leased {
        Leased(Arc::new(Slot { state: Mutex::new(State::Free), buffer: UnsafeCell::new(memory) }))
    }

    /// The right to write, alone.
    ///
    /// # Errors
    ///
    /// While anyone holds a lease.
    pub fn write(&self) -> Result<WriteLease, LeaseError> {
        let mut state = self.0.lock();
        match *state {
            State::Free => *state = State::Written,
            State::Written => return Err(LeaseError::BeingWritten),
            State::Read { readers } => return Err(LeaseError::BeingRead { readers }),
        }
        drop(state);
        Ok(WriteLease(self.0.clone()))
    }

    /// The right to read, with others.
    ///
    /// # Errors
    ///
    /// While the producer writes.
    pub fn read(&self) -> Result<ReadLease, LeaseError> {
        let mut state = self.0.lock();
        *state = match *state {
            State::Free => State::Read { readers: 1 },
            State::Read { readers } => State::Read { readers: readers + 1 },
            State::Written => return Err(LeaseError::BeingWritten),
        };
        drop(state);
        Ok(ReadLease(self.0.clone()))
    }
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl fmt::Debug for Leased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Leased").field(&*self.0.lock()).finish()
    }
}

/// The right to write a leased buffer; given back when dropped.
pub struct WriteLease(Arc<Slot>);

impl std::ops::Deref for WriteLease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the state is `Written` while this lease lives, so nobody else reaches the buffer.
        unsafe { &*self.0.buffer.get() }
    }
}

impl std::ops::DerefMut for WriteLease {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only reference.
        unsafe { &mut *self.0.buffer.get() }
    }
}

impl Drop for WriteLease {
    fn drop(&mut self) {
        *self.0.lock() = State::Free;
    }
}

/// The right to read a leased buffer; given back when dropped.
pub struct ReadLease(Arc<Slot>);

impl std::ops::Deref for ReadLease {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the state counts this reader while it lives, so no writer exists.
        unsafe { &*self.0.buffer.get() }
    }
}

impl Drop for ReadLease {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        *state = match *state {
            State::Read { readers } if readers > 1 => State::Read { readers: readers - 1 },
            _ => State::Free,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    #[test]
    fn readers_keep_the_writer_out_until_the_last_one_leaves() {
        let leased = Leased::new(Box::new(Buffer::zeroed(8)));
        let (first, second) = (leased.read().unwrap(), leased.read().unwrap());
        assert_eq!(leased.write().err(), Some(LeaseError::BeingRead { readers: 2 }));
        drop(first);
        assert_eq!(leased.write().err(), Some(LeaseError::BeingRead { readers: 1 }));
        drop(second);
        leased.write().unwrap()[0] = 7;
        assert_eq!(leased.read().unwrap()[0], 7);
    }

    #[test]
    fn a_writer_keeps_everybody_out() {
        let leased = Leased::new(Box::new(Buffer::zeroed(8)));
        let writer = leased.write().unwrap();
        assert_eq!(leased.read().err(), Some(LeaseError::BeingWritten));
        assert_eq!(leased.write().err(), Some(LeaseError::BeingWritten));
        drop(writer);
        assert!(leased.read().is_ok());
    }
}
