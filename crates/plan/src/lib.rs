//! From a source, a target and the rows the target wants to a list of copies.
//!
//! Planning is arithmetic: no buffer is read or written here. A [`CopyPlan`] is data that prints, costs and
//! tests; `kvbaton-copy` runs it.

#![forbid(unsafe_code)]

mod boxes;
mod planner;

pub use boxes::{CopyOp, CopyPlan, Place, ZeroOp};
pub use planner::{PlanError, plan};
