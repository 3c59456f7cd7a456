//! Custody: whose turn it is with a buffer that an accelerator's runtime writes.
//!
//! ```text
//! fresh ──propose──► backing ──written──► readable ──lend──► lent ──give back──► returned
//!   │                   │ ▲                                    │                    │  │
//!   │          ignored, │ └────────────────propose─────────────│────────────────────┘  │
//!   │           failed  ▼                                      ▼                       │
//!   └──────input──► input                                  unsettled ──────settle──────┘
//! ```
//!
//! A runtime is known to refuse a buffer that it read as an input, or that the CPU still holds locked, and to write
//! into one whose last result is still read. So a buffer is proposed only when nobody reads it, an input is never
//! proposed, and a buffer that a GPU read is proposed only once the GPU's work on it is known to be done. Custody
//! knows nothing of the memory itself: every rule here is checked without one.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// Where a buffer is in its round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Allocated, never used.
    Fresh,
    /// Proposed to a prediction that has not returned.
    Backing,
    /// Holds the result of a prediction that has returned.
    Readable,
    /// Consumers read it.
    Lent {
        /// How many.
        readers: usize,
        /// Whether one that has left may have work on a GPU that is not done.
        unsettled: bool,
    },
    /// Nobody reads it any more, but work on a GPU may: a barrier is due.
    Unsettled,
    /// Nobody reads it any more.
    Returned,
    /// A prediction read it as an input. It is never a backing again.
    Input,
    /// A prediction that never returned has it. It is never used again.
    Lost,
}

/// What somebody wants to do with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Move {
    /// The runtime may write it.
    Propose,
    /// The prediction has returned and wrote it.
    Written,
    /// The prediction has returned and wrote elsewhere, or failed.
    Ignored,
    /// A consumer reads it.
    Lend,
    /// A consumer is done; `settled` says that no work of its own on a GPU is left.
    GiveBack {
        /// Whether the consumer's work is done, not only its handle gone.
        settled: bool,
    },
    /// All work on GPUs that was submitted so far is done.
    Settle,
    /// A prediction reads it as an input.
    Input,
    /// The prediction that has it will not return.
    Lose,
}

/// A move that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a buffer that is {phase} cannot be {wanted}: {}", reason(*phase))]
pub struct IllegalMove {
    /// Where the buffer is.
    pub phase: Phase,
    /// What was wanted.
    pub wanted: Move,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Phase::Fresh => f.write_str("fresh"),
            Phase::Backing => f.write_str("proposed to a prediction"),
            Phase::Readable => f.write_str("readable"),
            Phase::Lent { readers, .. } => write!(f, "still read by {readers}"),
            Phase::Unsettled => f.write_str("returned before its reader's work was known to be done"),
            Phase::Returned => f.write_str("returned"),
            Phase::Input => f.write_str("an input"),
            Phase::Lost => f.write_str("lost"),
        }
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Move::Propose => "proposed to a prediction",
            Move::Written => "reported as written",
            Move::Ignored => "reported as ignored",
            Move::Lend => "read",
            Move::GiveBack { .. } => "given back",
            Move::Settle => "settled",
            Move::Input => "an input",
            Move::Lose => "given up",
        })
    }
}

fn reason(phase: Phase) -> &'static str {
    match phase {
        Phase::Fresh => "no prediction has written it",
        Phase::Backing => "the prediction has not returned",
        Phase::Readable => "its result was not given back",
        Phase::Lent { .. } => "drop the views of the last prediction first",
        Phase::Unsettled => "a barrier of the reader's engine is due first",
        Phase::Returned => "its result was given back",
        Phase::Input => "runtimes refuse to write what they have read as an input",
        Phase::Lost => "a prediction that did not return in time may still write it",
    }
}

impl Phase {
    /// The phase after `wanted`.
    ///
    /// # Errors
    ///
    /// When the move is not one of this phase's; the buffer stays where it is.
    pub fn after(self, wanted: Move) -> Result<Phase, IllegalMove> {
        use Phase::*;
        Ok(match (self, wanted) {
            (Fresh | Returned, Move::Propose) => Backing,
            (Fresh | Returned | Input, Move::Input) => Input,
            (Backing, Move::Written) => Readable,
            (Backing, Move::Ignored) => Returned,
            (Backing, Move::Lose) => Lost,
            (Readable, Move::Lend) => Lent { readers: 1, unsettled: false },
            (Readable, Move::GiveBack { .. }) => Returned,
            (Lent { readers, unsettled }, Move::Lend) => Lent { readers: readers + 1, unsettled },
            (Lent { readers, unsettled }, Move::GiveBack { settled }) => {
                match (readers, unsettled || !settled) {
                    (1, true) => Unsettled,
                    (1, false) => Returned,
                    (_, unsettled) => Lent { readers: readers - 1, unsettled },
                }
            }
            (Lent { readers, .. }, Move::Settle) => Lent { readers, unsettled: false },
            (Unsettled, Move::Settle) => Returned,
            // A barrier concerns every buffer; most have nothing to settle.
            (phase @ (Fresh | Backing | Readable | Returned | Input | Lost), Move::Settle) => phase,
            (phase, wanted) => return Err(IllegalMove { phase, wanted }),
        })
    }
}

