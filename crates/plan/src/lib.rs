//! From a source, a target and the rows the target wants to a list of copies.
//!
//! Planning is arithmetic: no buffer is read or written here. A [`CopyPlan`] is data that prints, costs and
//! tests; `kvbaton-copy` runs it. Whether a hand-off is worth it at all is the matter of [`route`].

#![forbid(unsafe_code)]

mod boxes;
mod explain;
mod planner;
pub mod route;
mod whole;

pub use boxes::{Coded, CodedOp, CodedSource, CopyOp, Place, ZeroOp};
pub use planner::{PlanError, plan};
pub use whole::{CopyPlan, Cost};
