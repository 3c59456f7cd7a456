//! `kvbaton calibrate`: what `plan` must know of this machine.

use std::path::Path;

use kvbaton::bench::Machine as Facts;
use kvbaton::plan::route::{CopyRate, DecodeFigure, Engine, HandoffFigure, Machine, Origin, PrefillFigure};
use kvbaton::{Error, ErrorKind, Memcpy, Threads, calibrated_file, kept_machine, write_machine};

use super::bench_run::range;
use super::measure::{Bench, Measured, Mode, prompt};
use super::routes::{Subject, decode_package, prefill_package, subject};
use super::{MOST_TOKENS, need_host};
use crate::Host;
use crate::args::Calibrate;
use crate::host::DecoderRequest;
use crate::printer::{Printer, seconds, table};

/// Bytes of the copies that rates are taken from.
const COPY_BYTES: usize = 128 << 20;

/// Tokens decoded after each prefill: the first step, and some after it.
const DECODED: usize = 9;

pub(crate) fn run(verb: &Calibrate, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let host = need_host(host, "calibrate")?;
    if let Some(short) = verb.lengths.iter().find(|&&n| n < 2) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("--lengths {short}: two tokens are the shortest prompt"),
        ));
    }
    if let Some(long) = verb.lengths.iter().find(|&&n| n > MOST_TOKENS) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("--lengths {long}: a prompt has {MOST_TOKENS} tokens at most"),
        ));
    }
    if verb.repeats == 0 || verb.lengths.is_empty() {
        return Err(Error::new(ErrorKind::Usage, "--repeats and --lengths want one at least"));
    }
    let file = verb.out.clone().or_else(calibrated_file).ok_or_else(|| {
        Error::new(ErrorKind::Usage, "there is no home folder to keep the file in").hint("name it with --out")
    })?;
    // What cannot be added to is said before minutes of work.
    kept_machine(&file)?;
    let subject = subject(&verb.decode.display().to_string(), verb.dtype.map(|d| d.dtype()), Some(host))?;
    let package = verb.prefill.as_deref().map(|p| prefill_package(p, &subject, verb.threads)).transpose()?;
    let name = model_name(&verb.decode);
    let request = DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
    let fits = |n: usize| package.as_ref().is_some_and(|p| n - 1 <= p.limit());
    let engine = match &verb.prefill {
        Some(path) => {
            let reach = verb.lengths.iter().copied().filter(|&n| fits(n)).max().ok_or_else(|| {
                Error::new(ErrorKind::PromptTooLong, "the package takes none of the --lengths")
                    .field("longest", package.as_ref().map_or(0, |p| p.limit()))
            })?;
            Some(Bench::open(path, verb.threads, reach - 1)?)
        }
        None => None,
    };
    let decoder = host.decoder(&request)?;
    let bench = Bench { host, engine, decoder, package: None, prefiller: None, max_tokens: DECODED };
    let mut bench = bench.with_package(verb.decode_package.as_deref(), &request, verb.threads)?;
    let decodes =
        verb.decode_package.as_deref().map(|p| decode_package(p, &subject, verb.threads)).transpose()?;
    let decodes = decodes.as_ref();
    let vocab = subject.model.as_ref().map_or(1, |m| m.vocab_size);

    let mut machine = empty(&subject, &name, verb.threads);
    let bar = printer.progress();
    bar.set_length((verb.lengths.len() * (verb.repeats + 1)) as u64);
    let mut rows = vec![["engine", "tokens", "prefill", "hand-off", "step"].map(str::to_owned).to_vec()];
    for &length in &verb.lengths {
        bar.set_message(format!("{length} tokens"));
        let tokens = prompt(length, vocab);
        let (mut alone, mut warm, mut cold) = (Vec::new(), Vec::new(), Vec::new());
        let mut packaged = Vec::new();
        for round in 0..=verb.repeats {
            let mut runs = (bench.alone(&tokens)?, None, None);
            if fits(length) {
                runs.1 = Some(bench.split(&tokens, Mode { streamed: true, warm: true })?);
                runs.2 = Some(bench.split(&tokens, Mode { streamed: false, warm: false })?);
            }
            let by_package = match decodes {
                Some(package) if length + DECODED <= package.limit() => {
                    Some(bench.packaged(&tokens, Engine::Mlx)?)
                }
                _ => None,
            };
            // The first round warms.
            if round > 0 {
                packaged.extend(by_package);
                alone.push(runs.0);
                warm.extend(runs.1);
                cold.extend(runs.2);
            }
            bar.inc(1);
            if host.interrupted() {
                return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
            }
        }
        let shown = |engine: Engine, runs: &[Measured]| {
            let exposed = median(runs, |m| m.handoff.as_ref().map_or(0.0, |h| h.exposed_seconds));
            vec![
                engine.name().to_owned(),
                length.to_string(),
                seconds(median(runs, |m| m.prefill.seconds)),
                seconds(exposed),
                seconds(step(runs)),
            ]
        };
        machine.prefill.push(prefilled(Engine::Mlx, &name, &subject.dtype, length - 1, &alone));
        machine.decode.push(decoded(Engine::Mlx, &name, &subject.dtype, length, &alone));
        if let Some(package) = decodes.filter(|_| !packaged.is_empty()) {
            machine.decode.push(decoded(Engine::CoreMl, &name, &package.dtype, length, &packaged));
        }
        rows.push(shown(Engine::Mlx, &alone));
        if let Some(package) = package.as_ref().filter(|_| !warm.is_empty()) {
            let computed = package.computed_rows(length - 1).unwrap_or(length - 1);
            machine.prefill.push(prefilled(Engine::CoreMl, &name, &package.dtype, computed, &warm));
            machine.decode.push(decoded(Engine::Mlx, &name, &subject.dtype, length, &warm));
            machine.handoff.extend([handed(&warm, true), handed(&cold, false)].into_iter().flatten());
            rows.push(shown(Engine::CoreMl, &warm));
        }
    }
    bar.finish_and_clear();
    let machine = write_machine(machine, &file)?;
    if printer.is_json() {
        printer.document(&machine);
    } else {
        printer.data(&table(&rows));
        printer.data(&format!("\nkept in {}\n", file.display()));
    }
    Ok(())
}

