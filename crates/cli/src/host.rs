//! What only Python can do.

use std::path::PathBuf;

use kvbaton::bench::PrefillRow;
use kvbaton::layout::{DType, ModelSpec};
use kvbaton::verify::{Rung, Thresholds};
use kvbaton::{CacheView, Error, HandoffReport, PrefillReport, SharedPrefill};
use serde::Deserialize;

/// The Python side of the command line.
pub trait Host {
    /// Reads what a model folder says of itself, without its weights.
    ///
    /// # Errors
    ///
    /// When the folder or its config.json cannot be read, or the architecture is not known.
    fn model_spec(&self, folder: &std::path::Path) -> Result<ModelSpec, Error>;

    /// Loads a model and its tokenizer.
    ///
    /// # Errors
    ///
    /// When it cannot be loaded.
    fn decoder(&self, request: &DecoderRequest) -> Result<Box<dyn Decoder + '_>, Error>;

    /// Loads a model that prefills.
    ///
    /// # Errors
    ///
    /// When it cannot be loaded.
    fn prefiller(&self, request: &DecoderRequest) -> Result<Box<dyn Prefiller + '_>, Error>;

    /// Loads a folder's tokenizer; `None` where it has none.
    ///
    /// # Errors
    ///
    /// When there is one and it cannot be loaded.
    fn tokenizer(&self, folder: &std::path::Path) -> Result<Option<Box<dyn Tokenizer + '_>>, Error>;

    /// Writes a package.
    ///
    /// # Errors
    ///
    /// When the model cannot be exported; nothing is left behind then.
    fn export(&self, request: &ExportRequest, progress: Progress) -> Result<Exported, Error>;

    /// Times MLX's own prefill of a model.
    ///
    /// # Errors
    ///
    /// When the model cannot be loaded.
    fn compare_prefill(&self, request: &PrefillComparison) -> Result<Vec<PrefillRow>, Error>;

    /// A report as one self-contained HTML page.
    ///
    /// # Errors
    ///
    /// When the document lacks something that the page shows.
    fn page(&self, document: &serde_json::Value) -> Result<String, Error>;

    /// Whether MLX takes foreign memory over without copying it, and whether it then writes there in place: measured
    /// by addresses, with MLX's version.
    ///
    /// # Errors
    ///
    /// When MLX is not installed.
    fn probe_adoption(&self) -> Result<serde_json::Map<String, serde_json::Value>, Error>;

    /// The inverse: whether a runtime writes an output into memory that MLX owns. This Mac's Core ML, or the fake of it
    /// elsewhere, as `engine` says; `used` when it returned the array it was offered, `seen` when MLX then sees the
    /// values, both of them needed.
    ///
    /// # Errors
    ///
    /// When MLX is not installed, or the runtime fails.
    fn probe_inverse(&self) -> Result<serde_json::Map<String, serde_json::Value>, Error>;

    /// Names and versions of what decodes.
    ///
    /// # Errors
    ///
    /// When it is not installed.
    fn versions(&self) -> Result<serde_json::Map<String, serde_json::Value>, Error>;

    /// The report of a bench as one self-contained HTML page.
    ///
    /// # Errors
    ///
    /// When the document lacks something that the page shows.
    fn bench_page(&self, document: &serde_json::Value) -> Result<String, Error>;

    /// Whether the user has asked to stop.
    fn interrupted(&self) -> bool;
}

/// Told of a stage's name, what is done of it and how much it is.
pub type Progress = Box<dyn Fn(&str, u64, u64) + Send + Sync>;

/// Which model to load, and how.
#[derive(Clone, Debug)]
pub struct DecoderRequest {
    /// Its folder.
    pub folder: PathBuf,
    /// Type of its weights and cache; its own when absent.
    pub dtype: Option<DType>,
}

/// Whether a decoder takes the memory of a cache over instead of copying its rows.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Adoption {
    /// Whether that copies nothing, neither at once nor at the first step.
    pub free: bool,
    /// How that is known, or what speaks against it: a sentence.
    pub because: String,
}

/// A loaded model.
pub trait Decoder {
    /// `mlx-cpu` or `mlx-gpu`; of a package, the engine that runs it.
    fn engine(&self) -> String;

    /// The type of its weights and cache, which says how coarsely it rounds.
    ///
    /// # Errors
    ///
    /// When the model has none, or has several.
    fn dtype(&self) -> Result<DType, Error>;

    /// The compute units that a package was loaded for, where its engine has them.
    fn compute_units(&self) -> Option<String> {
        None
    }

    /// What the user should know of how it runs.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Whether it takes memory over: measured here and now, never assumed.
    ///
    /// # Errors
    ///
    /// When that cannot be measured.
    fn adoption(&self) -> Result<Adoption, Error>;

    /// [`Decoder::receive`] that takes the cache's memory over where nothing speaks against it; the report says which
    /// path it was, and why.
    ///
    /// # Errors
    ///
    /// As [`Decoder::receive`].
    fn adopt(&mut self, cache: CacheView, tokens: &[u32]) -> Result<HandoffReport, Error> {
        self.receive(Some(cache), tokens)
    }

    /// The ids of a prompt, with the chat template unless it is to be ignored.
    ///
    /// # Errors
    ///
    /// When the folder has no tokenizer.
    fn encode(&self, prompt: &str, ignore_chat_template: bool) -> Result<Vec<u32>, Error>;

