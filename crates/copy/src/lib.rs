//! Runs a copy plan over memory: threads, counts, and the memcpy that a copy is measured against.
//!
//! What to copy is decided in `kvbaton-plan`, how elements move in `kvbaton-kernels`; this crate brings the two
//! together over real buffers and says what happened.

mod coded;
mod memcpy;
mod pieces;
mod run;
mod threads;
mod zero;

pub use kvbaton_kernels::OnOverflow;
pub use memcpy::{Memcpy, copy_once};
pub use run::{CopyError, CopyOptions, CopyStats, Place, run};
pub use threads::Threads;
pub use zero::zero;
