//! Verbs and flags. Flags that mlx-lm has keep their names.

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

/// Hands a KV cache from Core ML prefill to MLX decode.
#[derive(Debug, Parser)]
#[command(name = "kvbaton", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Prefill with one engine, hand the cache over, decode with another.
    Run(Box<Run>),
    /// Show what a package holds: functions, cache interface, and what the Neural Engine will refuse.
    Inspect(Inspect),
    /// Write Core ML packages from a model folder: prefill, decode, or a model split over several.
    Export(Export),
    /// List, show and plan cache layouts.
    Layouts(Layouts),
    /// Measure.
    Bench(Bench),
    /// Measure this machine once, for `plan`.
    Calibrate(Calibrate),
    /// Say which engine should do what for a model and a prompt length, and whether to hand over at all.
    Plan(Plan),
    /// Ask this machine what kvbaton cannot know of it, and write down what came out.
    Selftest(Selftest),
    /// Compare what a package's cache makes MLX say with what MLX says by itself, rung by rung.
    Verify(Box<Verify>),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Verify {
    /// The Core ML package that prefills, or the chain.toml of a split one.
    #[arg(long, value_name = "PACKAGE")]
    pub(crate) prefill: PathBuf,
    /// The MLX model folder that decodes.
    #[arg(long, value_name = "MODEL")]
    pub(crate) decode: PathBuf,
    /// JSONL with `prompt` or `tokens` a line, or a folder of such files and of text files, one prompt each.
    #[arg(long, value_name = "FILE.jsonl|DIR")]
    pub(crate) prompts: PathBuf,
    /// Tokens of the reference's continuation to compare.
    #[arg(long, short, default_value_t = 64, value_name = "N")]
    pub(crate) max_tokens: usize,
    /// Cut the prompts so that each fills this context together with its continuation; each prompt runs at each.
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    pub(crate) context: Vec<usize>,
    /// Compare with this package's cache, or with MLX's prefill of this model, instead of the decoder's own prefill.
    #[arg(long, value_name = "PACKAGE|MODEL")]
    pub(crate) reference: Option<PathBuf>,
    /// Prefill each prompt so often; the caches must be the same.
    #[arg(long, default_value_t = 1, value_name = "K")]
    pub(crate) repeat: usize,
    #[command(flatten)]
    pub(crate) thresholds: VerifyThresholds,
    /// Encode the prompts as they are.
    #[arg(long)]
    pub(crate) ignore_chat_template: bool,
    /// Type of the decoder's weights and cache; the model's own when absent.
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<FloatType>,
    /// Accept a difference that would be refused.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) allow_different: Vec<Different>,
    /// The folder that package and model were both made from.
    #[arg(long, value_name = "DIR")]
    pub(crate) source_model: Option<PathBuf>,
    /// The layout of the package's cache, where the package does not say: a name, or a TOML file.
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub(crate) layout: Option<String>,
    /// The folder of the model that the package was made from, where the package does not say.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) runtime: Runtime,
    /// Threads for prefill; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    /// Write the report as one HTML page.
    #[arg(long, value_name = "OUT.html")]
    pub(crate) report: Option<PathBuf>,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is still a pass.
#[derive(Debug, ClapArgs)]
pub(crate) struct VerifyThresholds {
    /// A token that the reference prefers by less than so much of a logit is a near tie; 0.01 when absent, 0.3 for a
    /// decoder in bfloat16.
    #[arg(long, value_name = "LOGIT")]
    pub(crate) tie: Option<f64>,
    /// Smallest cosine of the keys or values of one head of one layer; 0.999 when absent, 0.995 in bfloat16.
    #[arg(long, value_name = "C")]
    pub(crate) min_cosine: Option<f64>,
    /// Largest relative error of the norm of such a head; 0.01 when absent, 0.02 in bfloat16.
    #[arg(long, value_name = "E")]
    pub(crate) max_norm_error: Option<f64>,
    /// Largest relative error of one row of one head; 0.1 when absent, 0.9 in bfloat16.
    #[arg(long, value_name = "E")]
    pub(crate) max_row_error: Option<f64>,
    /// Largest divergence of one step, in nats; 0.01 when absent, 0.05 in bfloat16.
    #[arg(long, value_name = "NATS")]
    pub(crate) max_kl: Option<f64>,
    /// Smallest share of steps at which the likeliest token is the reference's, or nearly tied with it; 1 when
    /// absent.
    #[arg(long, value_name = "SHARE")]
    pub(crate) min_agreement: Option<f64>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Run {
    /// What prefills: a Core ML package, a chain.toml of several, an MLX model folder, or a safetensors dump of a
    /// cache.
    #[arg(long, value_name = "PACKAGE|CHAIN|MODEL|DUMP")]
    pub(crate) prefill: PathBuf,
    /// What decodes: an MLX model folder, or a Core ML package of the kind `decode`.
    #[arg(long, value_name = "MODEL|PACKAGE")]
    pub(crate) decode: PathBuf,
    /// A folder with the tokenizer, where neither side has one.
    #[arg(long, value_name = "DIR")]
    pub(crate) tokenizer: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) prompt: Prompt,
    /// Most tokens to generate.
    #[arg(long, short, default_value_t = 256, value_name = "N")]
    pub(crate) max_tokens: usize,
    /// Sampling temperature; 0 takes the likeliest token.
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    pub(crate) temp: f64,
    /// Encode the prompt as it is.
    #[arg(long)]
    pub(crate) ignore_chat_template: bool,
    /// Type of the decoder's weights and cache; the model's own when absent.
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<FloatType>,
    /// Accept a difference that would be refused.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub(crate) allow_different: Vec<Different>,
    /// The folder that package and model were both made from.
    #[arg(long, value_name = "DIR")]
    pub(crate) source_model: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) foreign: Foreign,
    #[command(flatten)]
    pub(crate) runtime: Runtime,
    /// Threads for prefill and copies; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    /// Allocate the decoder's cache and copy rows when the prefill is done, not while it runs.
    #[arg(long)]
    pub(crate) no_stream: bool,
    /// Who prefills and who decodes, of a package in --prefill, a model in --decode and --decode-package; `auto` is
    /// what `kvbaton plan` picks. What was named, when absent.
    #[arg(long, value_enum)]
    pub(crate) route: Option<RouteChoice>,
    /// A Core ML package of the kind `decode`, for routes that decode with Core ML.
    #[arg(long, value_name = "PACKAGE", requires = "route")]
    pub(crate) decode_package: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) circumstances: Circumstances,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Which engine runs the package, and where.
