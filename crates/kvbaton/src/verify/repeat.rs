//! Whether a producer gives the same cache for the same tokens.

use kvbaton_layout::Part;
use serde::Serialize;

use super::report::Where;
use super::rows::{PartRows, Reader, bits, kept, parts};
use crate::{CacheView, Error, Prefill, Prefilled};

/// What repeated prefills of one prompt were.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Repeated {
    /// Prefills.
    pub runs: usize,
    /// Whether all gave the same live rows and the same logits.
    pub deterministic: bool,
    /// The first run that differed from the first of all, counted from 1.
    pub run: Option<usize>,
    /// Where it differed; absent where only logits did.
    #[serde(rename = "where")]
    pub place: Option<Where>,
}

/// Prefills `tokens` `runs` times and gives the last result back. Live rows and logits are compared bit by bit with
/// those of the first run.
///
/// # Errors
///
/// As [`Prefill::prefill`].
pub fn repeat_prefill(
    engine: &mut dyn Prefill,
    tokens: &[u32],
    runs: usize,
) -> Result<(Prefilled, Repeated), Error> {
    let mut repeated = Repeated { runs: runs.max(1), deterministic: true, run: None, place: None };
    let mut last = engine.prefill(tokens)?;
    if repeated.runs == 1 {
        return Ok((last, repeated));
    }
    let first = Snapshot::of(&last)?;
    for run in 2..=repeated.runs {
        // An engine that reuses its buffers refuses to run while they are held.
        drop(last);
        last = engine.prefill(tokens)?;
        if !repeated.deterministic {
            continue;
        }
        let again = Snapshot::of(&last)?;
        let place = first.difference(&again);
        if place.is_some() || first.logits != again.logits {
            (repeated.deterministic, repeated.run, repeated.place) = (false, Some(run), place);
        }
    }
    Ok((last, repeated))
}

/// A cache's live rows, apart from its memory.
struct Snapshot {
    parts: Vec<(usize, Part, PartRows)>,
    logits: Option<Vec<u32>>,
}

impl Snapshot {
    fn of(prefilled: &Prefilled) -> Result<Snapshot, Error> {
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
        let logits = prefilled.logits.as_ref().map(|l| bits(&l.values));
        Ok(Snapshot { parts: live(&prefilled.cache)?, logits })
    }

    fn difference(&self, other: &Snapshot) -> Option<Where> {
        self.parts.iter().zip(&other.parts).find_map(|((layer, part, a), (.., b))| {
            let same = |i: &usize| bits(a.values[*i], a.dtype) == bits(b.values[*i], b.dtype);
            let index = (0..a.values.len().min(b.values.len())).find(|i| !same(i))?;
            Some(Where::element(*part, *layer, index, a))
        })
    }
}

fn live(view: &CacheView) -> Result<Vec<(usize, Part, PartRows)>, Error> {
    let reader = Reader::new(view)?;
    let mut found = Vec::new();
    for layer in kept(view) {
        for part in parts(&view.cache().layers[layer]) {
            found.extend(reader.read(layer, part)?.map(|rows| (layer, part, rows)));
        }
    }
    Ok(found)
}
