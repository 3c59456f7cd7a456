//! Runs of the whole path, timed part by part.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvbaton::plan::route::Engine;
use kvbaton::{
    CpuOptions, EngineOptions, Error, ErrorKind, HandoffReport, PrefillReport, SharedPrefill, Waived,
    check_compatible, open_decode, open_prefill,
};

use crate::Host;
use crate::host::{Decoder, DecoderRequest, Generated, Prefiller};
use crate::package_decoder::PackageDecoder;

/// One run of a route.
pub(crate) struct Measured {
    pub(crate) prefill: PrefillReport,
    /// Absent where nothing was handed over.
    pub(crate) handoff: Option<HandoffReport>,
    pub(crate) generated: Generated,
    /// From the start of prefill, as a clock beside it all shows.
    pub(crate) time_to_first_token_seconds: f64,
}

/// How a run is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mode {
    /// Rows move while the prefill runs.
    pub(crate) streamed: bool,
    /// The decoder's memory was used before.
    pub(crate) warm: bool,
}

/// The engines of a run.
pub(crate) struct Bench<'a> {
    pub(crate) host: &'a dyn Host,
    pub(crate) engine: Option<SharedPrefill>,
    pub(crate) decoder: Box<dyn Decoder + 'a>,
    /// A package that decodes, where there is one, and MLX as the one that prefills for it.
    pub(crate) package: Option<Box<dyn Decoder + 'a>>,
    pub(crate) prefiller: Option<Box<dyn Prefiller + 'a>>,
    pub(crate) max_tokens: usize,
}

impl Bench<'_> {
    /// Opens a package that decodes with this system's engine, and MLX as what prefills for it.
    pub(crate) fn with_package(
        mut self,
        path: Option<&Path>,
        request: &DecoderRequest,
        threads: usize,
    ) -> Result<Self, Error> {
        let Some(path) = path else { return Ok(self) };
        let cpu = CpuOptions::with_threads(threads);
        let engine = open_decode(path, EngineOptions { cpu, ..EngineOptions::default() })?;
        let model = self.host.model_spec(&request.folder)?;
        check_compatible(engine.model(), &model, Waived { weights: true })?;
        self.package = Some(Box::new(PackageDecoder::new(engine, None, threads)));
        self.prefiller = Some(self.host.prefiller(request)?);
        Ok(self)
    }

    /// Opens a package with this system's engine, for several runs: Core ML on a Mac, the executor elsewhere.
    pub(crate) fn open(path: &Path, threads: usize, longest: usize) -> Result<SharedPrefill, Error> {
        let mut engine = open_prefill(
            path,
            EngineOptions { cpu: CpuOptions::with_threads(threads), ..EngineOptions::default() },
        )?;
        engine.prepare(longest)?;
        Ok(Arc::new(Mutex::new(engine)))
    }

    /// A Core ML package prefills, MLX decodes.
    pub(crate) fn split(&mut self, tokens: &[u32], mode: Mode) -> Result<Measured, Error> {
        let engine = self.engine.clone().expect("only benches with a package split");
        self.decoder.forget(!mode.warm)?;
        let rows = &tokens[..tokens.len() - 1];
        engine.lock().unwrap_or_else(|e| e.into_inner()).prepare(rows.len())?;
        let start = Instant::now();
        let (prefill, handoff) = if mode.streamed {
            self.decoder.receive_streamed(&engine, tokens)?
        } else {
            let done = engine.lock().unwrap_or_else(|e| e.into_inner()).prefill(rows)?;
            (done.report, self.decoder.receive(Some(done.cache), tokens)?)
        };
        let before = start.elapsed().as_secs_f64() - handoff.yardstick_seconds;
        let generated = self.generate(tokens)?;
        let time_to_first_token_seconds = before + generated.first_step_seconds;
        Ok(Measured { prefill, handoff: Some(handoff), generated, time_to_first_token_seconds })
    }

    /// MLX does both.
    pub(crate) fn alone(&mut self, tokens: &[u32]) -> Result<Measured, Error> {
        self.decoder.forget(false)?;
        let start = Instant::now();
        let prefill = self.decoder.prefill(tokens)?;
        let before = start.elapsed().as_secs_f64();
        let generated = self.generate(tokens)?;
        let time_to_first_token_seconds = before + generated.first_step_seconds;
        Ok(Measured { prefill, handoff: None, generated, time_to_first_token_seconds })
    }

    /// A package decodes what a package or MLX prefilled.
    pub(crate) fn packaged(&mut self, tokens: &[u32], prefill: Engine) -> Result<Measured, Error> {
        let (host, rows) = (self.host, &tokens[..tokens.len() - 1]);
        let package = self.package.as_mut().expect("only benches with a decode package hand over to one");
        package.forget(false)?;
        if let (Engine::CoreMl, Some(engine)) = (prefill, &self.engine) {
            engine.lock().unwrap_or_else(|e| e.into_inner()).prepare(rows.len())?;
        }
        let start = Instant::now();
        let (view, prefill) = match (prefill, &self.engine, &mut self.prefiller) {
            (Engine::CoreMl, Some(engine), _) => {
                let done = engine.lock().unwrap_or_else(|e| e.into_inner()).prefill(rows)?;
                (done.cache, done.report)
            }
            (Engine::Mlx, _, Some(model)) => {
                let view = model.prefill(rows)?;
                let seconds = start.elapsed().as_secs_f64();
                (view, PrefillReport::new(&model.engine(), "mlx-lm".to_owned(), rows.len(), seconds))
            }
            _ => return Err(Error::new(ErrorKind::Usage, "nothing prefills for the decode package")),
        };
        let handoff = package.receive(Some(view), tokens)?;
        let before = start.elapsed().as_secs_f64() - handoff.yardstick_seconds;
        let last = &tokens[tokens.len() - 1..];
        let generated = package.generate(last, self.max_tokens, 0.0, &mut |_| !host.interrupted())?;
        let time_to_first_token_seconds = before + generated.first_step_seconds;
        Ok(Measured { prefill, handoff: Some(handoff), generated, time_to_first_token_seconds })
    }

    fn generate(&mut self, tokens: &[u32]) -> Result<Generated, Error> {
        let host = self.host;
        let last = &tokens[tokens.len() - 1..];
        self.decoder.generate(last, self.max_tokens, 0.0, &mut |_| !host.interrupted())
    }
}

/// A fixed, mixed run of ids: time does not depend on them, but equal ids would make softmax trivial.
pub(crate) fn prompt(tokens: usize, vocab: usize) -> Vec<u32> {
    (0..tokens).map(|i| u32::try_from((i * 7919 + 13) % vocab.max(1)).unwrap_or(0)).collect()
}
