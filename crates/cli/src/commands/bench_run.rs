//! `kvbaton bench run`: the whole path, in its parts.

use std::time::Duration;

use kvbaton::bench::Machine;
use kvbaton::plan::route::{Engine, Route};
use kvbaton::{Error, ErrorKind, Memcpy, Range, Threads};
use serde::Serialize;

use super::measure::{Bench, Measured, Mode, prompt};
use super::need_host;
use super::output::{check_writable, write_whole};
use crate::Host;
use crate::args::{BenchRun, RouteChoice, RunMode};
use crate::host::DecoderRequest;
use crate::printer::{Printer, bytes, seconds, table};

impl RunMode {
    fn mode(self) -> Mode {
        Mode {
            streamed: matches!(self, RunMode::StreamedWarm | RunMode::StreamedCold),
            warm: matches!(self, RunMode::StreamedWarm | RunMode::AfterWarm),
        }
    }
}

/// What is run: a route, and how.
#[derive(Clone, Copy)]
struct Case {
    route: Route,
    mode: Mode,
}

impl Case {
    /// Every way of the routes; one that hands nothing over has one.
    fn all(routes: &[RouteChoice], modes: &[RunMode]) -> Result<Vec<Case>, Error> {
        let alone = [RunMode::AfterWarm];
        let picked = || {
            let message = "--route auto is for `run`: a bench measures the routes that it is told to";
            Error::new(ErrorKind::Usage, message)
        };
        let mut cases: Vec<Case> = Vec::new();
        for route in routes {
            let (route, modes) = match route {
                RouteChoice::CoremlMlx => (Route::CoreMlMlx, modes),
                other => (other.route().ok_or_else(picked)?, &alone[..]),
            };
            if cases.iter().all(|c| c.route != route) {
                cases.extend(modes.iter().map(|mode| Case { route, mode: mode.mode() }));
            }
        }
        Ok(cases)
    }

    fn run(self, bench: &mut Bench<'_>, tokens: &[u32]) -> Result<Measured, Error> {
        match self.route {
            Route::CoreMlMlx => bench.split(tokens, self.mode),
            Route::Mlx => bench.alone(tokens),
            Route::CoreMl | Route::MlxCoreMl => bench.packaged(tokens, self.route.prefill()),
        }
    }
}

/// A memcpy large enough to leave the caches behind.
const MEMCPY_BYTES: usize = 256 << 20;

/// The JSON document.
#[derive(Serialize)]
struct Document {
    machine: Machine,
    versions: serde_json::Map<String, serde_json::Value>,
    prefill_engine: String,
    decode_engine: String,
    prefill: String,
    decode: String,
    repeats: usize,
    cooldown_seconds: f64,
    memcpy: Speeds,
    rows: Vec<Row>,
}

/// 10⁹ bytes read and written a second, by libc's memcpy.
#[derive(Serialize)]
struct Speeds {
    bytes: usize,
    warm_gigabytes_per_second: f64,
    cold_gigabytes_per_second: f64,
}

