//! Whether a hand-off changed the answer: a ladder of five rungs, each reported by itself.
//!
//! *bytes*: what arrived is what left. *values*: it is what the reference computed. *logits*, *teacher-forced* and
//! *free-running* tokens: the decoder says the same from it. The first two are compared here, element by element and
//! by the scalar definition of every conversion; no plan and no fast kernel takes part. The others need a model and
//! run where the model is; this module only knows their results, and turns all of them into a verdict.

mod bytes;
mod explain;
mod metrics;
mod repeat;
mod report;
mod rows;
mod values;

pub use bytes::compare_bytes;
pub use repeat::{Repeated, repeat_prefill};
pub use report::{PromptReport, Rung, RungName, Status, Thresholds, Verdict, VerifyReport, Where};
pub use values::compare_values;
