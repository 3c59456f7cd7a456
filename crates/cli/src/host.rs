//! What only Python can do.

use std::path::PathBuf;

use kvbaton::bench::PrefillRow;
use kvbaton::layout::{DType, ModelSpec};
use kvbaton::verify::{Rung, Thresholds};
use kvbaton::{CacheView, Error, HandoffReport, PrefillReport, SharedPrefill};

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

    /// Names and versions of what decodes.
    ///
    /// # Errors
    ///
    /// When it is not installed.
    fn versions(&self) -> Result<serde_json::Map<String, serde_json::Value>, Error>;

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

/// A loaded model.
pub trait Decoder {
    /// `mlx-cpu` or `mlx-gpu`.
    fn engine(&self) -> String;

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
    /// Bytes of the cache that the first step copied.
    pub first_step_copied_bytes: usize,
}

/// What to export.
#[derive(Clone, Debug)]
pub struct ExportRequest {
    /// The model's folder.
    pub model: PathBuf,
    /// The package to write.
    pub out: PathBuf,
    /// Lengths of the functions.
    pub buckets: Vec<usize>,
    /// `stacked`, `grouped` or `per-layer`.
    pub kv_outputs: String,
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
