//! Runs of the whole path, timed part by part.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kvbaton::{CpuPrefill, Error, HandoffReport, Prefill, PrefillReport, SharedPrefill};

use crate::Host;
use crate::host::{Decoder, Generated};

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
    pub(crate) max_tokens: usize,
}

impl Bench<'_> {
    /// Opens a package as an engine that several runs share.
    pub(crate) fn open(path: &Path, threads: usize, longest: usize) -> Result<SharedPrefill, Error> {
        let mut engine = CpuPrefill::open(path, threads)?;
        engine.prepare(longest)?;
        Ok(Arc::new(Mutex::new(Box::new(engine))))
    }

    /// A Core ML package prefills, MLX decodes.
    pub(crate) fn split(&mut self, tokens: &[u32], mode: Mode) -> Result<Measured, Error> {
        let engine = self.engine.clone().expect("only benches with a package split");
        self.decoder.forget(!mode.warm);
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
        self.decoder.forget(false);
        let start = Instant::now();
        let prefill = self.decoder.prefill(tokens)?;
        let before = start.elapsed().as_secs_f64();
        let generated = self.generate(tokens)?;
        let time_to_first_token_seconds = before + generated.first_step_seconds;
        Ok(Measured { prefill, handoff: None, generated, time_to_first_token_seconds })
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
