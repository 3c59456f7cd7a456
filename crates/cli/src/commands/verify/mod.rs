//! `kvbaton verify`: whether the hand-off changes the answer.

mod producers;
mod prompts;

use std::ffi::OsString;
use std::path::Path;
use std::time::Instant;

use clap::ValueEnum;
use kvbaton::layout::DType;
use kvbaton::verify::{PromptReport, RungName, Status, Thresholds, VerifyReport, repeat_prefill};
use kvbaton::{CacheView, Error, ErrorKind, Prefilled, check_vocabulary};
use serde_json::{Map, Value, json};

use self::producers::Producers;
use super::need_host;
use super::output::{check_writable, write_whole};
use super::run::is_package;
use crate::Host;
use crate::args::{Verify, VerifyThresholds};
use crate::host::{Decoder, DecoderRequest, VerifyRequest};
use crate::printer::{Printer, table};

/// Runs the verb; the answer is whether the verdict is `pass` or `tie`.
pub(crate) fn run(
    verb: &Verify,
    arguments: &[OsString],
    host: Option<&dyn Host>,
    printer: &Printer,
) -> Result<bool, Error> {
    let host = need_host(host, "verify")?;
    check_flags(verb)?;
    let prompts = prompts::read(&verb.prompts)?;
    let mut producers = Producers::open(verb, host, printer)?;
    if let Some(source) = &verb.source_model
        && producers.own_prefill_is_another_models(verb)?
    {
        printer.note(&format!(
            "note: the decoder's own prefill is of other weights than the package's, and so are its values; \
             `--reference {}` compares with MLX's prefill of the package's own",
            source.display()
        ));
    }
    let request = DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
    let mut decoder = host.decoder(&request)?;
    let dtype = decoder.dtype()?;
    let thresholds = thresholds(&verb.thresholds, dtype)?;
    let jobs = jobs(verb, &prompts, &*decoder, &mut producers)?;

    let bar = printer.progress();
    bar.set_message("verify");
    bar.set_length(jobs.len() as u64);
    let mut results = Vec::with_capacity(jobs.len());
    for job in jobs {
        if host.interrupted() {
            return Err(Error::new(ErrorKind::Interrupted, "interrupted"));
        }
        results.push(verify_prompt(verb, job, &mut producers, &mut *decoder, thresholds)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let facts = facts(verb, arguments, host, &*decoder, dtype, &producers)?;
    let report = VerifyReport::new(results, thresholds, facts);
    if let Some(path) = &verb.report {
        let document = serde_json::to_value(&report)
            .map_err(|e| Error::new(ErrorKind::Internal, format!("the report cannot be written: {e}")))?;
        write_whole(path, &host.page(&document)?)?;
    }
    if printer.is_json() {
        printer.document(&report);
    } else {
        printer.data(&summary(&report));
        if let Some(path) = &verb.report {
            printer.note(&format!("report: {}", path.display()));
        }
    }
    Ok(report.verdict.is_yes())
}

/// What was given, and else what is usual for a decoder of that type.
fn thresholds(given: &VerifyThresholds, dtype: DType) -> Result<Thresholds, Error> {
    let usual = Thresholds::usual(dtype);
    let thresholds = Thresholds {
        tie: given.tie.unwrap_or(usual.tie),
        min_cosine: given.min_cosine.unwrap_or(usual.min_cosine),
        max_norm_error: given.max_norm_error.unwrap_or(usual.max_norm_error),
        max_row_error: given.max_row_error.unwrap_or(usual.max_row_error),
        max_kl: given.max_kl.unwrap_or(usual.max_kl),
        min_agreement: given.min_agreement.unwrap_or(usual.min_agreement),
    };
    thresholds.check()?;
    Ok(thresholds)
}

/// What is wrong is said before anything heavy is loaded.
fn check_flags(verb: &Verify) -> Result<(), Error> {
    // Whichever decoder it is: what is given must be a threshold.
    thresholds(&verb.thresholds, DType::Float32)?;
    let usage = |message: String| Err(Error::new(ErrorKind::Usage, message));
    if verb.max_tokens == 0 {
        return usage("--max-tokens 0 compares no token".to_owned());
    }
    if verb.repeat == 0 {
        return usage("--repeat 0 prefills nothing".to_owned());
    }
    if let Some(context) = verb.context.iter().find(|c| **c <= verb.max_tokens) {
        return usage(format!(
            "a context of {context} tokens has no room for a prompt and a continuation of {}",
            verb.max_tokens
        ));
    }
    if is_package(&verb.decode) {
        let message =
            format!("`{}` is a Core ML package, whose logits cannot be compared", verb.decode.display());
        return Err(Error::new(ErrorKind::Usage, message).hint("name the MLX model's folder with --decode"));
    }
    verb.report.as_deref().map_or(Ok(()), check_writable)
}

/// A prompt at one length.
struct Job {
    name: String,
    context: Option<usize>,
    tokens: Vec<u32>,
}

/// Every prompt at every context, checked against the packages before the first one runs.
fn jobs(
    verb: &Verify,
    prompts: &[prompts::Prompt],
    decoder: &dyn Decoder,
    producers: &mut Producers<'_>,
) -> Result<Vec<Job>, Error> {
    let vocab = producers.package.model().map_or(usize::MAX, |m| m.vocab_size);
    let mut jobs = Vec::new();
    for prompt in prompts {
        let of_prompt = |e: Error| named(&prompt.name, &e);
        let tokens = prompt.encode(decoder, verb.ignore_chat_template).map_err(of_prompt)?;
        check_vocabulary(&tokens, vocab).map_err(of_prompt)?;
        let lengths: Vec<Option<usize>> = match verb.context.as_slice() {
            [] => vec![None],
            contexts => contexts.iter().copied().map(Some).collect(),
        };
        for context in lengths {
            let want = context.map_or(tokens.len(), |c| c - verb.max_tokens);
            if want > tokens.len() {
                let message = format!(
                    "it has {} tokens; a context of {} and a continuation of {} want {want}",
                    tokens.len(),
                    context.unwrap_or(want),
                    verb.max_tokens
                );
                let error = Error::new(ErrorKind::Usage, message).field("prompt_tokens", tokens.len());
                return Err(of_prompt(error.field("wanted_tokens", want)));
            }
            if want == 0 {
                return Err(of_prompt(Error::new(ErrorKind::EmptyPrompt, "the prompt has no tokens")));
            }
            producers.prepare(want).map_err(of_prompt)?;
            jobs.push(Job { name: prompt.name.clone(), context, tokens: tokens[..want].to_vec() });
        }
    }
    Ok(jobs)
}

/// An error of one of many prompts.
fn named(prompt: &str, error: &Error) -> Error {
    let shown = one_line(prompt);
    let mut named = Error::new(error.kind(), format!("prompt `{shown}`: {error}")).field("prompt", prompt);
    if let Some(hint) = error.get_hint() {
        named = named.hint(hint);
    }
    for (name, value) in error.fields() {
        named = named.field(name, value.clone());
    }
    named
}

/// A name as a message shows it: what would break a line or command a terminal is escaped.
fn one_line(name: &str) -> String {
    name.chars()
        .map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() })
        .collect()
}