#[derive(Debug, ClapArgs)]
pub(crate) struct Runtime {
    /// The engine that runs the package; Core ML on a Mac, the CPU executor elsewhere, when absent.
    #[arg(long, value_enum)]
    pub(crate) engine: Option<EngineName>,
    /// Where Core ML may run it; all of them, and fewer when those fail, when absent.
    #[arg(long, value_enum, value_name = "UNITS")]
    pub(crate) compute_units: Option<UnitsName>,
    #[command(flatten)]
    pub(crate) limits: Limits,
    #[command(flatten)]
    pub(crate) executor: Executor,
}

/// How long Core ML's calls may take.
#[derive(Debug, ClapArgs)]
pub(crate) struct Limits {
    /// Seconds that Core ML may take to load a function, its compilation for the Neural Engine included; 1200 when absent.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) engine_timeout: Option<u64>,
    /// Seconds that one prediction of Core ML's may take; 300 when absent.
    #[arg(long, value_name = "SECONDS")]
    pub(crate) prediction_timeout: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EngineName {
    /// Apple's Core ML.
    Coreml,
    /// kvbaton's own executor.
    Cpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum UnitsName {
    /// Wherever the system prefers.
    All,
    /// The Neural Engine, and the CPU for the rest.
    CpuAndNe,
    /// The GPU, and the CPU for the rest.
    CpuAndGpu,
    /// The CPU alone.
    Cpu,
}

/// How the CPU executor runs a package.
#[derive(Debug, ClapArgs)]
pub(crate) struct Executor {
    /// What the CPU executor rounds to fp16: nothing, results, or sums as they grow, too.
    #[arg(long, value_enum, default_value_t = Rounding::F16Storage)]
    pub(crate) numerics: Rounding,
    /// Whether the CPU executor keeps compressed weights decompressed, or decompresses them each time.
    #[arg(long, value_enum, default_value_t = Weights::Resident)]
    pub(crate) weights: Weights,
    /// The most memory the CPU executor may take, as bytes or with KiB, MiB, GiB; what is available when absent.
    #[arg(long, value_name = "BYTES", value_parser = memory_size)]
    pub(crate) max_memory: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Weights {
    Resident,
    Streamed,
}

/// More than any machine has cores. Starting a million takes minutes, and all of the machine meanwhile.
const MOST_THREADS: usize = 1024;

fn threads(text: &str) -> Result<usize, String> {
    let count: usize = text.parse().map_err(|e: std::num::ParseIntError| e.to_string())?;
    if count > MOST_THREADS {
        return Err(format!("{count} threads are more than the {MOST_THREADS} that kvbaton starts"));
    }
    Ok(count)
}

/// Bytes: a whole number, or a number with a binary or decimal unit.
fn memory_size(text: &str) -> Result<u64, String> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let unit: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        other => return Err(format!("`{other}` is no unit of memory: B, KiB, MiB, GiB, MB, GB")),
    };
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is no size"))?;
    let bytes = number * unit as f64;
    if !(bytes.is_finite() && bytes >= 1.0 && bytes < 2f64.powi(63)) {
        return Err(format!("`{text}` is no size"));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between 1 and 2^63")]
    Ok(bytes as u64)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rounding {
    #[value(name = "f32")]
    F32,
    #[value(name = "f16-storage")]
    F16Storage,
    #[value(name = "f16-accumulate")]
    F16Accumulate,
}

/// What a package or a dump does not say of itself.
#[derive(Debug, ClapArgs)]
pub(crate) struct Foreign {
    /// The layout of the cache: a name from `kvbaton layouts`, or a TOML file.
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub(crate) layout: Option<String>,
    /// The folder of the model that the package or dump was made from.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Tokens that the dumped cache has seen; those of the prompt when absent.
    #[arg(long, value_name = "N")]
    pub(crate) tokens_seen: Option<usize>,
    /// Newest rows that the dumped cache holds.
    #[arg(long, value_name = "N")]
    pub(crate) live: Option<usize>,
    /// Slots before the first row of the dumped cache.
    #[arg(long, value_name = "N")]
    pub(crate) pad: Option<usize>,
    /// Slot of the oldest row of the dumped cache.
    #[arg(long, value_name = "N")]
    pub(crate) ring_start: Option<usize>,
}

#[derive(Debug, ClapArgs)]
#[group(required = true, multiple = false)]
pub(crate) struct Prompt {
    /// The prompt.
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// A file with the prompt; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_file: Option<PathBuf>,
    /// A file with token ids, as JSON or separated by white space; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_tokens: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Different {
    /// Digests of the weights that differ or are unknown.
    Weights,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FloatType {
    Float16,
    Bfloat16,
    Float32,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Inspect {
    /// The package, or the chain.toml of several.
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) prompt: InspectPrompt,
    /// The folder of the model that the package was made from: its tokenizer for `--prompt`, and what a package does
    /// not say of itself.
    #[arg(long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// The layout of the cache, where the package states none: a name from `kvbaton layouts`, or a TOML file.
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub(crate) layout: Option<String>,
    /// Encode the prompt as it is.
    #[arg(long)]
    pub(crate) ignore_chat_template: bool,
    #[command(flatten)]
    pub(crate) executor: Executor,
    /// Threads; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A prompt to run the package over, for the activations that it reaches.
#[derive(Debug, ClapArgs)]
#[group(multiple = false)]
pub(crate) struct InspectPrompt {
    /// Also run this prompt, and show the largest activation that it reaches.
    #[arg(long, short, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// The same, with token ids from a file, as JSON or separated by white space; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    pub(crate) prompt_tokens: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Export {
    /// The model folder: config.json, safetensors, tokenizer.
    pub(crate) model: PathBuf,
    /// The package to write; with --split, a folder.
    #[arg(value_name = "OUT")]
    pub(crate) out: PathBuf,
    /// What the package does.
    #[arg(long, value_enum, default_value_t = ExportKind::Prefill)]
    pub(crate) kind: ExportKind,
    /// Prompt lengths, one function each.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 512], value_name = "N,…")]
    pub(crate) buckets: Vec<usize>,
    /// Rows of the whole context: of a prefill package, one function each for chunks of longer prompts; of a decode
    /// package, one, 4096 when absent.
    #[arg(long, value_delimiter = ',', value_name = "N,…")]
    pub(crate) context: Vec<usize>,
    /// Tokens of a chunk.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub(crate) chunk: usize,
    /// Split the layers over so many packages, and write the chain.toml that --prefill takes.
    #[arg(long, value_name = "N")]
    pub(crate) split: Option<usize>,
    /// How the cache leaves the program.
    #[arg(long, value_enum, default_value_t = KvOutputs::Stacked)]
    pub(crate) kv_outputs: KvOutputs,
    /// Store projections and embeddings in fewer bits.
    #[arg(long, value_enum, value_name = "SCHEME")]
    pub(crate) quantize: Option<Quantize>,
    /// Replace an existing package.
    #[arg(long)]
    pub(crate) force: bool,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportKind {
    /// Prompts: many tokens at once, the cache as outputs.
    Prefill,
    /// Decode steps: one token at a time, the cache in states.
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvOutputs {
    /// Keys of all layers in one tensor, values in another.
    Stacked,
    /// As few tensors as fit the Neural Engine's surfaces.
    Grouped,
    /// Two tensors a layer.
    PerLayer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quantize {
    /// Eight bits, a scale for each output.
    Int8,
    /// Four bits, a scale and an offset for each 32 values.
    #[value(name = "int4-block32")]
    Int4Block32,
    /// The same, with embeddings and head in eight bits.
    #[value(name = "int4-block32-int8")]
    Int4Block32Int8,
    /// Six bits, a palette for each 16 outputs.
    Lut6,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Layouts {
    #[command(subcommand)]
    pub(crate) verb: Option<LayoutsVerb>,
    /// Print one JSON document.
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LayoutsVerb {
    /// List the layouts that ship with kvbaton.
    List,
    /// Print one as TOML.
    Show {
        /// Its name, or a TOML file.
        name: String,
    },
    /// Print the copies from one layout to another.
    Plan {
        /// The source: a name or a TOML file.
        source: String,
        /// The target: a name or a TOML file.
        target: String,
        /// The model's shape: a built-in name or a config.json.
        #[arg(long, default_value = "qwen3-0.6b")]
        shape: String,
        /// Rows that source and target can hold.
        #[arg(long, default_value_t = 512)]
        context: usize,
        /// Rows that are live.
        #[arg(long)]
        live: Option<usize>,
        /// Type of the target's elements.
        #[arg(long, value_enum, default_value_t = FloatType::Float16)]
        dtype: FloatType,
        /// Print every copy.
        #[arg(long)]
        explain: bool,
    },
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Bench {
    #[command(subcommand)]
    pub(crate) verb: BenchVerb,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchVerb {
    /// The copies of a hand-off, against memcpy.
    Handoff(BenchHandoff),
    /// A package's prefill alone, warmed.
    Prefill(BenchPrefill),
    /// The whole path: prefill, what the hand-off adds, the first step, decoding.
    Run(BenchRun),
}

#[derive(Debug, ClapArgs)]
pub(crate) struct BenchHandoff {
    /// The model's shape: a built-in name or a config.json.
    #[arg(long, default_value = "qwen3-0.6b", value_name = "NAME|config.json")]
    pub(crate) shape: String,
    /// The source's layout: a name or a TOML file.
    #[arg(long, default_value = "kvbaton-stacked", value_name = "PRESET")]
    pub(crate) source: String,
    /// The target's layout: a name or a TOML file.
    #[arg(long, default_value = "mlx-lm", value_name = "PRESET")]
    pub(crate) target: String,
    /// Capacities in rows.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 4096], value_name = "N,…")]
    pub(crate) context: Vec<usize>,
    /// Live rows as a share of the capacity.
    #[arg(long, default_value_t = 0.75, value_name = "F")]
    pub(crate) live_fraction: f64,
    /// Type of the target's elements.
    #[arg(long, value_enum, default_value_t = FloatType::Float16)]
    pub(crate) dtype: FloatType,
    /// Bytes from one row of the source to the next; packed when absent.
    #[arg(long, value_name = "BYTES")]
    pub(crate) row_stride: Option<usize>,
    /// Threads; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    /// Measurements of each figure.
    #[arg(long, default_value_t = 21, value_name = "N")]
    pub(crate) repeats: usize,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct BenchPrefill {
    /// The package.
    pub(crate) package: PathBuf,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub(crate) tokens: usize,
    #[command(flatten)]
    pub(crate) runtime: Runtime,
    /// Threads; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    /// Also time MLX's own prefill of this model folder.
    #[arg(long, value_name = "MODEL")]
    pub(crate) compare: Option<PathBuf>,
    /// Measurements of each figure.
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub(crate) repeats: usize,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Plan {
    /// The model: its folder, or the name of a built-in shape.
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: String,
    /// Tokens of the prompt.
    #[arg(long, value_name = "N")]
    pub(crate) context: usize,
    /// Tokens to generate.
    #[arg(long, short, default_value_t = 256, value_name = "K")]
    pub(crate) max_tokens: usize,
    #[command(flatten)]
    pub(crate) circumstances: Circumstances,
    /// The Core ML package that would prefill.
    #[arg(long, value_name = "PACKAGE")]
    pub(crate) prefill: Option<PathBuf>,
    /// The Core ML package that would decode.
    #[arg(long, value_name = "PACKAGE")]
    pub(crate) decode_package: Option<PathBuf>,
    /// Type of MLX's weights and cache; the model's own when absent.
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<FloatType>,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RouteChoice {
    /// What `kvbaton plan` picks.
    Auto,
    /// The Core ML package prefills, MLX decodes.
    CoremlMlx,
    /// MLX does both.
    Mlx,
    /// Core ML packages do both.
    Coreml,
    /// MLX prefills, a Core ML package decodes.
    MlxCoreml,
}

/// What a choice of engines depends on besides the model.
#[derive(Debug, ClapArgs)]
pub(crate) struct Circumstances {
    /// What is to be least: time to first token, time in all, or energy.
    #[arg(long, value_enum, default_value_t = Aim::Ttft)]
    pub(crate) objective: Aim,
    /// The share of the GPU that others use, from 0 to below 1.
    #[arg(long, default_value_t = 0.0, value_name = "F")]
    pub(crate) gpu_busy: f64,
    /// The machine: a file, or a shipped one by name; this machine when absent.
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub(crate) machine: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Aim {
    /// Time to first token.
    Ttft,
    /// Time to the last token.
    Total,
    /// Joules.
    Energy,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Calibrate {
    /// The MLX model folder.
    #[arg(long, value_name = "MODEL")]
    pub(crate) decode: PathBuf,
    /// The Core ML package that prefills.
    #[arg(long, value_name = "PACKAGE")]
    pub(crate) prefill: Option<PathBuf>,
    /// The Core ML package that decodes.
    #[arg(long, value_name = "PACKAGE")]
    pub(crate) decode_package: Option<PathBuf>,
    /// Prompt lengths.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1024], value_name = "N,…")]
    pub(crate) lengths: Vec<usize>,
    /// Type of MLX's weights and cache; the model's own when absent.
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<FloatType>,
    /// Measurements of each figure.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub(crate) repeats: usize,
    /// Threads; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    /// The file to write; the one that `plan` looks for when absent.
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) out: Option<PathBuf>,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How a run of a bench is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RunMode {
    /// Rows move while the prefill runs, into memory that was used before.
    StreamedWarm,
    /// Rows move after the prefill, into memory that was used before.
    AfterWarm,
    /// Rows move while the prefill runs, into new memory.
    StreamedCold,
    /// Rows move after the prefill, into new memory.
    AfterCold,
}

impl RunMode {
    pub(crate) const ALL: [RunMode; 4] =
        [RunMode::StreamedWarm, RunMode::AfterWarm, RunMode::StreamedCold, RunMode::AfterCold];
}

#[derive(Debug, ClapArgs)]
pub(crate) struct BenchRun {
    /// The Core ML package that prefills.
    #[arg(long, value_name = "PACKAGE")]
    pub(crate) prefill: PathBuf,
    /// The MLX model folder that decodes.
    #[arg(long, value_name = "MODEL")]
    pub(crate) decode: PathBuf,
    /// The Core ML package that decodes, for routes that do.
    #[arg(long, value_name = "PACKAGE")]
    pub(crate) decode_package: Option<PathBuf>,
    /// Prompt lengths in tokens.
    #[arg(long, value_delimiter = ',', default_values_t = [128, 512], value_name = "N,…")]
    pub(crate) context: Vec<usize>,
    /// Who prefills and decodes.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [RouteChoice::CoremlMlx])]
    pub(crate) route: Vec<RouteChoice>,
    /// When rows move, and whether the decoder's memory was used before; a route that hands nothing over has one.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = RunMode::ALL)]
    pub(crate) mode: Vec<RunMode>,
    /// Tokens to decode.
    #[arg(long, short, default_value_t = 16, value_name = "K")]
    pub(crate) max_tokens: usize,
    /// Type of the decoder's weights and cache; the model's own when absent.
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<FloatType>,
    /// Runs of each row.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub(crate) repeats: usize,
    /// Seconds of rest before each run, so that heat does not tell.
    #[arg(long, default_value_t = 0.0, value_name = "S")]
    pub(crate) cooldown: f64,
    /// Threads for prefill and copies; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    /// Also write a page with charts.
    #[arg(long, value_name = "OUT.html")]
    pub(crate) report: Option<PathBuf>,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Selftest {
    /// A package of yours; a prefill in miniature when absent.
    pub(crate) package: Option<PathBuf>,
    /// The MLX model folder that the package was made from: also compare the tokens that it decodes.
    #[arg(long, value_name = "MODEL", requires = "package")]
    pub(crate) decode: Option<PathBuf>,
    /// The layout of the package's cache: a name from `kvbaton layouts`, or a TOML file.
    #[arg(long, value_name = "NAME|FILE.toml", requires = "package")]
    pub(crate) layout: Option<String>,
    /// Hand-offs in a row.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    pub(crate) rounds: usize,
    /// Contexts whose hand-off is timed.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2048, 4096, 8192], value_name = "N,…")]
    pub(crate) context: Vec<usize>,
    /// Threads for the executor and copies; 0 takes all cores.
    #[arg(long, default_value_t = 0, value_name = "N", value_parser = threads)]
    pub(crate) threads: usize,
    #[command(flatten)]
    pub(crate) limits: Limits,
    /// The file to write: Markdown with the JSON document in it, to read and to attach.
    #[arg(long, default_value = "kvbaton-selftest.md", value_name = "FILE.md")]
    pub(crate) out: PathBuf,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn flags_are_unique_and_their_defaults_parse() {
        super::Args::command().debug_assert();
    }
}
