//! Whether a cache of one model serves a decoder of another.

use kvbaton_layout::ModelSpec;

use crate::{Error, ErrorKind};

/// What the user has said may differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waived {
    /// The weights: digests that differ or are unknown.
    pub weights: bool,
}

/// Refuses a cache of `source` for a decoder of `target`.
///
/// Geometry, rope and vocabulary must be equal. The weights' digests must be equal too, and an unknown digest is
/// not equal to anything, unless the weights are waived.
///
/// # Errors
///
/// The first difference, with both values; `fields` has all of them.
pub fn check_compatible(source: &ModelSpec, target: &ModelSpec, waived: Waived) -> Result<(), Error> {
    let differences = source.differences(target);
    if let Some(first) = differences.first() {
        let layer = first.layer.map(|l| format!(" of layer {l}")).unwrap_or_default();
        let all = serde_json::to_value(&differences).unwrap_or_default();
        return Err(Error::new(
            ErrorKind::Incompatible,
            format!(
                "the package and the model differ in {}{layer}: {} against {}",
                first.field, first.source, first.target
            ),
        )
        .hint("export the package from the model that decodes")
        .field("field", first.field)
        .field("package", first.source.clone())
        .field("model", first.target.clone())
        .field("differences", all));
    }
    if waived.weights {
        return Ok(());
    }
    let shown = |d: &Option<String>| d.clone().unwrap_or_else(|| "unknown".to_owned());
    match (&source.weights_digest, &target.weights_digest) {
        (Some(a), Some(b)) if a == b => Ok(()),
        (a, b) => Err(Error::new(
            ErrorKind::Incompatible,
            format!("the package and the model differ in weights_digest: {} against {}", shown(a), shown(b)),
        )
        .hint(
            "name the folder both were made from with --source-model, \
             or accept other weights with --allow-different weights",
        )
        .field("field", "weights_digest")
        .field("package", shown(a))
        .field("model", shown(b))),
    }
}

/// Refuses ids that the model has no embedding for.
///
/// # Errors
///
/// When one is not below `vocab`.
pub fn check_vocabulary(tokens: &[u32], vocab: usize) -> Result<(), Error> {
    match tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
        None => Ok(()),
        Some((at, &id)) => Err(Error::new(
            ErrorKind::Usage,
            format!("token {id} at position {at} is not in the vocabulary of {vocab}"),
        )
        .field("token", id)
        .field("position", at)
        .field("vocab_size", vocab)),
    }
}