fn verify_prompt(
    verb: &Verify,
    job: Job,
    producers: &mut Producers<'_>,
    decoder: &mut dyn Decoder,
    thresholds: Thresholds,
) -> Result<PromptReport, Error> {
    let start = Instant::now();
    let prompt = &job.tokens[..job.tokens.len() - 1];
    let mut facts = Map::new();
    let mut fact = |name: &str, value: Value| facts.insert(name.to_owned(), value);
    let (mut cache, mut reference): (Option<CacheView>, Option<CacheView>) = (None, None);
    // Of a prompt of one token nothing is handed over: the decoder starts from empty caches.
    if !prompt.is_empty() {
        let (prefilled, repeated) = repeat_prefill(&mut *producers.package, prompt, verb.repeat)?;
        reference = producers.reference(prompt)?;
        let Prefilled { cache: left, report, .. } = prefilled;
        cache = Some(left);
        fact("producer", json!(repeated));
        fact("prefill", json!(report));
    }
    fact("name", json!(job.name));
    if job.context.is_some() {
        fact("context", json!(job.context));
    }
    fact("prompt_tokens", json!(job.tokens.len()));
    let tokens = job.tokens;
    let request = VerifyRequest { cache, reference, tokens, max_tokens: verb.max_tokens, thresholds };
    let rungs = decoder.verify(request)?;
    fact("seconds", json!(start.elapsed().as_secs_f64()));
    Ok(PromptReport::new(rungs, facts))
}

