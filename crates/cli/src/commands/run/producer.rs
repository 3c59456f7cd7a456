//! Where the cache of a run comes from.

use std::path::Path;

use kvbaton::layout::{Layout, LiveRows, ModelSpec};
use kvbaton::{Error, ErrorKind, Prefill, Stated, chain_file, open_prefill};

use super::super::{described, layout};
use crate::Host;
use crate::args::{Foreign, Run, Runtime};
use crate::host::{DecoderRequest, Prefiller};
use crate::printer::Printer;

/// Where the cache comes from.
pub(super) enum Producer<'a> {
    Engine(Box<dyn Prefill>),
    Model(Box<dyn Prefiller + 'a>, Box<ModelSpec>),
    Dump(Box<(Layout, ModelSpec)>),
}

impl Producer<'_> {
    /// What is known of its model.
    pub(super) fn model(&self) -> Option<&ModelSpec> {
        match self {
            Producer::Engine(engine) => engine.model(),
            Producer::Model(_, model) => Some(model),
            Producer::Dump(stated) => Some(&stated.1),
        }
    }
}

/// Whether a folder is a Core ML package.
pub(in crate::commands) fn is_package(path: &Path) -> bool {
    path.join("Manifest.json").is_file() || path.extension().is_some_and(|e| e == "mlpackage")
}

/// Opens what `--prefill` names: packages and MLX models are folders, chains and dumps files.
pub(super) fn producer<'a>(verb: &Run, host: &'a dyn Host, printer: &Printer) -> Result<Producer<'a>, Error> {
    let foreign = &verb.foreign;
    let layout = foreign.layout.as_deref().map(layout).transpose()?;
    let described = || foreign.model.as_deref().map(|folder| described(folder, host)).transpose();
    let chain = chain_file(&verb.prefill);
    if chain.is_none() && verb.prefill.is_file() {
        let need = |what: &str, flag: &str| {
            Error::new(ErrorKind::Layout, format!("`{}` does not state its {what}", verb.prefill.display()))
                .hint(format!("say it with {flag}"))
        };
        packages_only(verb)?;
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
    if chain.is_none() && !is_package(&verb.prefill) && verb.prefill.join("config.json").is_file() {
        if layout.is_some() || foreign.model.is_some() {
            let message = "--layout and --model are for packages and dumps; an MLX model's cache is known";
            return Err(Error::new(ErrorKind::Usage, message));
        }
        packages_only(verb)?;
        let request = DecoderRequest { folder: verb.prefill.clone(), dtype: verb.dtype.map(|d| d.dtype()) };
        let model = self::described(&verb.prefill, host)?;
        return Ok(Producer::Model(host.prefiller(&request)?, Box::new(model)));
    }
    let stated = Stated { layout, model: described()? };
    let options = verb.runtime.options(verb.threads, stated, printer);
    Ok(Producer::Engine(open_prefill(&verb.prefill, options)?))
}

/// Refuses flags of the engines that run packages where neither side is one.
fn packages_only(verb: &Run) -> Result<(), Error> {
    let Runtime { engine, compute_units, limits, executor } = &verb.runtime;
    let given = [
        ("--engine", engine.is_some()),
        ("--compute-units", compute_units.is_some()),
        ("--engine-timeout", limits.engine_timeout.is_some()),
        ("--prediction-timeout", limits.prediction_timeout.is_some()),
        ("--max-memory", executor.max_memory.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((flag, _)) if !is_package(&verb.decode) => {
            let (prefill, decode) = (verb.prefill.display(), verb.decode.display());
            let message = format!("{flag} is for packages: neither `{prefill}` nor `{decode}` is one");
            Err(Error::new(ErrorKind::Usage, message).hint(format!("leave {flag} out")))
        }
        _ => Ok(()),
    }
}

/// The rows of a dump, as the flags say.
pub(super) fn dumped_rows(foreign: &Foreign, prompt_tokens: usize) -> LiveRows {
    LiveRows {
        live: foreign.live,
        pad: foreign.pad,
        ring_start: foreign.ring_start,
        ..LiveRows::seen(foreign.tokens_seen.unwrap_or(prompt_tokens))
    }
}
