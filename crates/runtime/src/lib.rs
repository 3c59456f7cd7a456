//! What a runtime of packages must offer, and everything around it that can be decided without one.
//!
//! Core ML runs on a Mac alone, so this crate keeps it at arm's length: [`Runtime`] lists the calls that are needed,
//! and all decisions are taken on this side of it. Which memory an output gets, who may touch a buffer when, what is
//! compiled again, how long a call may take, what happens when it takes longer, and what a compute plan means: all of
//! that runs and is tested on every machine, against [`fake::FakeRuntime`], which has Core ML's habits and fails at
//! any call it is told to.

#![forbid(unsafe_code)]

mod api;
mod backings;
mod compile_cache;
mod compiled;
mod compute_plan;
mod error;
pub mod fake;
mod session;
mod surfaces;
mod units;
mod worker;

pub use api::{ArrayInfo, Call, Element, LoadConfig, Memory, Operation, Runtime, System};
pub use backings::{Counts, Output};
pub use compile_cache::{CompileCache, Compiled};
pub use compiled::{CompiledFeature, CompiledFunction, CompiledModel, is_compiled};
pub use compute_plan::{PlanSummary, Share};
pub use error::RuntimeError;
pub use session::{Loaded, Patience, Session, StateId};
pub use surfaces::{Choice, SurfaceLimits, choose_memory, layers_a_surface};
pub use units::Units;
