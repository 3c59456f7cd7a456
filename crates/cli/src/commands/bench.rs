//! `kvbaton bench`.

use kvbaton::bench::{HandoffBench, HandoffRow, Machine, PrefillRow, bench_handoff, bench_prefill};
use kvbaton::{Error, ErrorKind, Stated};
use serde_json::json;

use super::{cache_shape, layout, need_host};
use crate::Host;
use crate::args::{Bench, BenchHandoff, BenchPrefill, BenchVerb};
use crate::host::PrefillComparison;
use crate::printer::{Printer, bytes, seconds, table};

pub(crate) fn run(verb: &Bench, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    match &verb.verb {
        BenchVerb::Handoff(verb) => handoff(verb, host, printer),
        BenchVerb::Prefill(verb) => prefill(verb, host, printer),
        BenchVerb::Run(verb) => super::bench_run::run(verb, host, printer),
    }
}

/// As many measurements as were asked for: none is no bench.
fn measurements(repeats: usize) -> Result<usize, Error> {
    if repeats == 0 {
        return Err(Error::new(ErrorKind::Usage, "--repeats 0 measures nothing"));
    }
    Ok(repeats)
}

fn handoff(verb: &BenchHandoff, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let bench = HandoffBench {
        shape: verb.shape.clone(),
        cache: cache_shape(&verb.shape, host)?,
        source: layout(&verb.source)?,
        target: layout(&verb.target)?,
        contexts: verb.context.clone(),
        live_fraction: verb.live_fraction,
        dtype: verb.dtype.dtype(),
        row_stride_bytes: verb.row_stride,
        threads: verb.threads,
        repeats: measurements(verb.repeats)?,
    };
    let bar = printer.progress();
    bar.set_length(bench.contexts.len() as u64);
    let report = bench_handoff(&bench, |row| {
        bar.set_message(format!("context {}", row.context));
        bar.inc(1);
    })?;
    bar.finish_and_clear();
    for warning in report.rows.iter().flat_map(|r| r.warnings.iter().map(move |w| (r.context, w))) {
        printer.note(&format!("warning: context {}: {}", warning.0, warning.1));
    }
    if printer.is_json() {
        printer.document(&report);
        return Ok(());
    }
    let m = &report.memcpy;
    printer.data(&format!(
        "{}, {} cores\nmemcpy of {}: {:.1} GB/s warm, {:.1} GB/s cold (read + written, {} threads)\n\n",
        report.machine.cpu,
        report.machine.cores,
        bytes(m.warm.bytes),
        m.warm.gigabytes_per_second,
        m.cold.gigabytes_per_second,
        report.rows.first().map_or(0, |r| r.threads),
    ));
    let header = [
        "context",
        "live rows",
        "bytes",
        "copies",
        "plan",
        "copy",
        "GB/s",
        "of memcpy",
        "cold copy",
        "of cold memcpy",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(report.rows.iter().map(handoff_cells));
    printer.data(&table(&rows));
    Ok(())
}

fn handoff_cells(row: &HandoffRow) -> Vec<String> {
    let share = |r: Option<f64>| r.map_or_else(|| "-".to_owned(), |r| format!("{r:.2}"));
    vec![
        row.context.to_string(),
        row.live_rows.to_string(),
        bytes(row.bytes),
        row.operations.to_string(),
        seconds(row.plan_seconds.median),
        seconds(row.copy_seconds.median),
        share(row.gigabytes_per_second),
        share(row.memcpy_ratio),
        seconds(row.cold_copy_seconds.median),
        share(row.cold_memcpy_ratio),
    ]
}

fn prefill(verb: &BenchPrefill, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let options = verb.runtime.options(verb.threads, Stated::default(), printer);
    let mut rows = vec![bench_prefill(&verb.package, verb.tokens, measurements(verb.repeats)?, options)?];
    if let Some(folder) = &verb.compare {
        let request =
            PrefillComparison { folder: folder.clone(), tokens: verb.tokens, threads: rows[0].threads };
        rows.extend(need_host(host, "bench prefill --compare")?.compare_prefill(&request)?);
    }
    if printer.is_json() {
        printer.document(&json!({"machine": Machine::here(), "rows": rows}));
        return Ok(());
    }
    let header = [
        "engine",
        "dtype",
        "tokens",
        "threads",
        "median",
        "tokens/s",
        "times the first",
        "peak memory",
        "computed",
    ];
    let mut cells = vec![header.map(str::to_owned).to_vec()];
    cells.extend(rows.iter().map(|row| prefill_cells(row, &rows[0])));
    printer.data(&table(&cells));
    Ok(())
}

fn size(n: Option<u64>) -> String {
    n.and_then(|n| usize::try_from(n).ok()).map_or_else(|| "-".to_owned(), bytes)
}

fn prefill_cells(row: &PrefillRow, first: &PrefillRow) -> Vec<String> {
    vec![
        row.engine.clone(),
        row.dtype.clone(),
        row.tokens.to_string(),
        row.threads.to_string(),
        seconds(row.seconds.median),
        format!("{:.0}", row.tokens_per_second),
        format!("{:.2}", row.seconds.median / first.seconds.median),
        size(row.peak_bytes),
        size(row.computed_bytes),
    ]
}
