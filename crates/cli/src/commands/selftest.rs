//! `kvbaton selftest`.

use std::path::Path;
use std::time::Duration;

use kvbaton::bench::Machine;
use kvbaton::selftest::{Failed, Found, Probe, Probes, Selftest, SelftestReport, Status, selftest};
use kvbaton::{CpuOptions, EngineOptions, Error, ErrorKind, Stated, open_prefill};
use serde_json::{Map, Value, json};

use super::layout;
use super::output::{check_writable, write_whole};
use crate::Host;
use crate::args;
use crate::host::{Decoder, DecoderRequest};
use crate::printer::{Printer, seconds, table};

/// Runs the verb; the answer is whether no probe failed.
pub(crate) fn run(verb: &args::Selftest, host: Option<&dyn Host>, printer: &Printer) -> Result<bool, Error> {
    check(verb)?;
    let bar = printer.progress();
    let machine = Machine::here();
    let mut progress = |done: &[Probe], group: &str, name: &str| {
        bar.set_message(format!("{group}: {name}"));
        // What never ran on this hardware may end the process: what was found until then is not lost with it.
        let so_far = SelftestReport::until(done, (group, name), &machine, verb.package.as_ref());
        let _ = write_whole(&verb.out, &so_far.to_markdown());
    };
    let mut probes = Probes::new(&mut progress);
    let what = Selftest {
        package: verb.package.clone(),
        stated: stated(verb)?,
        rounds: verb.rounds,
        contexts: verb.context.clone(),
        threads: verb.threads,
        timeout: verb.limits.engine_timeout.map(Duration::from_secs),
        prediction_timeout: verb.limits.prediction_timeout.map(Duration::from_secs),
    };
    selftest(&what, &mut probes)?;
    decoder_probes(verb, &what, host, &mut probes);
    let report = probes.report(verb.package.as_ref());
    bar.finish_and_clear();
    write_whole(&verb.out, &report.to_markdown())?;
    if printer.is_json() {
        printer.document(&report);
    } else {
        printer.data(&text(&report));
        printer.note(&format!("written to {}", verb.out.display()));
    }
    Ok(report.verdict != "fail")
}

/// What can be wrong is said before minutes of work.
fn check(verb: &args::Selftest) -> Result<(), Error> {
    let usage = |message: String| Err(Error::new(ErrorKind::Usage, message));
    if verb.rounds == 0 {
        return usage("--rounds 0 hands nothing over".to_owned());
    }
    if verb.context.contains(&0) {
        return usage("--context 0 has no rows".to_owned());
    }
    if verb.layout.is_some() && verb.package.is_none() {
        return usage("--layout is for a package of yours, and none is named".to_owned());
    }
    if let Some(package) = verb.package.as_ref().filter(|p| !p.exists()) {
        return usage(format!("cannot read `{}`: there is no such package", package.display()));
    }
    if let Some(model) = verb.decode.as_ref().filter(|p| !p.is_dir()) {
        return usage(format!("`{}` is no model folder", model.display()));
    }
    check_writable(&verb.out)
}

fn stated(verb: &args::Selftest) -> Result<Stated, Error> {
    Ok(Stated { layout: verb.layout.as_deref().map(layout).transpose()?, model: None })
}

/// What only a decoder can answer: whether MLX adopts memory, whether Core ML writes into MLX's, and whether tokens stay
/// the same.
fn decoder_probes(verb: &args::Selftest, what: &Selftest, host: Option<&dyn Host>, probes: &mut Probes<'_>) {
    let (adopts, agrees) = ("adoption of foreign memory", "tokens with and without the hand-off");
    let inverse = "Core ML writing into MLX's memory";
    let Some(host) = host else {
        for name in [adopts, inverse, agrees] {
            probes.not_run("mlx", name, "needs the Python package: pip install 'kvbaton[mlx]'");
        }
        return;
    };
    match host.probe_adoption() {
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            probes.not_run("mlx", adopts, error.to_string())
        }
        answer => probes.run("mlx", adopts, || Ok(answer?)),
    }
    match host.probe_inverse() {
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            probes.not_run("mlx", inverse, error.to_string())
        }
        // Everything but Apple's calls: it says nothing of Core ML.
        Ok(found) if found.get("engine").is_some_and(|engine| engine == "fake") => {
            probes.run("fake", "writing into MLX's memory", || written(found));
            probes.not_run("mlx", inverse, format!("needs macOS, this is {}", std::env::consts::OS));
        }
        answer => probes.run("mlx", inverse, || written(answer?)),
    }
    match (&verb.package, &verb.decode) {
        (Some(package), Some(model)) => {
            probes.run("mlx", agrees, || tokens_agree(package, model, what, host));
        }
        _ => probes.not_run(
            "mlx",
            agrees,
            "needs a package and its model: kvbaton selftest PACKAGE --decode MODEL",
        ),
    }
}

