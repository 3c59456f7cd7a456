//! What can go wrong with a runtime.

use std::path::PathBuf;
use std::time::Duration;

use kvbaton_memory::IllegalMove;

use crate::Call;

/// A failure of a runtime, or of what is done around it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// The runtime said no.
    #[error("{call} failed: {message}")]
    Failed {
        /// What was called.
        call: Call,
        /// The runtime's own words.
        message: String,
    },
    /// The system lacks the call.
    #[error("{what} needs macOS {}.{}, this is {}.{}", needs.0, needs.1, have.0, have.1)]
    TooOld {
        /// What was wanted.
        what: &'static str,
        /// Major and minor version that has it.
        needs: (u32, u32),
        /// This system's.
        have: (u32, u32),
    },
    /// The runtime did not answer in time.
    #[error("{call} did not return within {} s", limit.as_secs_f64())]
    TimedOut {
        /// What was called.
        call: Call,
        /// How long was waited.
        limit: Duration,
    },
    /// Calls that never returned have used up the threads that may be given up.
    #[error("{abandoned} calls have not returned; no further thread is started")]
    Stuck {
        /// How many.
        abandoned: usize,
    },
    /// A buffer is not free.
    #[error(transparent)]
    Custody(#[from] IllegalMove),
    /// The prediction lacks an output that the program declares.
    #[error("the prediction left no output `{name}`")]
    MissingOutput {
        /// Its name.
        name: String,
    },
    /// No function of that name is loaded.
    #[error("the function `{function}` is not loaded")]
    NotLoaded {
        /// Its name.
        function: String,
    },
    /// The state that was asked for does not exist any more.
    #[error(
        "the state is gone: the call that had it last failed or did not return, and may have written half of it"
    )]
    StateLost,
    /// A file of the compile cache could not be read or written.
    #[error("`{}`: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A compiled model's description cannot be read.
    #[error("`{}` is no compiled model that can be read: {message}", path.display())]
    Compiled {
        /// Its folder.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The thread that calls the runtime died.
    #[error("the thread that calls the runtime ended: {message}")]
    WorkerGone {
        /// Its last words.
        message: String,
    },
}

impl RuntimeError {
    /// A failure of `call` in the runtime's words, on one line.
    pub fn failed(call: Call, message: impl AsRef<str>) -> RuntimeError {
        let message = message.as_ref().split_whitespace().collect::<Vec<_>>().join(" ");
        RuntimeError::Failed { call, message }
    }
}
