//! `kvbaton run`: the main job.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvbaton::layout::{Layout, LiveRows, ModelSpec};
use kvbaton::plan::route::{Engine, Route};
use kvbaton::{
    ChainPrefill, CpuDecode, Decode, DigestCache, Error, ErrorKind, HandoffReport, Prefill, PrefillReport,
    SharedPrefill, Stated, Waived, check_compatible, open_dump, open_prefill,
};
use serde::Serialize;

use super::decision::{Cost, Decision, taken};
use super::{described, layout, need_host, need_tokenizer, parse_ids, read_text};
use crate::Host;
use crate::args::{Different, Foreign, Prompt, Run};
use crate::host::{Decoder, DecoderRequest, Generated, Prefiller, Tokenizer};
use crate::package_decoder::PackageDecoder;
use crate::printer::{Printer, bytes, seconds, table};

/// The JSON document.
#[derive(Serialize)]
struct Report {
    text: String,
    tokens: Vec<u32>,
    prompt_tokens: usize,
    handed_off_tokens: usize,
    remaining_tokens: Vec<u32>,
    prefill: Option<PrefillReport>,
    handoff: HandoffReport,
    decode: DecodeReport,
    time_to_first_token_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<Decision>,
    allowed_different: Vec<&'static str>,
}

#[derive(Serialize)]
struct DecodeReport {
    engine: String,
    seconds: f64,
    tokens_per_second: f64,
    first_step_seconds: f64,
}

/// Where the cache comes from.
enum Producer<'a> {
    Engine(Box<dyn Prefill>),
    Model(Box<dyn Prefiller + 'a>, Box<ModelSpec>),
    Dump(Box<(Layout, ModelSpec)>),
}

impl Producer<'_> {
    fn model(&self) -> Option<&ModelSpec> {
        match self {
            Producer::Engine(engine) => engine.model(),
            Producer::Model(_, model) => Some(model),
            Producer::Dump(stated) => Some(&stated.1),
        }
    }
}

