//! What a prediction leaves, and where all buffers are.

use kvbaton_memory::{Bytes, Phase};
use serde::Serialize;

use crate::{ArrayInfo, Memory};

/// An output of a prediction. Its buffer is lent as long as a handle on the bytes lives.
#[derive(Clone, Debug)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// Type, shape and strides, as the runtime reported them for this very result.
    pub info: ArrayInfo,
    /// Its bytes.
    pub bytes: Bytes,
    /// Where it lies.
    pub memory: Memory,
    /// Why it does not lie in a surface that was proposed for it; `None` where it does.
    pub because: Option<String>,
}

/// How many buffers are in which phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Never used, or given back: free.
    pub free: usize,
    /// With a prediction.
    pub backing: usize,
    /// Written and not yet lent.
    pub readable: usize,
    /// With consumers.
    pub lent: usize,
    /// With work on a GPU that may not be done.
    pub unsettled: usize,
    /// Inputs.
    pub inputs: usize,
    /// Given up.
    pub lost: usize,
}

impl Counts {
    /// Counts phases.
    pub fn of(phases: &[Phase]) -> Counts {
        let mut counts = Counts::default();
        for phase in phases {
            *match phase {
                Phase::Fresh | Phase::Returned => &mut counts.free,
                Phase::Backing => &mut counts.backing,
                Phase::Readable => &mut counts.readable,
                Phase::Lent { .. } => &mut counts.lent,
                Phase::Unsettled => &mut counts.unsettled,
                Phase::Input => &mut counts.inputs,
                Phase::Lost => &mut counts.lost,
            } += 1;
        }
        counts
    }
}
