//! The verbs, one file each.

pub(crate) mod bench;
pub(crate) mod export;
pub(crate) mod inspect;
pub(crate) mod layouts;
pub(crate) mod run;
pub(crate) mod selftest;
pub(crate) mod verify;

use std::path::Path;
use std::time::Duration;

use kvbaton::layout::{CacheSpec, DType, Layout, presets};
use kvbaton::runtime::Units;
use kvbaton::{Engine, EngineOptions, Error, ErrorKind, Stated, bench::shape};

use crate::Host;
use crate::args::{EngineName, FloatType, Runtime, UnitsName};
use crate::printer::Printer;

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
            threads,
            timeout: self.engine_timeout.map(Duration::from_secs),
            stated,
            // Compiling for the Neural Engine takes minutes: whoever watches is told, once a second.
            waiting: Some(Box::new(move |call, waited| {
                bar.set_message(format!("{call}, {} s", waited.as_secs()));
            })),
        }
    }
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

/// A whole text file; `-` is stdin.
pub(crate) fn read_text(path: &Path) -> Result<String, Error> {
    let read = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(path)
    };
    read.map_err(|e| Error::new(ErrorKind::Usage, format!("cannot read `{}`: {e}", path.display())))
}
