//! What can go wrong.

use kvbaton_mil::MilError;
use kvbaton_mil::program::TensorType;

use crate::shapes::Shapes;

/// Why a program cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// The package has no such function.
    #[error(transparent)]
    Package(#[from] MilError),
    /// The executor does not know the operation.
    #[error("function `{function}`: operation `{op}` (output `{output}`) is not supported on the CPU")]
    UnsupportedOp {
        /// Function.
        function: String,
        /// MIL's name of the operation.
        op: String,
        /// The first value it defines.
        output: String,
    },
    /// The executor knows the operation, but not in this form.
    #[error("function `{function}`: operation `{op}` (output `{output}`): {reason}")]
    Form {
        /// Function.
        function: String,
        /// MIL's name of the operation.
        op: String,
        /// The first value it defines.
        output: String,
        /// What is wrong with it.
        reason: String,
    },
    /// An operation failed on the values it was given.
    #[error("function `{function}`: running `{op}` (output `{output}`): {reason}")]
    Run {
        /// Function.
        function: String,
        /// MIL's name of the operation.
        op: String,
        /// The first value it defines.
        output: String,
        /// What is wrong with the values.
        reason: String,
    },
    /// A feature's type is one the executor cannot take or give.
    #[error("function `{function}`: feature `{name}` has type {ty}, which the CPU executor does not handle")]
    FeatureType {
        /// Function.
        function: String,
        /// Feature.
        name: String,
        /// Its type, or what it is.
        ty: String,
    },
    /// An input was not given.
    #[error("input `{name}` is missing; the function takes {expected:?}")]
    MissingInput {
        /// The input.
        name: String,
        /// All inputs.
        expected: Vec<String>,
    },
    /// An input was given that the function does not have, or twice.
    #[error("input `{name}` is unknown or given twice; the function takes {expected:?}")]
    UnexpectedInput {
        /// The input.
        name: String,
        /// All inputs.
        expected: Vec<String>,
    },
    /// An input has another type or shape.
    #[error("input `{name}` is {have}, the function takes {expected}")]
    InputType {
        /// The input.
        name: String,
        /// Its type in the program.
        expected: TensorType,
        /// The type of the array given.
        have: TensorType,
    },
    /// An input has a shape that the package does not allow.
    #[error("input `{name}` has shape {have:?}, the function takes {allowed}")]
    InputShape {
        /// The input.
        name: String,
        /// The shapes it may have.
        allowed: Shapes,
        /// The shape of the array given.
        have: Vec<usize>,
    },
    /// The function has states, and was run without any.
    #[error("function `{function}` has states ({states:?}), and was given none")]
    NeedsState {
        /// Function.
        function: String,
        /// Its states.
        states: Vec<String>,
    },
    /// A state has another name than any the function has.
    #[error("state `{name}` is unknown; there are {expected:?}")]
    UnknownState {
        /// The state.
        name: String,
        /// All states.
        expected: Vec<String>,
    },
    /// A state has another type or shape.
    #[error("state `{name}` is {have}, the function has {expected}")]
    StateType {
        /// The state.
        name: String,
        /// Its type in the program.
        expected: TensorType,
        /// The type given.
        have: TensorType,
    },
    /// A run failed after it had taken the state.
    #[error("state `{name}` was lost when a run failed; set or clear it first")]
    StateLost {
        /// The state.
        name: String,
    },
    /// A function would take more memory than it may.
    #[error(
        "function `{function}` takes up to {needed_bytes} bytes ({what}), more than the {limit_bytes} bytes {}",
        if *.available { "that are available" } else { "that it may take" }
    )]
    Memory {
        /// Function.
        function: String,
        /// What it takes.
        needed_bytes: u64,
        /// What that is made of.
        what: String,
        /// What it may take.
        limit_bytes: u64,
        /// Whether the limit is what the machine has available.
        available: bool,
    },
    /// The threads could not be started.
    #[error("cannot start {threads} threads")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
}