pub(crate) fn run(verb: &Run, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let host = need_host(host, "run")?;
    check_flags(verb)?;
    let mut producer = producer(verb, host, printer)?;
    let waived = Waived { weights: verb.allow_different.contains(&Different::Weights) };
    let mut decoder: Box<dyn Decoder + '_> = if is_package(&verb.decode) {
        if verb.dtype.is_some() {
            let message = "--dtype is for MLX models: a package's types are its own";
            return Err(Error::new(ErrorKind::Usage, message));
        }
        let engine = CpuDecode::open(&verb.decode, &verb.runtime.executor.options(verb.threads))?;
        check_package(producer.model(), engine.model(), waived)?;
        Box::new(PackageDecoder::new(Box::new(engine), tokenizer(verb, host)?, verb.threads))
    } else {
        check_models(producer.model(), &verb.decode, verb.source_model.as_deref(), host, waived)?;
        let request = DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
        host.decoder(&request)?
    };
    let tokens = match (&verb.tokenizer, is_package(&verb.decode)) {
        (Some(folder), false) if verb.prompt.prompt_tokens.is_none() => {
            let tokenizer = need_tokenizer(folder, host)?;
            prompt_tokens(&verb.prompt, &|text| tokenizer.encode(text, verb.ignore_chat_template))?
        }
        _ => prompt_tokens(&verb.prompt, &|text| decoder.encode(text, verb.ignore_chat_template))?,
    };
    let Some((_, prompt)) = tokens.split_last() else {
        return Err(Error::new(ErrorKind::EmptyPrompt, "the prompt has no tokens")
            .hint("give at least one token; without a beginning-of-text token an empty text has none"));
    };
    let taken = taken(verb, matches!(producer, Producer::Engine(_)), host, tokens.len())?;
    let alone = taken.route == Some(Route::Mlx);
    if let Some(package) = verb.decode_package.as_deref()
        && taken.route.is_some_and(|r| r.decode() == Engine::CoreMl)
    {
        let engine = CpuDecode::open(package, &verb.runtime.executor.options(verb.threads))?;
        check_package(producer.model(), engine.model(), waived)?;
        decoder =
            Box::new(PackageDecoder::new(Box::new(engine), host.tokenizer(&verb.decode)?, verb.threads));
    }
    if taken.route == Some(Route::MlxCoreMl) {
        let request = DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
        let model = described(&verb.decode, host)?;
        producer = Producer::Model(host.prefiller(&request)?, Box::new(model));
    }
    if let (Producer::Engine(engine), false, false) = (&mut producer, prompt.is_empty(), alone) {
        engine.prepare(prompt.len()).map_err(|e| whole_prompt(e, tokens.len()))?;
    }

    let start = Instant::now();
    let (prefill, mut handoff) = match producer {
        Producer::Engine(_) | Producer::Model(..) if prompt.is_empty() => {
            (None, decoder.receive(None, &tokens)?)
        }
        Producer::Engine(_) if alone => (Some(decoder.prefill(&tokens)?), HandoffReport::of_nothing(0.0)),
        Producer::Engine(mut engine) if verb.no_stream => {
            let prefilled = engine.prefill(prompt)?;
            (Some(prefilled.report), decoder.receive(Some(prefilled.cache), &tokens)?)
        }
        Producer::Engine(engine) => {
            let shared: SharedPrefill = Arc::new(Mutex::new(engine));
            let (prefill, handoff) = decoder.receive_streamed(&shared, &tokens)?;
            (Some(prefill), handoff)
        }
        Producer::Model(mut model, _) => {
            let view = model.prefill(prompt)?;
            let seconds = start.elapsed().as_secs_f64();
            let report = PrefillReport::new(&model.engine(), "mlx-lm".to_owned(), prompt.len(), seconds);
            (Some(report), decoder.receive(Some(view), &tokens)?)
        }
        Producer::Dump(stated) => {
            let (layout, model) = *stated;
            let view = open_dump(&verb.prefill, layout, model, dumped_rows(&verb.foreign, tokens.len()))?;
            (None, decoder.receive(Some(view), &tokens)?)
        }
    };
    let before_decode = start.elapsed().as_secs_f64();
    let remaining = tokens[tokens.len() - 1..].to_vec();
    let mut emit = |token: &crate::Token| {
        if !printer.is_json() {
            printer.data(&token.text);
        }
        !host.interrupted()
    };
    let generated = decoder.generate(&remaining, verb.max_tokens, verb.temp, &mut emit)?;
    if !printer.is_json() {
        printer.data("\n");
    }
    handoff.first_step_copied_bytes = Some(generated.first_step_copied_bytes);

    let mut report = Report {
        route: taken.decision,
        decode: decode_report(decoder.engine(), &generated),
        prompt_tokens: tokens.len(),
        handed_off_tokens: if alone { 0 } else { prompt.len() },
        remaining_tokens: remaining,
        prefill,
        time_to_first_token_seconds: before_decode - handoff.yardstick_seconds + generated.first_step_seconds,
        handoff,
        text: generated.text,
        tokens: generated.tokens,
        allowed_different: if waived.weights { vec!["weights"] } else { Vec::new() },
    };
    let measured = Cost {
        prefill_seconds: report.prefill.as_ref().map_or(0.0, |p| p.seconds),
        exposed_seconds: report.handoff.exposed_seconds,
        first_step_seconds: report.decode.first_step_seconds,
        decode_seconds: report.decode.seconds,
        time_to_first_token_seconds: report.time_to_first_token_seconds,
        total_seconds: report.time_to_first_token_seconds + report.decode.seconds
            - report.decode.first_step_seconds,
    };
    if let Some(route) = &mut report.route {
        route.measured = measured;
    }
    if printer.is_json() {
        printer.document(&report);
    } else {
        printer.raw_error(&summary(&report));
    }
    Ok(())
}

