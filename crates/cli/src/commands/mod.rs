//! The verbs, one file each.

pub(crate) mod bench;
pub(crate) mod bench_run;
pub(crate) mod calibrate;
pub(crate) mod decision;
pub(crate) mod export;
pub(crate) mod inspect;
pub(crate) mod layouts;
pub(crate) mod measure;
pub(crate) mod output;
pub(crate) mod plan;
pub(crate) mod routes;
pub(crate) mod run;
pub(crate) mod selftest;
pub(crate) mod verify;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvbaton::layout::{CacheSpec, DType, Layout, ModelSpec, presets};
use kvbaton::runtime::Units;
use kvbaton::{
    CpuOptions, DigestCache, Engine, EngineOptions, Error, ErrorKind, Numerics, Stated, WeightStorage,
    bench::shape,
};

use crate::Host;
use crate::args::{EngineName, Executor, FloatType, Rounding, Runtime, UnitsName, Weights};
use crate::host::Tokenizer;
use crate::printer::Printer;

/// More tokens than any model's context has.
pub(crate) const MOST_TOKENS: usize = 1 << 24;

impl FloatType {
    pub(crate) fn dtype(self) -> DType {
        match self {
            FloatType::Float16 => DType::Float16,
            FloatType::Bfloat16 => DType::BFloat16,
            FloatType::Float32 => DType::Float32,
        }
    }
}

impl Runtime {
    /// The engine that was asked for, and where it may run.
    pub(crate) fn options(&self, threads: usize, stated: Stated, printer: &Printer) -> EngineOptions {
        let bar = printer.progress();
        EngineOptions {
            engine: self.engine.map(|e| match e {
                EngineName::Coreml => Engine::CoreMl,
                EngineName::Cpu => Engine::Cpu,
            }),
            units: self.compute_units.map(|u| match u {
                UnitsName::All => Units::All,
                UnitsName::CpuAndNe => Units::CpuAndNe,
                UnitsName::CpuAndGpu => Units::CpuAndGpu,
                UnitsName::Cpu => Units::Cpu,
            }),
            cpu: self.executor.options(threads),
            timeout: self.limits.engine_timeout.map(Duration::from_secs),
            prediction_timeout: self.limits.prediction_timeout.map(Duration::from_secs),
            stated,
            // Compiling for the Neural Engine takes minutes: whoever watches is told, once a second.
            waiting: Some(Arc::new(move |what: &str, waited: Duration| {
                bar.set_message(format!("{what}, {} s", waited.as_secs()));
            })),
        }
    }
}

impl Executor {
    /// Options of the CPU executor.
    pub(crate) fn options(&self, threads: usize) -> CpuOptions {
        let numerics = match self.numerics {
            Rounding::F32 => Numerics::F32,
            Rounding::F16Storage => Numerics::F16Storage,
            Rounding::F16Accumulate => Numerics::F16Accumulate,
        };
        let weights = match self.weights {
            Weights::Resident => WeightStorage::Resident,
            Weights::Streamed => WeightStorage::Streamed,
        };
        CpuOptions::with_threads(threads)
            .with_numerics(numerics)
            .with_weights(weights)
            .with_max_memory(self.max_memory)
    }
}

/// What a folder says of its model, its weights' digest included.
pub(crate) fn described(folder: &Path, host: &dyn Host) -> Result<ModelSpec, Error> {
    let digest = DigestCache::of_user().weights_digest(folder)?;
    Ok(ModelSpec { weights_digest: Some(digest), ..host.model_spec(folder)? })
}

/// Token ids as a JSON list, or separated by white space or commas.
pub(crate) fn parse_ids(text: &str, file: &str) -> Result<Vec<u32>, Error> {
    let wrong = |message: String| {
        Error::new(ErrorKind::Usage, message)
            .hint("token ids are whole numbers, as a JSON list or separated by white space")
    };
    let text = text.trim();
    if text.starts_with('[') {
        // A list that was cut off is shorter, and a prompt all the same: it is read as JSON or not at all.
        let list: Vec<serde_json::Value> = serde_json::from_str(text)
            .map_err(|e| wrong(format!("`{file}` begins as a JSON list and is none: {e}")))?;
        return list
            .iter()
            .map(|id| {
                let whole = id.as_u64().and_then(|id| u32::try_from(id).ok());
                whole.ok_or_else(|| wrong(format!("`{id}` in `{file}` is no token id")))
            })
            .collect();
    }
    text.split(|c: char| c.is_whitespace() || c == ',')
        .filter(|word| !word.is_empty())
        .map(|word| {
            let digits = word.bytes().all(|b| b.is_ascii_digit());
            let id = word.parse().ok().filter(|_| digits);
            id.ok_or_else(|| wrong(format!("`{word}` in `{file}` is no token id")))
        })
        .collect()
}

/// A folder's tokenizer.
pub(crate) fn need_tokenizer<'a>(
    folder: &Path,
    host: &'a dyn Host,
) -> Result<Box<dyn Tokenizer + 'a>, Error> {
    host.tokenizer(folder)?.ok_or_else(|| {
        Error::new(ErrorKind::Usage, format!("`{}` has no tokenizer", folder.display()))
            .hint("give ids with --prompt-tokens")
            .field("folder", folder.display().to_string())
    })
}

/// The host, or how to get one.
pub(crate) fn need_host<'a>(host: Option<&'a dyn Host>, verb: &str) -> Result<&'a dyn Host, Error> {
    host.ok_or_else(|| {
        Error::new(ErrorKind::Unavailable, format!("`kvbaton {verb}` needs the Python package"))
            .hint("pip install 'kvbaton[mlx,export]', and run the `kvbaton` it installs")
    })
}

/// A layout by preset name or TOML file.
pub(crate) fn layout(name: &str) -> Result<Layout, Error> {
    if presets::text(name).is_some() {
        return Ok(presets::get(name)?);
    }
    let path = Path::new(name);
    if path.extension().is_none_or(|e| e != "toml") && !path.exists() {
        let known = presets::names().collect::<Vec<_>>().join(", ");
        return Err(Error::new(ErrorKind::Layout, format!("no layout is called `{name}`"))
            .hint(format!("known: {known}; or name a TOML file"))
            .field("name", name));
    }
    let text = read_text(path)?;
    Ok(Layout::from_toml(&text)?)
}

/// A model's cache by built-in name or config.json.
pub(crate) fn cache_shape(name: &str, host: Option<&dyn Host>) -> Result<CacheSpec, Error> {
    if let Some(cache) = shape(name) {
        return Ok(cache);
    }
    let path = Path::new(name);
    if !path.exists() {
        return Err(Error::new(ErrorKind::Usage, format!("no shape is called `{name}`, and no file either"))
            .hint(format!("known: {}; or name a model's config.json", kvbaton::bench::SHAPES.join(", ")))
            .field("name", name));
    }
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new(".")) };
    Ok(need_host(host, "… --shape config.json")?.model_spec(folder)?.cache)
}

/// A whole text file, without the byte order mark that some editors begin one with; `-` is stdin.
pub(crate) fn read_text(path: &Path) -> Result<String, Error> {
    let read = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(path)
    };
    let mut text =
        read.map_err(|e| Error::new(ErrorKind::Usage, format!("cannot read `{}`: {e}", path.display())))?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}