/// One length in one mode.
#[derive(Serialize)]
struct Row {
    route: Route,
    context: usize,
    streamed: bool,
    warm: bool,
    function: String,
    prefill_seconds: Range,
    exposed_seconds: Range,
    /// All that the hand-off did, hidden or not.
    handoff_seconds: Range,
    copy_seconds: Range,
    /// The longest copy of a piece: all of it where rows came at once.
    longest_copy_seconds: Range,
    first_step_seconds: Range,
    decode_seconds: Range,
    decoded_tokens: usize,
    time_to_first_token_seconds: Range,
    /// Exposed seconds of the seconds to the first token, at the medians.
    exposed_share: f64,
    bytes: usize,
    gigabytes_per_second: f64,
    memcpy_ratio: Option<f64>,
    pieces: usize,
    /// Whether the tokens are those of the other modes at this length.
    same_tokens: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

pub(crate) fn run(verb: &BenchRun, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let host = need_host(host, "bench run")?;
    check(verb)?;
    let cases = Case::all(&verb.route, &verb.mode)?;
    let packaged = cases.iter().find(|c| c.route.decode() == Engine::CoreMl);
    if let Some(case) = packaged.filter(|_| verb.decode_package.is_none()) {
        let message = format!("--route {} needs --decode-package", case.route.name());
        return Err(Error::new(ErrorKind::Usage, message));
    }
    let longest = verb.context.iter().copied().max().unwrap_or(2);
    let engine = Bench::open(&verb.prefill, verb.threads, longest - 1)?;
    let (prefill_engine, vocab) = {
        let engine = engine.lock().unwrap_or_else(|e| e.into_inner());
        let model =
            engine.model().ok_or_else(|| Error::new(ErrorKind::Package, "the package names no model"))?;
        kvbaton::check_compatible(model, &host.model_spec(&verb.decode)?, kvbaton::Waived { weights: true })?;
        (engine.engine().to_owned(), model.vocab_size)
    };
    let request = DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
    let decoder = host.decoder(&request)?;
    let decode_engine = decoder.engine();
    let bench = Bench {
        host,
        engine: Some(engine),
        decoder,
        package: None,
        prefiller: None,
        max_tokens: verb.max_tokens,
    };
    let mut bench = bench.with_package(verb.decode_package.as_deref(), &request, verb.threads)?;

    let memcpy = speeds(verb.threads);
    let bar = printer.progress();
    bar.set_length((verb.context.len() * cases.len() * verb.repeats) as u64);
    let mut rows = Vec::new();
    for &context in &verb.context {
        bar.set_message(format!("context {context}"));
        let tokens = prompt(context, vocab);
        // Loads and warms whatever a first run of this length does.
        for (at, case) in cases.iter().enumerate() {
            if cases[..at].iter().all(|c| c.route != case.route) {
                case.run(&mut bench, &tokens)?;
            }
        }
        let mut runs: Vec<Vec<Measured>> = cases.iter().map(|_| Vec::new()).collect();
        for round in 0..verb.repeats {
            for step in 0..cases.len() {
                // Every other round the other way about: what heats up or fills up hits all cases alike.
                let at = if round % 2 == 0 { step } else { cases.len() - 1 - step };
                std::thread::sleep(Duration::from_secs_f64(verb.cooldown));
                runs[at].push(cases[at].run(&mut bench, &tokens)?);
                bar.inc(1);
                if host.interrupted() {
                    return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
                }
            }
        }
        let answer = runs[0][0].generated.tokens.clone();
        rows.extend(cases.iter().zip(&runs).map(|(case, runs)| row(context, *case, runs, &answer)));
    }
    bar.finish_and_clear();
    let document = Document {
        machine: Machine::here(),
        versions: host.versions()?,
        prefill_engine,
        decode_engine,
        prefill: verb.prefill.display().to_string(),
        decode: verb.decode.display().to_string(),
        repeats: verb.repeats,
        cooldown_seconds: verb.cooldown,
        memcpy,
        rows,
    };
    if let Some(file) = &verb.report {
        let value =
            serde_json::to_value(&document).map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))?;
        write_whole(file, &host.bench_page(&value)?)?;
    }
    if printer.is_json() {
        printer.document(&document);
    } else {
        printer.data(&text(&document));
    }
    Ok(())
}

fn check(verb: &BenchRun) -> Result<(), Error> {
    let usage = |message: String| Err(Error::new(ErrorKind::Usage, message));
    if let Some(short) = verb.context.iter().find(|&&n| n < 2) {
        return usage(format!(
            "--context {short}: a prompt of two tokens is the shortest that hands rows over"
        ));
    }
    if verb.context.is_empty() || verb.repeats == 0 || verb.max_tokens == 0 {
        return usage("--context, --repeats and --max-tokens are 1 at least".to_owned());
    }
    if !(verb.cooldown >= 0.0 && verb.cooldown <= 3600.0) {
        return usage(format!("--cooldown {} is no time from 0 to 3600 seconds", verb.cooldown));
    }
    verb.report.as_deref().map_or(Ok(()), check_writable)
}

fn speeds(threads: usize) -> Speeds {
    let threads = Threads::new(threads);
    let mut memcpy = Memcpy::new(MEMCPY_BYTES);
    memcpy.seconds(&threads);
    let rate = |seconds: Vec<f64>| 2.0 * MEMCPY_BYTES as f64 / range(&seconds).median / 1e9;
    let warm = rate((0..5).map(|_| memcpy.seconds(&threads)).collect());
    let cold = rate((0..5).map(|_| memcpy.cold_seconds(&threads)).collect());
    Speeds { bytes: MEMCPY_BYTES, warm_gigabytes_per_second: warm, cold_gigabytes_per_second: cold }
}

