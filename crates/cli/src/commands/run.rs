//! `kvbaton run`: the main job.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvbaton::layout::{Layout, LiveRows, ModelSpec};
use kvbaton::{
    CpuPrefill, DigestCache, Error, ErrorKind, HandoffReport, Prefill, PrefillReport, SharedPrefill, Stated,
    Waived, check_compatible, open_dump,
};
use serde::Serialize;

use super::{described, layout, need_host, parse_ids, read_text};
use crate::Host;
use crate::args::{Different, Foreign, Prompt, Run};
use crate::host::{Decoder, DecoderRequest, Generated};
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
enum Producer {
    Package(Box<CpuPrefill>),
    Dump(Box<(Layout, ModelSpec)>),
}

impl Producer {
    fn model(&self) -> Option<&ModelSpec> {
        match self {
            Producer::Package(engine) => engine.model(),
            Producer::Dump(stated) => Some(&stated.1),
        }
    }
}

pub(crate) fn run(verb: &Run, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let host = need_host(host, "run")?;
    check_flags(verb)?;
    let mut producer = producer(verb, host)?;
    let waived = Waived { weights: verb.allow_different.contains(&Different::Weights) };
    check_models(producer.model(), &verb.decode, verb.source_model.as_deref(), host, waived)?;
    let request = DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
    let mut decoder = host.decoder(&request)?;
    let tokens = prompt_tokens(&verb.prompt, &*decoder, verb.ignore_chat_template)?;
    let Some((_, prompt)) = tokens.split_last() else {
        return Err(Error::new(ErrorKind::EmptyPrompt, "the prompt has no tokens")
            .hint("give at least one token; without a beginning-of-text token an empty text has none"));
    };
    if let (Producer::Package(engine), false) = (&mut producer, prompt.is_empty()) {
        engine.prepare(prompt.len()).map_err(|e| whole_prompt(e, tokens.len()))?;
    }

    let start = Instant::now();
    let (prefill, mut handoff) = match producer {
        Producer::Package(_) if prompt.is_empty() => (None, decoder.receive(None, &tokens)?),
        Producer::Package(mut engine) if verb.no_stream => {
            let prefilled = engine.prefill(prompt)?;
            (Some(prefilled.report), decoder.receive(Some(prefilled.cache), &tokens)?)
        }
        Producer::Package(engine) => {
            let shared: SharedPrefill = Arc::new(Mutex::new(engine));
            let (prefill, handoff) = decoder.receive_streamed(&shared, &tokens)?;
            (Some(prefill), handoff)
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

    let report = Report {
        decode: decode_report(decoder.engine(), &generated),
        prompt_tokens: tokens.len(),
        handed_off_tokens: prompt.len(),
        remaining_tokens: remaining,
        prefill,
        time_to_first_token_seconds: before_decode - handoff.yardstick_seconds + generated.first_step_seconds,
        handoff,
        text: generated.text,
        tokens: generated.tokens,
        allowed_different: if waived.weights { vec!["weights"] } else { Vec::new() },
    };
    if printer.is_json() {
        printer.document(&report);
    } else {
        printer.raw_error(&summary(&report));
    }
    Ok(())
}

/// Opens what `--prefill` names: a package is a folder, a dump a file.
fn producer(verb: &Run, host: &dyn Host) -> Result<Producer, Error> {
    let foreign = &verb.foreign;
    let layout = foreign.layout.as_deref().map(layout).transpose()?;
    let model = foreign.model.as_deref().map(|folder| described(folder, host)).transpose()?;
    if verb.prefill.is_file() {
        let need = |what: &str, flag: &str| {
            Error::new(ErrorKind::Layout, format!("`{}` does not state its {what}", verb.prefill.display()))
                .hint(format!("say it with {flag}"))
        };
        let layout = layout.ok_or_else(|| need("layout", "--layout NAME|FILE.toml"))?;
        let model = model.ok_or_else(|| need("model", "--model DIR"))?;
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
    let stated = Stated { layout, model };
    let engine = CpuPrefill::open_stated(&verb.prefill, verb.threads, stated)?;
    Ok(Producer::Package(Box::new(engine.with_options(verb.engine.options(verb.threads)))))
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

fn prompt_tokens(prompt: &Prompt, decoder: &dyn Decoder, ignore_template: bool) -> Result<Vec<u32>, Error> {
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
    decoder.encode(&text, ignore_template)
}

/// The prompt's own length in an error that speaks of the tokens to be prefilled.
pub(super) fn whole_prompt(error: Error, prompt_tokens: usize) -> Error {
    if error.kind() != ErrorKind::PromptTooLong {
        return error;
    }
    let longest = error.fields().get("longest_function").and_then(|v| v.as_u64()).unwrap_or(0);
    Error::new(
        ErrorKind::PromptTooLong,
        format!(
            "the prompt has {prompt_tokens} tokens; the package takes at most {} (its longest function of {longest} \
             and the token that decoding starts with)",
            longest + 1
        ),
    )
    .hint(format!("shorten the prompt, or export with --buckets {}", (prompt_tokens - 1).next_power_of_two()))
    .field("prompt_tokens", prompt_tokens)
    .field("longest_function", longest)
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
                "{} tokens, {:.0} tokens/s, {} on {}",
                p.tokens, p.tokens_per_second, p.function, p.engine
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
    let mut text = table(&rows);
    if let Some(note) = &h.note {
        text.push_str(&format!("memcpy: {note}\n"));
    }
    for what in &report.allowed_different {
        text.push_str(&format!("allowed to differ: {what}\n"));
    }
    text
}
