//! Which engine should do what: the cost model behind `kvbaton plan`.
//!
//! A [`Machine`] is a list of figures, each with its source; a [`ModelWork`] says how much there is to do, in numbers
//! that no machine enters. From both, [`estimate`] makes the cost of every [`Route`], and [`choose`] the pick.
//! Arithmetic only: nothing is measured here.
//!
//! The model, in seconds:
//!
//! ```text
//! prefill(n)  = a + b · flops outside attention + c · flops of attention     of the rows that are computed: padding counts
//! step(n)     = a + b · bytes of weights + c · bytes of live rows
//! exposed     = a + bytes read and written / rate of copies                  of what is left when prefill returns
//! first token = prefill + exposed + step
//! ```
//!
//! a, b and c are never negative and fit the figures of the engine by least squares of relative errors. Between
//! lengths that were measured for this very model, the estimate passes through the measurements.

mod choose;
mod estimate;
mod fit;
mod machine;
mod work;

pub use choose::{Choice, Objective, choose};
pub use estimate::{Basis, Package, Request, Route, RouteEstimate, estimate};
pub use machine::{
    CopyRate, DecodeFigure, Engine, HandoffFigure, Machine, MachineError, Origin, Phase, Power, PrefillFigure,
};
pub use work::{Attention, ModelWork};
