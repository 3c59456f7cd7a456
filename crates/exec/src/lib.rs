//! Runs ML Programs on the CPU.
//!
//! [`Executable::load`] takes one function of a [`Package`](kvbaton_mil::Package), checks every operation and plans
//! its run; [`Executable::run`] computes. Arithmetic is `f32`; the result of every operation whose type is fp16 is
//! rounded to fp16, nearest even, once ([`Numerics`] has other choices). Weights stay where they are, mapped and fp16, and are widened piece by piece.
//!
//! Nothing is approximated for speed: a fused run gives the same bits as one operation after the other.

#![forbid(unsafe_code)]

mod array;
mod attention;
mod build;
mod compressed;
mod error;
mod exchange;
mod executable;
mod footprint;
mod fuse;
mod graph;
mod machine;
mod memory;
mod numerics;
mod observe;
mod ops;
mod options;
mod run;
mod shapes;
mod state;
mod tensor;
mod tile;

pub use array::{Array, ArrayError};
pub use compressed::{WeightCache, WeightStorage};
pub use error::ExecError;
pub use executable::{Executable, Feature};
pub use footprint::Footprint;
pub use machine::available_bytes;
pub use numerics::Numerics;
pub use observe::{HALF_MAX, Observed, Statistics};
pub use ops::supported_ops;
pub use options::Options;
pub use shapes::Shapes;
pub use state::State;
