//! Runs ML Programs on the CPU.
//!
//! [`Executable::load`] takes one function of a [`Package`](kvbaton_mil::Package), checks every operation and plans
//! its run; [`Executable::run`] computes. Arithmetic is `f32`; the result of every operation whose type is fp16 is
//! rounded to fp16, nearest even, once. Weights stay where they are, mapped and fp16, and are widened piece by piece.
//!
//! Nothing is approximated for speed: a fused run gives the same bits as one operation after the other.

#![forbid(unsafe_code)]

mod array;
mod attention;
mod build;
mod error;
mod executable;
mod fuse;
mod graph;
mod memory;
mod ops;
mod run;
mod shapes;
mod state;
mod tensor;
mod tile;

pub use array::{Array, ArrayError};
pub use error::ExecError;
pub use executable::{Executable, Feature, Options};
pub use ops::supported_ops;
pub use shapes::Shapes;
pub use state::State;