    /// Takes the cache of all of `tokens` but the last over. Without a view, starts from empty caches.
    ///
    /// # Errors
    ///
    /// When the cache does not fit the model.
    fn receive(&mut self, cache: Option<CacheView>, tokens: &[u32]) -> Result<HandoffReport, Error>;

    /// Prefills all of `tokens` but the last, of which there is one at least, and takes the rows over while the
    /// prefill runs.
    ///
    /// # Errors
    ///
    /// When the prefill fails, or its cache does not fit the model; nothing is taken over then.
    fn receive_streamed(
        &mut self,
        engine: &SharedPrefill,
        tokens: &[u32],
    ) -> Result<(PrefillReport, HandoffReport), Error>;

    /// Prefills all of `tokens` but the last, of which there is one at least, by itself: nothing is handed over.
    ///
    /// # Errors
    ///
    /// When the model fails.
    fn prefill(&mut self, tokens: &[u32]) -> Result<PrefillReport, Error>;

    /// Lets go of the cache. With `memory`, also of the memory that was kept for the next one: its pages are then
    /// new.
    ///
    /// # Errors
    ///
    /// When the memory cannot be given back.
    fn forget(&mut self, memory: bool) -> Result<(), Error>;

    /// Decodes at most `max_tokens` tokens after `remaining`, until the model ends its answer or `emit` says
    /// that it has seen enough.
    ///
    /// # Errors
    ///
    /// When the model fails.
    fn generate(
        &mut self,
        remaining: &[u32],
        max_tokens: usize,
        temperature: f64,
        emit: &mut dyn FnMut(&Token) -> bool,
    ) -> Result<Generated, Error>;

    /// Hands a cache over and compares: bytes with the source, everything else with the reference.
    ///
    /// # Errors
    ///
    /// When the model fails. What a rung finds is no error.
    fn verify(&mut self, request: VerifyRequest) -> Result<Vec<Rung>, Error>;
}

/// A prompt's cache to verify.
#[derive(Debug)]
pub struct VerifyRequest {
    /// What the producer left of all tokens but the last; nothing of a prompt of one token.
    pub cache: Option<CacheView>,
    /// What to compare with; the decoder's own prefill when absent.
    pub reference: Option<CacheView>,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Tokens of the reference's continuation.
    pub max_tokens: usize,
    /// What is still a pass.
    pub thresholds: Thresholds,
}

/// A loaded model that prefills.
pub trait Prefiller {
    /// `mlx-cpu` or `mlx-gpu`.
    fn engine(&self) -> String;

    /// Runs the prompt and leaves its cache.
    ///
    /// # Errors
    ///
    /// When the model fails.
    fn prefill(&mut self, tokens: &[u32]) -> Result<CacheView, Error>;
}

/// From text to ids and back.
pub trait Tokenizer {
    /// The ids of a prompt, with the chat template unless it is to be ignored.
    ///
    /// # Errors
    ///
    /// When the text cannot be encoded.
    fn encode(&self, prompt: &str, ignore_chat_template: bool) -> Result<Vec<u32>, Error>;

    /// Ids that end an answer.
    ///
    /// # Errors
    ///
    /// When the tokenizer does not say.
    fn ends(&self) -> Result<Vec<u32>, Error>;

    /// The text that one more token makes certain.
    ///
    /// # Errors
    ///
    /// When the token has no text.
    fn add(&mut self, token: u32) -> Result<String, Error>;

    /// The text that was still open.
    ///
    /// # Errors
    ///
    /// When what is open is no text.
    fn finish(&mut self) -> Result<String, Error>;
}

/// One decoded token.
#[derive(Clone, Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text that is certain now.
    pub text: String,
}

/// What decoding did.
#[derive(Clone, Debug)]
pub struct Generated {
    /// All generated ids.
    pub tokens: Vec<u32>,
    /// The text of all of them.
    pub text: String,
    /// Seconds of the first step.
    pub first_step_seconds: f64,
    /// Seconds of all steps.
    pub seconds: f64,
    /// Bytes of the cache that the first step copied; `None` where the engine does not show it.
    pub first_step_copied_bytes: Option<usize>,
}

/// What to export.
#[derive(Clone, Debug)]
pub struct ExportRequest {
    /// The model's folder.
    pub model: PathBuf,
    /// The package to write.
    pub out: PathBuf,
    /// `prefill` or `decode`.
    pub kind: String,
    /// Lengths of the functions.
    pub buckets: Vec<usize>,
    /// Rows of the whole context, for each function that takes a past.
    pub context: Vec<usize>,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Packages to split the layers over.
    pub split: Option<usize>,
    /// `stacked`, `grouped` or `per-layer`.
    pub kv_outputs: String,
    /// `int8`, `int4-block32`, `int4-block32-int8` or `lut6`: projections and embeddings in fewer bits.
    pub quantize: Option<String>,
    /// Replace an existing package.
    pub force: bool,
}

/// What was exported: the report as it is printed.
#[derive(Clone, Debug)]
pub struct Exported {
    /// The report.
    pub report: serde_json::Value,
}

/// Which prefill to time.
#[derive(Clone, Debug)]
pub struct PrefillComparison {
    /// The model's folder.
    pub folder: PathBuf,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Threads.
    pub threads: usize,
}