/// Whether a folder is a Core ML package.
fn is_package(path: &Path) -> bool {
    path.join("Manifest.json").is_file() || path.extension().is_some_and(|e| e == "mlpackage")
}

/// Opens what `--prefill` names: packages and MLX models are folders, chains and dumps files.
fn producer<'a>(verb: &Run, host: &'a dyn Host, printer: &Printer) -> Result<Producer<'a>, Error> {
    let foreign = &verb.foreign;
    let layout = foreign.layout.as_deref().map(layout).transpose()?;
    let described = || foreign.model.as_deref().map(|folder| described(folder, host)).transpose();
    let chain = chain_file(&verb.prefill);
    if chain.is_none() && verb.prefill.is_file() {
        let need = |what: &str, flag: &str| {
            Error::new(ErrorKind::Layout, format!("`{}` does not state its {what}", verb.prefill.display()))
                .hint(format!("say it with {flag}"))
        };
        let layout = layout.ok_or_else(|| need("layout", "--layout NAME|FILE.toml"))?;
        let model = described()?.ok_or_else(|| need("model", "--model DIR"))?;
        return Ok(Producer::Dump(Box::new((layout, model))));
    }
    let flags = [
        ("--tokens-seen", foreign.tokens_seen),
        ("--live", foreign.live),
        ("--pad", foreign.pad),
        ("--ring-start", foreign.ring_start),
    ];
    if let Some((flag, _)) = flags.iter().find(|(_, value)| value.is_some()) {
        return Err(Error::new(ErrorKind::Usage, format!("{flag} is for dumps; a package's rows are known")));
    }
    if let Some(file) = chain {
        let stated = Stated { layout, model: described()? };
        return Ok(Producer::Engine(Box::new(ChainPrefill::open(
            &file,
            verb.runtime.executor.options(verb.threads),
            stated,
        )?)));
    }
    if !is_package(&verb.prefill) && verb.prefill.join("config.json").is_file() {
        if layout.is_some() || foreign.model.is_some() {
            let message = "--layout and --model are for packages and dumps; an MLX model's cache is known";
            return Err(Error::new(ErrorKind::Usage, message));
        }
        let request = DecoderRequest { folder: verb.prefill.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
        let model = self::described(&verb.prefill, host)?;
        return Ok(Producer::Model(host.prefiller(&request)?, Box::new(model)));
    }
    let stated = Stated { layout, model: described()? };
    let options = verb.runtime.options(verb.threads, stated, printer);
    Ok(Producer::Engine(open_prefill(&verb.prefill, options)?))
}

/// The chain file that a path names, itself or by its folder.
fn chain_file(path: &Path) -> Option<PathBuf> {
    let inside = path.join("chain.toml");
    if path.is_file() && path.extension().is_some_and(|e| e == "toml") {
        return Some(path.to_owned());
    }
    inside.is_file().then_some(inside)
}

/// The tokenizer of a run whose decoder has none: the one that was named, or the prefill side's.
fn tokenizer<'a>(verb: &Run, host: &'a dyn Host) -> Result<Option<Box<dyn Tokenizer + 'a>>, Error> {
    match &verb.tokenizer {
        Some(folder) => need_tokenizer(folder, host).map(Some),
        None if verb.prefill.is_dir() && !is_package(&verb.prefill) => host.tokenizer(&verb.prefill),
        None => Ok(None),
    }
}

/// The prefill side and a decode package must be of one model.
fn check_package(prefill: Option<&ModelSpec>, package: &ModelSpec, waived: Waived) -> Result<(), Error> {
    prefill.map_or(Ok(()), |prefill| check_compatible(prefill, package, waived))
}

fn dumped_rows(foreign: &Foreign, prompt_tokens: usize) -> LiveRows {
    LiveRows {
        live: foreign.live,
        pad: foreign.pad,
        ring_start: foreign.ring_start,
        ..LiveRows::seen(foreign.tokens_seen.unwrap_or(prompt_tokens))
    }
}

