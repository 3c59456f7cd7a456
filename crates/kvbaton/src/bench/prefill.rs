//! `bench prefill`: a package's prefill alone, warmed.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{ChunkTime, EngineOptions, Error, Range, open_prefill};

/// One engine's prefill.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrefillRow {
    /// `cpu`, `mlx-cpu`, `mlx-cpu+openblas`, …
    pub engine: String,
    /// Type of weights and activations.
    pub dtype: String,
    /// The package, or the model folder.
    pub package: String,
    /// The function that ran; `None` where the engine has none.
    pub function: Option<String>,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Threads.
    pub threads: usize,
    /// Seconds of one prefill, after one that is not counted.
    pub seconds: Range,
    /// Tokens a second at the median.
    pub tokens_per_second: f64,
    /// The most memory the process held, where it is known.
    pub peak_bytes: Option<u64>,
    /// What each chunk of the last prefill cost; empty where the prompt took one function.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<ChunkTime>,
    /// What the functions that ran take, computed when they were loaded: weights, activations, outputs; `None` for
    /// engines that do not compute it.
    #[serde(default)]
    pub computed_bytes: Option<u64>,
}

/// Times `repeats` prefills of `tokens` tokens after one that warms.
///
/// # Errors
///
/// When the package cannot be opened or run.
pub fn bench_prefill(
    path: &Path,
    tokens: usize,
    repeats: usize,
    options: EngineOptions,
) -> Result<PrefillRow, Error> {
    let threads = options.cpu.threads;
    let mut engine = open_prefill(path, options)?;
    engine.prepare(tokens)?;
    let vocab = engine.model().map_or(1, |m| m.vocab_size).max(1);
    // A fixed, mixed run of ids: time does not depend on them, but equal ids would make softmax trivial.
    let prompt: Vec<u32> = (0..tokens).map(|i| u32::try_from((i * 7919 + 13) % vocab).unwrap_or(0)).collect();
    let function = engine.prefill(&prompt)?.report.function;
    let mut seconds = Vec::new();
    for _ in 0..repeats.max(1) {
        seconds.push(engine.prefill(&prompt)?.report.seconds);
    }
    let seconds = Range::of(&seconds).expect("at least one repeat");
    let dtype = engine.model().and_then(|m| m.dtype.clone()).unwrap_or_else(|| "float16".to_owned());
    Ok(PrefillRow {
        engine: engine.engine().to_owned(),
        dtype,
        package: path.display().to_string(),
        function: Some(function),
        tokens,
        threads: if threads == 0 {
            std::thread::available_parallelism().map_or(1, usize::from)
        } else {
            threads
        },
        tokens_per_second: tokens as f64 / seconds.median,
        seconds,
        peak_bytes: peak_resident_bytes(),
        chunks: engine.chunk_times().to_vec(),
        computed_bytes: engine.computed_bytes(),
    })
}

/// The high-water mark of this process's resident memory.
fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|k| k * 1024)
}