/// A runtime may write elsewhere; that is found out. What it says it has written must be there.
fn written(found: Map<String, Value>) -> Found {
    let is = |name: &str| found.get(name).is_some_and(|v| *v == json!(true));
    if is("used") && !is("seen") {
        let because = "the backing is reported as used, and MLX sees other values in it".to_owned();
        return Err(Failed { because, found });
    }
    Ok(found)
}

/// Decodes after the hand-off of a prefill by this system's engine, and after the decoder's own prefill.
fn tokens_agree(package: &Path, model: &Path, what: &Selftest, host: &dyn Host) -> Found {
    const TOKENS: usize = 16;
    let options = EngineOptions {
        cpu: CpuOptions::with_threads(what.threads),
        stated: what.stated.clone(),
        timeout: what.timeout.filter(|_| cfg!(target_os = "macos")),
        prediction_timeout: what.prediction_timeout.filter(|_| cfg!(target_os = "macos")),
        ..EngineOptions::default()
    };
    let mut engine = open_prefill(package, options)?;
    let mut decoder = host.decoder(&DecoderRequest { folder: model.to_owned(), dtype: None })?;
    let text = "The Neural Engine prefills, the GPU decodes, and between them the cache";
    let prompt = decoder.encode(text, true)?;
    let Some((_, rows)) = prompt.split_last().filter(|(_, rows)| !rows.is_empty()) else {
        return Err(Failed {
            because: "the tokenizer makes less than two tokens of the prompt".to_owned(),
            found: Map::new(),
        });
    };
    let generate = |decoder: &mut dyn Decoder, rest: &[u32]| {
        decoder.generate(rest, TOKENS, 0.0, &mut |_| !host.interrupted())
    };
    let prefilled = engine.prefill(rows)?;
    let notes = prefilled.report.notes.clone();
    let handoff = decoder.receive(Some(prefilled.cache), &prompt)?;
    let after = generate(&mut *decoder, &prompt[rows.len()..])?;
    decoder.receive(None, &prompt)?;
    let own = generate(&mut *decoder, &prompt)?;
    let same = after.tokens.iter().zip(&own.tokens).take_while(|(a, b)| a == b).count();
    let found = json!({
        "engine": engine.engine(), "decoder": decoder.engine(), "path": handoff.path, "notes": notes,
        "same_tokens": same, "of": own.tokens.len(),
        "first_step_copied_bytes": after.first_step_copied_bytes,
    });
    let found = if let Value::Object(found) = found { found } else { Map::new() };
    if same < own.tokens.len() {
        let because =
            format!("token {same} differs: {:?} and {:?}", after.tokens.get(same), own.tokens.get(same));
        return Err(Failed { because, found });
    }
    Ok(found)
}

fn text(report: &SelftestReport) -> String {
    let mut rows = Vec::new();
    for probe in &report.probes {
        let status = match probe.status {
            Status::Pass => "pass",
            Status::Fail => "FAIL",
            Status::NotRun => "not run",
        };
        let because = probe.because.clone().unwrap_or_default();
        rows.push(vec![
            format!("{}: {}", probe.group, probe.name),
            seconds(probe.seconds),
            format!("{status} {because}"),
        ]);
    }
    let count = |status: Status| report.probes.iter().filter(|p| p.status == status).count();
    format!(
        "{}\n{}: {} passed, {} failed, {} not run\n",
        table(&rows),
        report.verdict,
        count(Status::Pass),
        count(Status::Fail),
        count(Status::NotRun)
    )
}
