//! What happened, in numbers. Field names are those of the JSON documents and carry their units.

use serde::{Deserialize, Serialize};

use crate::{Filled, Streamed};

/// A repeated measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Range {
    /// The least.
    pub min: f64,
    /// The middle one.
    pub median: f64,
    /// The greatest.
    pub max: f64,
}

impl Range {
    /// The range of some measurements; `None` of none.
    pub fn of(values: &[f64]) -> Option<Range> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Range { min, median, max })
    }
}

/// What a prefill did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillReport {
    /// `cpu` or `coreml`.
    pub engine: String,
    /// The function of the package that ran.
    pub function: String,
    /// Tokens of the prompt, padding not counted.
    pub tokens: usize,
    /// Seconds of the prediction; loading is not in it.
    pub seconds: f64,
    /// Tokens of the prompt a second.
    pub tokens_per_second: f64,
    /// The compute units that the function was loaded for, where the engine has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_units: Option<String>,
    /// What the user should know of how it ran: units that were replaced, work that is not on the Neural Engine,
    /// outputs that the engine copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl PrefillReport {
    /// The report of a prediction over `tokens` tokens.
    pub fn new(engine: &str, function: String, tokens: usize, seconds: f64) -> PrefillReport {
        PrefillReport {
            engine: engine.to_owned(),
            function,
            tokens,
            seconds,
            tokens_per_second: if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 },
            compute_units: None,
            notes: Vec::new(),
        }
    }
}

/// How the rows reached the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PathTaken {
    /// Copied into the target's own memory.
    Fill,
    /// Copied and converted to the target's element type.
    Convert,
    /// The target took the producer's memory over.
    Adopt,
    /// Through a file.
    File,
}

/// What a hand-off did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HandoffReport {
    /// How the rows reached the target.
    pub path: PathTaken,
    /// Live bytes written to the target.
    pub bytes: usize,
    /// Boxes copied.
    pub copies: usize,
    /// Seconds from the producer's return until the target was ready, allocation included.
    pub seconds: f64,
    /// Seconds of the fill alone.
    pub copy_seconds: f64,
    /// Seconds that the consumer waited; `seconds` unless rows were streamed.
    pub exposed_seconds: f64,
    /// Bytes read and written in a nanosecond of the fill (10⁹ bytes a second).
    pub gigabytes_per_second: f64,
    /// Seconds of a memcpy of as many bytes on the same threads, divided by `copy_seconds`.
    pub memcpy_ratio: Option<f64>,
    /// Bytes of the cache that the decoder's first step copied; known after that step.
    pub first_step_copied_bytes: Option<usize>,
    /// Rows handed over.
    pub rows: usize,
    /// Finite values that the target's type could not hold.
    pub overflow: u64,
    /// Values that were not a number, as far as a conversion read them.
    pub nan: u64,
    /// Infinite values, as far as a conversion read them.
    pub infinity: u64,
    /// The share of the target's pages that existed before the fill; the memcpy it is compared with went into
    /// memory in the same state.
    pub touched_share: Option<f64>,
    /// How the consumer allocated the target: `reserved` without writing it, or `zeroed`.
    #[serde(default)]
    pub allocation: Option<String>,
    /// Seconds spent on that memcpy, outside every other figure.
    #[serde(default, skip_serializing)]
    pub yardstick_seconds: f64,
    /// How the rows were streamed, where they were told of while the prefill ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streamed: Option<StreamReport>,
    /// A sentence where a figure needs one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Why this path was taken, and how that is known, where there was another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
}

/// How rows were streamed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StreamReport {
    /// Chunks, or layers of chunks, that were copied one by one.
    pub pieces: usize,
    /// Seconds of touching the target's pages and zeroing its free rows, while rows were computed.
    pub prepare_seconds: f64,
    /// Seconds of the longest copy of a piece.
    pub longest_copy_seconds: f64,
    /// Seconds that the prefill waited for copies; part of the exposed ones.
    pub blocked_seconds: f64,
}

impl HandoffReport {
    /// The report of a streamed hand-off.
    ///
    /// Rows that came all at once moved after the prefill: `seconds` are then the exposed ones, and otherwise those of
    /// all that was done, most of it beside the prefill.
    pub fn of_stream(done: &Streamed, rows: usize) -> HandoffReport {
        let filled = Filled {
            stats: done.stats.clone(),
            plan_seconds: done.plan_seconds,
            converted: done.converted,
            resident_share: Some(1.0),
        };
        let exposed_seconds = done.exposed_seconds();
        let streamed = (done.pieces > 1).then_some(StreamReport {
            pieces: done.pieces,
            prepare_seconds: done.prepare_seconds,
            longest_copy_seconds: done.longest_copy_seconds,
            blocked_seconds: done.blocked_seconds,
        });
        let seconds = if streamed.is_some() { done.busy_seconds() } else { exposed_seconds };
        HandoffReport { seconds, exposed_seconds, streamed, ..HandoffReport::of_fill(&filled, rows) }
    }

    /// The report of a hand-off without rows: a consumer that starts from nothing, ready after so many seconds.
    pub fn of_nothing(seconds: f64) -> HandoffReport {
        HandoffReport {
            path: PathTaken::Fill,
            bytes: 0,
            copies: 0,
            seconds,
            copy_seconds: 0.0,
            exposed_seconds: seconds,
            gigabytes_per_second: 0.0,
            memcpy_ratio: None,
            first_step_copied_bytes: None,
            rows: 0,
            overflow: 0,
            nan: 0,
            infinity: 0,
            touched_share: None,
            allocation: None,
            yardstick_seconds: 0.0,
            streamed: None,
            note: None,
            because: None,
        }
    }

    /// The report of a fill.
    pub fn of_fill(filled: &Filled, rows: usize) -> HandoffReport {
        let stats = &filled.stats;
        let moved = stats.bytes_read + stats.bytes_written;
        let seconds = filled.plan_seconds + stats.seconds;
        HandoffReport {
            path: if filled.converted { PathTaken::Convert } else { PathTaken::Fill },
            bytes: stats.bytes_written,
            copies: stats.operations,
            seconds,
            copy_seconds: stats.seconds,
            exposed_seconds: seconds,
            gigabytes_per_second: rate(moved, stats.seconds),
            memcpy_ratio: None,
            first_step_copied_bytes: None,
            rows,
            overflow: stats.overflow,
            nan: stats.nan,
            infinity: stats.infinity,
            yardstick_seconds: 0.0,
            touched_share: filled.resident_share,
            allocation: None,
            streamed: None,
            note: None,
            because: None,
        }
    }
}

/// Seconds of a memcpy over seconds of a copy; `None` where nothing was copied.
pub fn memcpy_share(bytes: usize, memcpy_seconds: f64, copy_seconds: f64) -> Option<f64> {
    (bytes > 0 && copy_seconds > 0.0).then(|| memcpy_seconds / copy_seconds)
}

/// 10⁹ bytes a second; 0 for no bytes.
pub(crate) fn rate(bytes: usize, seconds: f64) -> f64 {
    if bytes == 0 || seconds <= 0.0 { 0.0 } else { bytes as f64 / seconds / 1e9 }
}
