//! Who decodes in a run, and whether it is of the producer's model.

use std::path::Path;

use kvbaton::layout::ModelSpec;
use kvbaton::{DigestCache, Error, ErrorKind, Stated, Waived, check_compatible, open_decode};

use super::super::need_tokenizer;
use super::producer::is_package;
use crate::Host;
use crate::args::Run;
use crate::host::{Decoder, DecoderRequest, Tokenizer};
use crate::package_decoder::PackageDecoder;
use crate::printer::Printer;

/// Loads what `--decode` names: a package, or an MLX model. `model` is what the producer says of its own.
pub(super) fn decoder<'a>(
    verb: &Run,
    model: Option<&ModelSpec>,
    host: &'a dyn Host,
    waived: Waived,
    printer: &Printer,
) -> Result<Box<dyn Decoder + 'a>, Error> {
    if is_package(&verb.decode) {
        if verb.dtype.is_some() {
            let message = "--dtype is for MLX models: a package's types are its own";
            return Err(Error::new(ErrorKind::Usage, message));
        }
        return package_decoder(verb, &verb.decode, tokenizer(verb, host)?, model, waived, printer);
    }
    check_models(model, &verb.decode, verb.source_model.as_deref(), host, waived)?;
    host.decoder(&DecoderRequest { folder: verb.decode.clone(), dtype: verb.dtype.map(|d| d.dtype()) })
}

/// Opens a package that decodes, with the engine that the flags name or this system's own.
pub(super) fn package_decoder<'a>(
    verb: &Run,
    package: &Path,
    tokenizer: Option<Box<dyn Tokenizer + 'a>>,
    model: Option<&ModelSpec>,
    waived: Waived,
    printer: &Printer,
) -> Result<Box<dyn Decoder + 'a>, Error> {
    let options = verb.runtime.options(verb.threads, Stated::default(), printer);
    let engine = open_decode(package, options)?;
    // The prefill side and a decode package must be of one model.
    if let Some(model) = model {
        check_compatible(model, engine.model(), waived)?;
    }
    Ok(Box::new(PackageDecoder::new(engine, tokenizer, verb.threads)))
}

/// The tokenizer of a run whose decoder has none: the one that was named, or the prefill side's.
fn tokenizer<'a>(verb: &Run, host: &'a dyn Host) -> Result<Option<Box<dyn Tokenizer + 'a>>, Error> {
    match &verb.tokenizer {
        Some(folder) => need_tokenizer(folder, host).map(Some),
        None if verb.prefill.is_dir() && !is_package(&verb.prefill) => host.tokenizer(&verb.prefill),
        None => Ok(None),
    }
}

/// The package and the decoder must be of one model, before anything heavy is loaded.
pub(in crate::commands) fn check_models(
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