/// This machine before anything but its copies is known.
fn empty(subject: &Subject, name: &str, threads: usize) -> Machine {
    let facts = Facts::here();
    let threads = Threads::new(threads);
    let mut memcpy = Memcpy::new(COPY_BYTES);
    memcpy.seconds(&threads);
    let rate = |seconds: Vec<f64>| CopyRate {
        gigabytes_per_second: 2.0 * COPY_BYTES as f64 / range(&seconds).median / 1e9,
        source: None,
    };
    let warm_copy = rate((0..5).map(|_| memcpy.seconds(&threads)).collect());
    let cold_copy = Some(rate((0..5).map(|_| memcpy.cold_seconds(&threads)).collect()));
    Machine {
        name: facts.cpu.clone(),
        origin: Origin::Measured,
        chips: vec![facts.cpu],
        note: None,
        warm_copy,
        cold_copy,
        models: [(name.to_owned(), subject.work.clone())].into(),
        prefill: Vec::new(),
        decode: Vec::new(),
        handoff: Vec::new(),
        power: Vec::new(),
    }
}

/// The folder's own name.
fn model_name(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or_else(|| "model".to_owned(), |n| n.to_string_lossy().into_owned())
}

fn median(runs: &[Measured], of: impl Fn(&Measured) -> f64) -> f64 {
    range(&runs.iter().map(of).collect::<Vec<_>>()).median
}

/// Seconds of a step: the first, which the time to the first token has in it.
fn step(runs: &[Measured]) -> f64 {
    median(runs, |m| m.generated.first_step_seconds)
}

fn prefilled(engine: Engine, model: &str, dtype: &str, tokens: usize, runs: &[Measured]) -> PrefillFigure {
    let (model, dtype) = (model.to_owned(), dtype.to_owned());
    PrefillFigure { engine, model, dtype, tokens, seconds: median(runs, |m| m.prefill.seconds), source: None }
}

fn decoded(engine: Engine, model: &str, dtype: &str, context: usize, runs: &[Measured]) -> DecodeFigure {
    let (model, dtype) = (model.to_owned(), dtype.to_owned());
    DecodeFigure { engine, model, dtype, context, seconds: step(runs), source: None }
}

fn handed(runs: &[Measured], warm: bool) -> Option<HandoffFigure> {
    let report = runs.first()?.handoff.as_ref()?;
    // The pieces before the last were hidden: what was exposed moved only the last.
    let pieces = report.streamed.map_or(1, |s| s.pieces);
    let moved = report.gigabytes_per_second * 1e9 * report.copy_seconds / pieces as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of bytes")]
    let bytes = moved.round() as usize;
    let seconds = median(runs, |m| m.handoff.as_ref().map_or(0.0, |h| h.exposed_seconds));
    (seconds > 0.0).then_some(HandoffFigure { bytes, warm, seconds, source: None })
}