/// The custody of one buffer, shared by all who have to do with it.
#[derive(Clone, Debug)]
pub struct Custody(Arc<Mutex<Phase>>);

impl Custody {
    /// Custody of a buffer that was just allocated.
    pub fn fresh() -> Custody {
        Custody(Arc::new(Mutex::new(Phase::Fresh)))
    }

    /// Where the buffer is.
    pub fn phase(&self) -> Phase {
        *self.lock()
    }

    /// Makes a move and returns the phase it led to.
    ///
    /// # Errors
    ///
    /// As [`Phase::after`].
    pub fn make(&self, wanted: Move) -> Result<Phase, IllegalMove> {
        let mut phase = self.lock();
        *phase = phase.after(wanted)?;
        Ok(*phase)
    }

    /// Lends the buffer to a consumer; it is given back when the loan is dropped.
    ///
    /// # Errors
    ///
    /// As [`Phase::after`].
    pub fn lend(&self) -> Result<Loan, IllegalMove> {
        self.make(Move::Lend)?;
        Ok(Loan { custody: self.clone(), unsettled: AtomicBool::new(false) })
    }

    fn lock(&self) -> MutexGuard<'_, Phase> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A buffer's turn in a prediction. Dropped before it is lent, the buffer is free again.
#[derive(Debug)]
pub struct Turn(Custody);

impl Turn {
    /// Proposes the buffer to a prediction.
    ///
    /// # Errors
    ///
    /// As [`Phase::after`].
    pub fn propose(custody: &Custody) -> Result<Turn, IllegalMove> {
        custody.make(Move::Propose)?;
        Ok(Turn(custody.clone()))
    }

    /// The prediction has written it.
    ///
    /// # Errors
    ///
    /// As [`Phase::after`].
    pub fn written(&self) -> Result<(), IllegalMove> {
        self.0.make(Move::Written).map(|_| ())
    }

    /// Lends what was written to a reader.
    ///
    /// # Errors
    ///
    /// As [`Phase::after`].
    pub fn lend(&self) -> Result<Loan, IllegalMove> {
        self.0.lend()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Whatever else it is, it is no longer this turn's: lent, or given up while the prediction hung.
        let _ = match self.0.phase() {
            Phase::Backing => self.0.make(Move::Ignored),
            Phase::Readable => self.0.make(Move::GiveBack { settled: true }),
            phase => Ok(phase),
        };
    }
}

/// The custodies of all buffers of one runtime, as far as the buffers still exist.
#[derive(Clone, Debug, Default)]
pub struct Book(Arc<Mutex<Vec<Weak<Mutex<Phase>>>>>);

impl Book {
    /// Custody of a buffer that was just allocated.
    pub fn open(&self) -> Custody {
        let custody = Custody::fresh();
        self.lock().push(Arc::downgrade(&custody.0));
        custody
    }

    /// Where each buffer is.
    pub fn phases(&self) -> Vec<Phase> {
        self.custodies().iter().map(Custody::phase).collect()
    }

    /// All work on GPUs that was submitted so far is done.
    pub fn settle(&self) {
        self.each(Move::Settle);
    }

    /// The prediction that is under way will not return.
    pub fn lose(&self) {
        self.each(Move::Lose);
    }

    /// Makes a move wherever it is legal.
    fn each(&self, wanted: Move) {
        for custody in self.custodies() {
            let _ = custody.make(wanted);
        }
    }

    fn custodies(&self) -> Vec<Custody> {
        let mut all = self.lock();
        all.retain(|c| c.strong_count() > 0);
        all.iter().filter_map(|c| c.upgrade().map(Custody)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Mutex<Phase>>>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The right to read a buffer; given back when dropped.
#[derive(Debug)]
pub struct Loan {
    custody: Custody,
    unsettled: AtomicBool,
}

impl Loan {
    /// The custody that it is a loan of.
    pub fn custody(&self) -> &Custody {
        &self.custody
    }

    /// The consumer's GPU may be at work on the buffer when the loan is over: a [`Move::Settle`] is due then.
    pub fn leave_unsettled(&self) {
        self.unsettled.store(true, Ordering::Release);
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // A loan exists only while the phase counts it, so the move is always legal.
        let settled = !self.unsettled.load(Ordering::Acquire);
        let _ = self.custody.make(Move::GiveBack { settled });
    }
}

#[cfg(test)]
mod tests;
