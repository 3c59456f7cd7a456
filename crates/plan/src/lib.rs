//! From a source, a target and the rows the target wants to a list of copies.
//!
//! Planning is arithmetic: no buffer is read or written here. A [`CopyPlan`] is data that prints, costs and
//! tests; `kvbaton-copy` runs it.

#![forbid(unsafe_code)]

mod boxes;
mod explain;
mod planner;
mod whole;

pub use boxes::{Coded, CodedOp, CodedSource, CopyOp, Place, ZeroOp};
pub use planner::{PlanError, plan};
pub use whole::{CopyPlan, Cost};
