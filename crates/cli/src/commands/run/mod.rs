//! `kvbaton run`: the main job.

mod decoder;
mod handover;
mod producer;
mod prompt;
mod report;

use std::time::Instant;

use kvbaton::plan::route::{Engine, Route};
use kvbaton::{Error, ErrorKind, HandoffReport, PrefillReport, Waived, check_vocabulary, open_dump};

use super::decision::{Cost, taken};
use super::{described, need_host, need_tokenizer};
use crate::Host;
use crate::args::{Aim, Circumstances, Different, RouteChoice, Run};
use crate::host::DecoderRequest;
use crate::printer::Printer;
use decoder::{decoder, package_decoder};
use handover::hand_over;
use producer::{Producer, dumped_rows, producer};
use prompt::prompt_tokens;
use report::{DecodeReport, Report, summary};

pub(super) use decoder::check_models;
pub(super) use producer::is_package;
pub(super) use prompt::whole_prompt;

pub(crate) fn run(verb: &Run, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    let host = need_host(host, "run")?;
    check_flags(verb)?;
    let mut producer = producer(verb, host, printer)?;
    let waived = Waived { weights: verb.allow_different.contains(&Different::Weights) };
    let mut decoder = decoder(verb, producer.model(), host, waived, printer)?;
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
    if let Some(model) = producer.model() {
        check_vocabulary(&tokens, model.vocab_size)?;
    }
    let taken = taken(verb, matches!(producer, Producer::Engine(_)), host, tokens.len())?;
    let alone = taken.route == Some(Route::Mlx);
    if let Some(package) = verb.decode_package.as_deref()
        && taken.route.is_some_and(|r| r.decode() == Engine::CoreMl)
    {
        let tokenizer = host.tokenizer(&verb.decode)?;
        decoder = package_decoder(verb, package, tokenizer, producer.model(), waived, printer)?;
    }
    if taken.route == Some(Route::MlxCoreMl) {
        let request = DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
        let model = described(&verb.decode, host)?;
        producer = Producer::Model(host.prefiller(&request)?, Box::new(model));
    }
    if let (Producer::Engine(engine), false, false) = (&mut producer, prompt.is_empty(), alone) {
        engine.prepare(prompt.len()).map_err(|e| whole_prompt(e, tokens.len()))?;
    }

    let adoption = decoder.adoption()?;

    let start = Instant::now();
    let (prefill, mut handoff) = match producer {
        Producer::Engine(_) | Producer::Model(..) if prompt.is_empty() => {
            (None, decoder.receive(None, &tokens)?)
        }
        Producer::Engine(_) if alone => (Some(decoder.prefill(&tokens)?), HandoffReport::of_nothing(0.0)),
        Producer::Engine(engine) => {
            let (prefill, handoff) = hand_over(engine, &mut *decoder, &tokens, adoption, !verb.no_stream)?;
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
    handoff.first_step_copied_bytes = generated.first_step_copied_bytes;

    let mut report = Report {
        route: taken.decision,
        decode: DecodeReport::new(&*decoder, &generated),
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

fn check_flags(verb: &Run) -> Result<(), Error> {
    if verb.max_tokens == 0 {
        return Err(Error::new(ErrorKind::Usage, "--max-tokens 0 asks for no answer"));
    }
    if !(verb.temp.is_finite() && verb.temp >= 0.0) {
        return Err(Error::new(ErrorKind::Usage, format!("--temp {} is not a temperature", verb.temp)));
    }
    if verb.route.is_some() && is_package(&verb.decode) {
        let message = format!(
            "--route chooses between engines: --decode must be an MLX model folder, `{}` is a package",
            verb.decode.display()
        );
        return Err(Error::new(ErrorKind::Usage, message).hint("name the package with --decode-package"));
    }
    let Circumstances { objective, gpu_busy, machine } = &verb.circumstances;
    let stated = [
        ("--objective", *objective != Aim::Ttft),
        ("--gpu-busy", *gpu_busy != 0.0),
        ("--machine", machine.is_some()),
    ];
    if let (Some((flag, _)), false) =
        (stated.iter().find(|(_, stated)| *stated), verb.route == Some(RouteChoice::Auto))
    {
        let message = format!("{flag} is for --route auto: nothing else is chosen by it");
        return Err(Error::new(ErrorKind::Usage, message));
    }
    Ok(())
}
