//! What a run says of itself, as JSON and as text.

use kvbaton::{HandoffReport, PrefillReport};
use serde::Serialize;

use super::super::decision::Decision;
use crate::host::{Decoder, Generated};
use crate::printer::{bytes, seconds, table};

/// The JSON document.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) text: String,
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_tokens: usize,
    pub(super) handed_off_tokens: usize,
    pub(super) remaining_tokens: Vec<u32>,
    pub(super) prefill: Option<PrefillReport>,
    pub(super) handoff: HandoffReport,
    pub(super) decode: DecodeReport,
    pub(super) time_to_first_token_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) route: Option<Decision>,
    pub(super) allowed_different: Vec<&'static str>,
}

#[derive(Serialize)]
pub(super) struct DecodeReport {
    pub(super) engine: String,
    /// The compute units that a package was loaded for, where its engine has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) compute_units: Option<String>,
    /// What the user should know of how it runs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) notes: Vec<String>,
    pub(super) seconds: f64,
    pub(super) tokens_per_second: f64,
    pub(super) first_step_seconds: f64,
}

impl DecodeReport {
    /// What `decoder` did.
    pub(super) fn new(decoder: &dyn Decoder, generated: &Generated) -> DecodeReport {
        DecodeReport {
            engine: decoder.engine(),
            compute_units: decoder.compute_units(),
            notes: decoder.notes(),
            seconds: generated.seconds,
            tokens_per_second: generated.tokens.len() as f64 / generated.seconds.max(f64::MIN_POSITIVE),
            first_step_seconds: generated.first_step_seconds,
        }
    }
}

/// The report to read.
pub(super) fn summary(report: &Report) -> String {
    let row = |name: &str, time: f64, detail: String| vec![name.to_owned(), seconds(time), detail];
    let mut rows = Vec::new();
    match &report.prefill {
        Some(p) => rows.push(row(
            "prefill",
            p.seconds,
            format!(
                "{} tokens, {:.0} tokens/s, {} on {}{}",
                p.tokens,
                p.tokens_per_second,
                p.function,
                p.engine,
                p.compute_units.as_ref().map(|u| format!(" ({u})")).unwrap_or_default(),
            ),
        )),
        None if report.handoff.bytes > 0 => rows.push(row("prefill", 0.0, "none: a dump".to_owned())),
        None => rows.push(row("prefill", 0.0, "skipped: a prompt of one token".to_owned())),
    }
    let h = &report.handoff;
    let share = h.memcpy_ratio.map_or_else(|| "-".to_owned(), |r| format!("{r:.2}"));
    rows.push(row(
        "hand-off",
        h.seconds,
        format!(
            "{} in {} ({:.1} GB/s, {share} of memcpy), path {}",
            bytes(h.bytes),
            seconds(h.copy_seconds),
            h.gigabytes_per_second,
            serde_json::to_value(h.path).ok().and_then(|p| p.as_str().map(str::to_owned)).unwrap_or_default(),
        ),
    ));
    if let Some(streamed) = &h.streamed {
        rows.push(row(
            "  of it exposed",
            h.exposed_seconds,
            format!("{} pieces moved while the prefill ran", streamed.pieces),
        ));
    }
    rows.push(row(
        "first decode step",
        report.decode.first_step_seconds,
        h.first_step_copied_bytes.map_or_else(
            || format!("{} does not show what it copies", report.decode.engine),
            |copied| format!("{} of cache copied", bytes(copied)),
        ),
    ));
    rows.push(row(
        "decode",
        report.decode.seconds,
        format!(
            "{} tokens, {:.1} tokens/s, {}{}",
            report.tokens.len(),
            report.decode.tokens_per_second,
            report.decode.engine,
            report.decode.compute_units.as_ref().map(|u| format!(" ({u})")).unwrap_or_default(),
        ),
    ));
    rows.push(row("time to first token", report.time_to_first_token_seconds, String::new()));
    if let Some(route) = &report.route {
        let estimate = route.estimated.iter().find(|r| r.name == route.pick);
        let estimated = estimate.and_then(|r| r.time_to_first_token_seconds);
        rows.push(row("  as estimated", estimated.unwrap_or(0.0), route.reason.clone()));
    }
    let mut text = table(&rows);
    for note in report.prefill.iter().flat_map(|p| &p.notes) {
        text.push_str(&format!("prefill: {note}\n"));
    }
    for note in &report.decode.notes {
        text.push_str(&format!("decode: {note}\n"));
    }
    if let Some(because) = &h.because {
        text.push_str(&format!("path: {because}\n"));
    }
    if let Some(note) = &h.note {
        text.push_str(&format!("memcpy: {note}\n"));
    }
    for what in &report.allowed_different {
        text.push_str(&format!("allowed to differ: {what}\n"));
    }
    text
}