/// The command, the versions and the fingerprints of a run.
fn facts(
    verb: &Verify,
    arguments: &[OsString],
    host: &dyn Host,
    decoder: &dyn Decoder,
    dtype: DType,
    producers: &Producers<'_>,
) -> Result<Map<String, Value>, Error> {
    let shown = |path: &Path| path.display().to_string();
    let mut versions = host.versions()?;
    versions.insert("kvbaton".to_owned(), json!(env!("CARGO_PKG_VERSION")));
    let numerics = verb.runtime.executor.numerics.to_possible_value().map(|v| v.get_name().to_owned());
    let waived: Vec<&str> = verb.allow_different.iter().map(|_| "weights").collect();
    let document = json!({
        "command": command(arguments),
        "settings": {
            "prefill": shown(&verb.prefill),
            "prefill_engine": producers.package.engine(),
            "decode": shown(&verb.decode),
            "decode_engine": decoder.engine(),
            "reference": producers.compared_with(verb)?,
            "source_model": verb.source_model.as_deref().map(shown),
            "prompts": shown(&verb.prompts),
            "max_tokens": verb.max_tokens,
            "dtype": dtype.name(),
            "numerics": numerics,
            "repeat": verb.repeat,
            "allowed_different": waived,
        },
        "versions": versions,
        "fingerprints": producers.fingerprints(verb)?,
    });
    let Value::Object(facts) = document else { return Ok(Map::new()) };
    Ok(facts)
}

/// The command line as a shell would take it again.
fn command(arguments: &[OsString]) -> String {
    let quoted = |word: &OsString| {
        let word = word.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./,:=+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word.into_owned()
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    };
    let rest = arguments.iter().skip(1).map(quoted);
    std::iter::once("kvbaton".to_owned()).chain(rest).collect::<Vec<_>>().join(" ")
}

fn summary(report: &VerifyReport) -> String {
    let mut text = format!("{}: {}\n\n", report.verdict, report.reason);
    let mut rows = Vec::new();
    for rung in &report.rungs {
        let status = match rung.status {
            Status::Pass if rung.tie => "pass, with ties",
            Status::Pass => "pass",
            Status::Fail => "fail",
            Status::NotRun => "not run",
        };
        rows.push(vec![rung.name.to_string(), status.to_owned(), detail(rung)]);
    }
    text.push_str(&table(&rows));
    let different = report.prompts.iter().enumerate().filter(|(_, p)| !p.verdict.is_yes());
    for (index, prompt) in different.take(if report.prompts.len() > 1 { 10 } else { 0 }) {
        let rung = prompt.rungs.iter().find(|r| r.status != Status::Pass);
        let why =
            rung.map(|r| format!("{}: {}", r.name, r.note.as_deref().unwrap_or(""))).unwrap_or_default();
        let name = prompt.facts.get("name").and_then(Value::as_str).unwrap_or_default();
        text.push_str(&format!("prompt {index} ({}): {}; {why}\n", one_line(name), prompt.verdict));
    }
    text
}

fn detail(rung: &kvbaton::verify::Rung) -> String {
    if rung.status != Status::Pass {
        let place = rung.place.as_ref().map(|p| format!("{p}: ")).unwrap_or_default();
        return format!("{place}{}", rung.note.as_deref().unwrap_or(""));
    }
    let number = |name: &str| rung.figures.get(name).and_then(Value::as_f64).unwrap_or(0.0);
    match rung.name {
        RungName::Bytes => format!("{} elements, all equal", number("elements")),
        RungName::Values => format!(
            "smallest cosine {:.7}, norm off by {:.1e}, a row by {:.1e}",
            number("min_cosine"),
            number("max_norm_error"),
            number("max_row_error")
        ),
        RungName::Logits => format!(
            "divergence up to {:.1e} nats, a logit off by up to {:.4}",
            number("max_kl"),
            number("max_difference")
        ),
        RungName::TeacherForced => format!(
            "{} of {} steps agree, {} are near ties",
            number("agreed"),
            number("steps"),
            number("near_ties")
        ),
        RungName::FreeRunning => {
            let prompts = number("passed") + number("failed");
            format!("{} of {prompts} continuations identical", number("identical"))
        }
    }
}
