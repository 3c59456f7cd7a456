//! What prefills: the package that is verified, and what it is compared with.

use std::path::Path;

use kvbaton::layout::ModelSpec;
use kvbaton::{
    CacheView, DigestCache, Engine, EngineOptions, Error, Prefill, Stated, Waived, files_digest, open_prefill,
};
use serde_json::{Map, Value, json};

use crate::Host;
use crate::args::{Different, Verify};
use crate::commands::run::{check_models, is_package, whole_prompt};
use crate::commands::{described, layout};
use crate::host::{DecoderRequest, Prefiller};
use crate::printer::Printer;

/// The package, and what it is compared with where that is not the decoder.
pub(super) struct Producers<'a> {
    pub(super) package: Box<dyn Prefill>,
    reference: Option<Reference<'a>>,
}

/// What prefills in the decoder's place.
enum Reference<'a> {
    Package(Box<dyn Prefill>),
    /// An MLX model and the digest of its weights.
    Model(Box<dyn Prefiller + 'a>, Option<String>),
}

impl<'a> Producers<'a> {
    pub(super) fn open(verb: &Verify, host: &'a dyn Host, printer: &Printer) -> Result<Producers<'a>, Error> {
        let layout = verb.layout.as_deref().map(layout).transpose()?;
        let model = verb.model.as_deref().map(|folder| described(folder, host)).transpose()?;
        let waived = Waived { weights: verb.allow_different.contains(&Different::Weights) };
        let check = |model: Option<&ModelSpec>| {
            check_models(model, &verb.decode, verb.source_model.as_deref(), host, waived)
        };
        let open = |path: &Path, options: EngineOptions| {
            let package = open_prefill(path, options)?;
            check(package.model())?;
            Ok::<_, Error>(package)
        };
        let stated = || Stated { layout: layout.clone(), model: model.clone() };
        let reference = match verb.reference.as_deref() {
            None => None,
            Some(path) if !is_package(path) && path.join("config.json").is_file() => {
                let model = described(path, host)?;
                check(Some(&model))?;
                let request =
                    DecoderRequest { folder: path.to_owned(), dtype: verb.dtype.map(|d| d.dtype()) };
                Some(Reference::Model(host.prefiller(&request)?, model.weights_digest))
            }
            Some(path) => {
                // It runs on the executor, whichever engine is being verified.
                let cpu = verb.runtime.executor.options(verb.threads);
                let engine = Some(Engine::Cpu);
                let options = EngineOptions { engine, cpu, stated: stated(), ..EngineOptions::default() };
                Some(Reference::Package(open(path, options)?))
            }
        };
        let options = verb.runtime.options(verb.threads, stated(), printer);
        Ok(Producers { package: open(&verb.prefill, options)?, reference })
    }

    /// Loads what a prompt needs, in all packages.
    pub(super) fn prepare(&mut self, prompt_tokens: usize) -> Result<(), Error> {
        let reference = match &mut self.reference {
            Some(Reference::Package(package)) => Some(package),
            _ => None,
        };
        let packages = std::iter::once(&mut self.package).chain(reference);
        for package in packages.filter(|_| prompt_tokens > 1) {
            package.prepare(prompt_tokens - 1).map_err(|e| whole_prompt(e, prompt_tokens))?;
        }
        Ok(())
    }

    /// The cache to compare with; `None` where the decoder prefills it itself.
    pub(super) fn reference(&mut self, tokens: &[u32]) -> Result<Option<CacheView>, Error> {
        match &mut self.reference {
            None => Ok(None),
            Some(Reference::Package(package)) => package.prefill(tokens).map(|left| Some(left.cache)),
            Some(Reference::Model(model, _)) => model.prefill(tokens).map(Some),
        }
    }

    /// Of what the reference is, in words.
    pub(super) fn compared_with(&self, verb: &Verify) -> Result<String, Error> {
        Ok(match &verb.reference {
            Some(path) => path.display().to_string(),
            None if self.own_prefill_is_another_models(verb)? => {
                "the decoder's own prefill, of other weights than the package's".to_owned()
            }
            None => "the decoder's own prefill".to_owned(),
        })
    }

    /// Whether the decoder prefills the reference, with weights that were made from the package's: quantised, say.
    pub(super) fn own_prefill_is_another_models(&self, verb: &Verify) -> Result<bool, Error> {
        let Some(source) = verb.source_model.as_deref().filter(|_| self.reference.is_none()) else {
            return Ok(false);
        };
        let digests = DigestCache::of_user();
        Ok(digests.weights_digest(source)? != digests.weights_digest(&verb.decode)?)
    }

    /// Which files and weights exactly.
    pub(super) fn fingerprints(&self, verb: &Verify) -> Result<Map<String, Value>, Error> {
        let digest = |package: &dyn Prefill| package.model().and_then(|m| m.weights_digest.clone());
        let mut found = Map::new();
        let mut add = |name: &str, digest: Option<String>| found.insert(name.to_owned(), json!(digest));
        add("package", Some(package_digest(&verb.prefill)?));
        add("package_weights", digest(&*self.package));
        add("decoder_weights", Some(DigestCache::of_user().weights_digest(&verb.decode)?));
        match (&self.reference, &verb.reference) {
            (Some(Reference::Package(package)), Some(path)) => {
                add("reference_package", Some(package_digest(path)?));
                add("reference_weights", digest(&**package));
            }
            (Some(Reference::Model(_, digest)), _) => {
                add("reference_weights", digest.clone());
            }
            _ => {}
        }
        Ok(found)
    }
}

/// Which files exactly: those of a package, or of the folder that a chain is in.
fn package_digest(path: &Path) -> Result<String, Error> {
    let folder =
        if path.is_file() { path.parent().filter(|p| !p.as_os_str().is_empty()) } else { Some(path) };
    files_digest(folder.unwrap_or(Path::new(".")))
}