fn row(context: usize, Case { route, mode }: Case, runs: &[Measured], answer: &[u32]) -> Row {
    let of = |figure: &dyn Fn(&Measured) -> f64| range(&runs.iter().map(figure).collect::<Vec<_>>());
    let handoff = |figure: &dyn Fn(&kvbaton::HandoffReport) -> f64| {
        of(&|m: &Measured| m.handoff.as_ref().map_or(0.0, figure))
    };
    let time_to_first_token_seconds = of(&|m| m.time_to_first_token_seconds);
    let exposed_seconds = handoff(&|h| h.exposed_seconds);
    let first = &runs[0];
    let report = first.handoff.as_ref();
    let ratios: Vec<f64> = runs.iter().filter_map(|m| m.handoff.as_ref()?.memcpy_ratio).collect();
    let mut warnings = Vec::new();
    if time_to_first_token_seconds.max > 1.5 * time_to_first_token_seconds.min {
        warnings.push("the machine was noisy: the slowest run took over 1.5 times the fastest".to_owned());
    }
    let same_tokens = runs.iter().all(|m| m.generated.tokens == answer);
    if !same_tokens {
        warnings.push("the tokens differ from those of another mode".to_owned());
    }
    Row {
        route,
        context,
        streamed: mode.streamed,
        warm: mode.warm,
        function: first.prefill.function.clone(),
        prefill_seconds: of(&|m| m.prefill.seconds),
        handoff_seconds: handoff(&|h| h.seconds),
        copy_seconds: handoff(&|h| h.copy_seconds),
        longest_copy_seconds: handoff(&|h| h.streamed.map_or(h.copy_seconds, |s| s.longest_copy_seconds)),
        first_step_seconds: of(&|m| m.generated.first_step_seconds),
        decode_seconds: of(&|m| m.generated.seconds),
        decoded_tokens: first.generated.tokens.len(),
        exposed_share: exposed_seconds.median / time_to_first_token_seconds.median,
        exposed_seconds,
        time_to_first_token_seconds,
        bytes: report.map_or(0, |h| h.bytes),
        gigabytes_per_second: handoff(&|h| h.gigabytes_per_second).median,
        memcpy_ratio: Range::of(&ratios).map(|r| r.median),
        pieces: report.map_or(0, |h| h.streamed.map_or(1, |s| s.pieces)),
        same_tokens,
        warnings,
    }
}

pub(crate) fn range(values: &[f64]) -> Range {
    Range::of(values).unwrap_or(Range { min: 0.0, median: 0.0, max: 0.0 })
}

fn text(document: &Document) -> String {
    let m = &document.machine;
    let mut text = format!(
        "{}, {} cores; memcpy of {} {:.1} GB/s warm, {:.1} cold; {} prefills, {} decodes\n\n",
        m.cpu,
        m.cores,
        bytes(document.memcpy.bytes),
        document.memcpy.warm_gigabytes_per_second,
        document.memcpy.cold_gigabytes_per_second,
        document.prefill_engine,
        document.decode_engine,
    );
    let header = [
        "route",
        "context",
        "rows move",
        "memory",
        "prefill",
        "exposed",
        "first step",
        "first token",
        "share",
        "decode",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(document.rows.iter().map(|row| {
        vec![
            row.route.name().to_owned(),
            row.context.to_string(),
            if row.streamed { "meanwhile" } else { "after" }.to_owned(),
            if row.warm { "warm" } else { "cold" }.to_owned(),
            seconds(row.prefill_seconds.median),
            seconds(row.exposed_seconds.median),
            seconds(row.first_step_seconds.median),
            seconds(row.time_to_first_token_seconds.median),
            format!("{:.2} %", 100.0 * row.exposed_share),
            seconds(row.decode_seconds.median),
        ]
    }));
    text.push_str(&table(&rows));
    for row in &document.rows {
        for warning in &row.warnings {
            text.push_str(&format!("warning: context {}: {warning}\n", row.context));
        }
    }
    text
}