fn check_flags(verb: &Run) -> Result<(), Error> {
    if verb.max_tokens == 0 {
        return Err(Error::new(ErrorKind::Usage, "--max-tokens 0 asks for no answer"));
    }
    if !(verb.temp.is_finite() && verb.temp >= 0.0) {
        return Err(Error::new(ErrorKind::Usage, format!("--temp {} is not a temperature", verb.temp)));
    }
    Ok(())
}

/// The package and the decoder must be of one model, before anything heavy is loaded.
pub(super) fn check_models(
    package: Option<&ModelSpec>,
    decode: &Path,
    source_model: Option<&Path>,
    host: &dyn Host,
    waived: Waived,
) -> Result<(), Error> {
    let Some(package) = package else { return Ok(()) };
    let decoder = host.model_spec(decode)?;
    // Geometry first: its errors say more than a digest does.
    check_compatible(package, &decoder, Waived { weights: true })?;
    if waived.weights {
        return Ok(());
    }
    let digests = DigestCache::of_user();
    let digest = digests.weights_digest(source_model.unwrap_or(decode))?;
    check_compatible(package, &ModelSpec { weights_digest: Some(digest), ..decoder }, waived)
}

fn prompt_tokens(
    prompt: &Prompt,
    encode: &dyn Fn(&str) -> Result<Vec<u32>, Error>,
) -> Result<Vec<u32>, Error> {
    if let Some(path) = &prompt.prompt_tokens {
        return parse_ids(&read_text(path)?, &path.display().to_string());
    }
    let text = match (&prompt.prompt, &prompt.prompt_file) {
        (Some(text), _) => text.clone(),
        // An editor's last line break is not part of the prompt.
        (None, Some(path)) => {
            let text = read_text(path)?;
            text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t)).to_owned()
        }
        (None, None) => return Err(Error::new(ErrorKind::Usage, "no prompt was given")),
    };
    encode(&text)
}

/// The prompt's own length in an error that speaks of the tokens to be prefilled.
pub(super) fn whole_prompt(error: Error, prompt_tokens: usize) -> Error {
    if error.kind() != ErrorKind::PromptTooLong {
        return error;
    }
    let limit = |name: &str| error.fields().get(name).and_then(|v| v.as_u64());
    let hint =
        format!("shorten the prompt, or export with --context {}", (prompt_tokens - 1).next_power_of_two());
    let (name, most, what) = match (limit("longest_function"), limit("context")) {
        (Some(longest), _) => ("longest_function", longest, "longest function"),
        (None, context) => ("context", context.unwrap_or(0), "largest context"),
    };
    Error::new(
        ErrorKind::PromptTooLong,
        format!(
            "the prompt has {prompt_tokens} tokens; the package takes at most {} (its {what} of {most} and the token \
             that decoding starts with)",
            most + 1
        ),
    )
    .hint(hint)
    .field("prompt_tokens", prompt_tokens)
    .field(name, most)
}

fn decode_report(engine: String, generated: &Generated) -> DecodeReport {
    DecodeReport {
        engine,
        seconds: generated.seconds,
        tokens_per_second: generated.tokens.len() as f64 / generated.seconds.max(f64::MIN_POSITIVE),
        first_step_seconds: generated.first_step_seconds,
    }
}

fn summary(report: &Report) -> String {
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
        format!("{} of cache copied", bytes(h.first_step_copied_bytes.unwrap_or(0))),
    ));
    rows.push(row(
        "decode",
        report.decode.seconds,
        format!(
            "{} tokens, {:.1} tokens/s, {}",
            report.tokens.len(),
            report.decode.tokens_per_second,
            report.decode.engine
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
    if let Some(note) = &h.note {
        text.push_str(&format!("memcpy: {note}\n"));
    }
    for what in &report.allowed_different {
        text.push_str(&format!("allowed to differ: {what}\n"));
    }
    text
}
