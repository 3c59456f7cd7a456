//! Indices that programs compute, checked against the dimension they index: for gather, scatter and one_hot.

use super::{Form, Reason};

/// What an index may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Check {
    /// Negative indices count from the end.
    FromEnd,
    /// Only from 0 on: iOS 17 with `validate_indices`.
    Strict,
}

impl Check {
    /// What the operation says. Core ML leaves indices out of range undefined where it does not validate; here they
    /// are errors in any case.
    pub(super) fn of(form: &Form<'_>) -> Result<Check, Reason> {
        Ok(if form.flag("validate_indices")? { Check::Strict } else { Check::FromEnd })
    }

    /// `index` as a place along the dimension `axis` of `size`.
    pub(super) fn place(self, index: i32, axis: usize, size: usize) -> Result<usize, Reason> {
        let wide = i64::from(index);
        let at = match self {
            Check::FromEnd if wide < 0 => wide + i64::try_from(size).unwrap_or(i64::MAX),
            _ => wide,
        };
        let at = usize::try_from(at).ok().filter(|at| *at < size);
        at.ok_or_else(|| format!("index {index} along axis {axis} of size {size}"))
    }
}
