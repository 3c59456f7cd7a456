//! Which engine runs a package.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use kvbaton_runtime::{Call, Units, is_compiled};

use crate::{ChainPrefill, CpuDecode, CpuOptions, CpuPrefill, Decode, Error, ErrorKind, Prefill, Stated};

/// An engine that runs packages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Apple's Core ML.
    CoreMl,
    /// kvbaton's own executor.
    Cpu,
}

impl Engine {
    /// Core ML on a Mac, the executor elsewhere.
    pub fn of_this_system() -> Engine {
        if cfg!(target_os = "macos") { Engine::CoreMl } else { Engine::Cpu }
    }

    /// The name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Engine::CoreMl => "coreml",
            Engine::Cpu => "cpu",
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Engine {
    type Err = Error;

    fn from_str(name: &str) -> Result<Engine, Error> {
        [Engine::CoreMl, Engine::Cpu].into_iter().find(|e| e.name() == name).ok_or_else(|| {
            Error::new(ErrorKind::Usage, format!("no engine is called `{name}`"))
                .hint("known: coreml, cpu")
                .field("engine", name)
        })
    }
}

/// Somebody who is told, once a second, what is waited for and for how long already.
pub type Waiting = Box<dyn FnMut(Call, Duration) + Send>;

/// How to open a package.
#[derive(Default)]
pub struct EngineOptions {
    /// The engine; this system's own when absent.
    pub engine: Option<Engine>,
    /// Where Core ML may run it; all units, and fewer when those fail, when absent.
    pub units: Option<Units>,
    /// How the executor runs it.
    pub cpu: CpuOptions,
    /// How long Core ML may take to load a model, its compilation included.
    pub timeout: Option<Duration>,
    /// What the package does not say of itself.
    pub stated: Stated,
    /// Told of long calls.
    pub waiting: Option<Waiting>,
}

/// Opens a package with the engine that the options name, or with this system's own.
///
/// # Errors
///
/// When the engine is not of this system, the options do not fit it, or the package cannot be opened.
pub fn open_prefill(path: &Path, options: EngineOptions) -> Result<Box<dyn Prefill>, Error> {
    match chosen(path, &options)? {
        Engine::CoreMl => coreml::open_prefill(path, options),
        Engine::Cpu => {
            let prefill = CpuPrefill::open_stated(path, options.cpu.threads, options.stated)?;
            Ok(Box::new(prefill.with_options(options.cpu)))
        }
    }
}

/// Opens a package that decodes a token at a time, with the engine that the options name or with this system's own, and
/// loads it. It must say of itself what its states are.
///
/// # Errors
///
/// As [`open_prefill`], and when the package does not decode.
pub fn open_decode(path: &Path, options: EngineOptions) -> Result<Box<dyn Decode>, Error> {
    match chosen(path, &options)? {
        Engine::CoreMl => coreml::open_decode(path, options),
        Engine::Cpu => Ok(Box::new(CpuDecode::open(path, &options.cpu)?)),
    }
}

/// Opens the chain of packages that `file` describes, which the executor runs on every system.
///
/// # Errors
///
/// When the options are those of Core ML, and as [`ChainPrefill::open`].
pub fn open_chain(file: &Path, options: EngineOptions) -> Result<Box<dyn Prefill>, Error> {
    let coreml = options.engine == Some(Engine::CoreMl);
    let flags = [
        ("--engine coreml", coreml),
        ("--compute-units", options.units.is_some()),
        ("--engine-timeout", options.timeout.is_some()),
    ];
    if let Some((flag, _)) = flags.iter().find(|(_, given)| *given) {
        let message = format!("{flag} is not for chains: the CPU executor runs `{}`", file.display());
        return Err(Error::new(ErrorKind::Usage, message)
            .hint(format!("leave {flag} out"))
            .field("engine", "cpu"));
    }
    Ok(Box::new(ChainPrefill::open(file, options.cpu, options.stated)?))
}

/// The engine to open `path` with, if the other options are its own.
fn chosen(path: &Path, options: &EngineOptions) -> Result<Engine, Error> {
    let engine = options.engine.unwrap_or_else(Engine::of_this_system);
    match engine {
        Engine::CoreMl => {
            if let Some(flag) = executor_flag(&options.cpu) {
                let message = format!("{flag} is for the engine cpu, this one is coreml");
                return Err(Error::new(ErrorKind::Usage, message)
                    .hint(format!("leave {flag} out, or add --engine cpu"))
                    .field("engine", "coreml"));
            }
        }
        Engine::Cpu => {
            let only_coreml = |flag: &str| {
                Error::new(ErrorKind::Usage, format!("{flag} is for the engine coreml, this one is cpu"))
                    .hint(format!("leave {flag} out, or add --engine coreml on a Mac"))
                    .field("engine", "cpu")
            };
            if options.units.is_some() {
                return Err(only_coreml("--compute-units"));
            }
            if options.timeout.is_some() {
                return Err(only_coreml("--engine-timeout"));
            }
            if is_compiled(path) {
                let message = format!("`{}` is a compiled model, which only Core ML runs", path.display());
                return Err(Error::new(ErrorKind::Unavailable, message)
                    .hint("give the .mlpackage that it was compiled from"));
            }
        }
    }
    Ok(engine)
}

/// The flag of an option that only the executor has.
fn executor_flag(options: &CpuOptions) -> Option<&'static str> {
    let plain = CpuOptions::default();
    if options.numerics != plain.numerics {
        return Some("--numerics");
    }
    if options.weights != plain.weights {
        return Some("--weights");
    }
    options.max_memory.map(|_| "--max-memory")
}

#[cfg(target_os = "macos")]
use crate::apple as coreml;

/// Core ML where there is none.
#[cfg(not(target_os = "macos"))]
mod coreml {
    use super::*;

    pub(super) fn open_prefill(_: &Path, _: EngineOptions) -> Result<Box<dyn Prefill>, Error> {
        Err(elsewhere())
    }

    pub(super) fn open_decode(_: &Path, _: EngineOptions) -> Result<Box<dyn Decode>, Error> {
        Err(elsewhere())
    }

    fn elsewhere() -> Error {
        let os = std::env::consts::OS;
        Error::new(ErrorKind::Unavailable, format!("the engine coreml needs a Mac, this is {os}"))
            .hint("leave --engine out: the CPU executor runs the same package")
            .field("engine", "coreml")
            .field("os", os)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_found_by_name() {
        for engine in [Engine::CoreMl, Engine::Cpu] {
            assert_eq!(engine.name().parse::<Engine>().unwrap(), engine);
        }
        assert_eq!("gpu".parse::<Engine>().unwrap_err().kind().exit_code(), 2);
    }

    #[test]
    fn options_of_the_other_engine_are_refused() {
        let open = |options| open_prefill(Path::new("p.mlpackage"), options).err().map(|e| e.to_string());
        let engine = Some(Engine::Cpu);
        let units = open(EngineOptions { engine, units: Some(Units::All), ..EngineOptions::default() });
        assert!(units.unwrap().contains("--compute-units is for the engine coreml"));
        let timeout = Some(Duration::from_secs(1));
        let refused = open(EngineOptions { engine, timeout, ..EngineOptions::default() });
        assert!(refused.unwrap().contains("--engine-timeout"));
        let compiled = EngineOptions { engine, ..EngineOptions::default() };
        let refused = open_prefill(Path::new("p.mlmodelc"), compiled).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        let (engine, cpu) = (Some(Engine::CoreMl), CpuOptions::default().with_max_memory(Some(1)));
        let refused = open(EngineOptions { engine, cpu, ..EngineOptions::default() });
        assert!(refused.unwrap().contains("--max-memory is for the engine cpu"));
        let units =
            EngineOptions { engine: Some(Engine::Cpu), units: Some(Units::Cpu), ..EngineOptions::default() };
        let refused = open_decode(Path::new("p.mlpackage"), units).err().unwrap();
        assert!(refused.to_string().contains("--compute-units is for the engine coreml"));
    }

    #[test]
    fn a_chain_is_the_executor_s_and_core_ml_s_options_are_refused() {
        let (engine, timeout) = (Some(Engine::CoreMl), Some(Duration::from_secs(1)));
        for (options, flag) in [
            (EngineOptions { engine, ..EngineOptions::default() }, "--engine coreml"),
            (EngineOptions { units: Some(Units::CpuAndNe), ..EngineOptions::default() }, "--compute-units"),
            (EngineOptions { timeout, ..EngineOptions::default() }, "--engine-timeout"),
        ] {
            let refused = open_chain(Path::new("chain.toml"), options).err().unwrap();
            assert_eq!((refused.kind(), refused.kind().exit_code()), (ErrorKind::Usage, 2));
            assert!(refused.to_string().starts_with(&format!("{flag} is not for chains")), "{refused}");
        }
        let engine = Some(Engine::Cpu);
        let missing =
            open_chain(Path::new("none/chain.toml"), EngineOptions { engine, ..EngineOptions::default() });
        assert_eq!(missing.err().unwrap().kind(), ErrorKind::Package);
    }

    #[cfg(not(target_os = "macos"))]
    #[test]
    fn coreml_elsewhere_is_refused_with_the_way_out() {
        let engine = Some(Engine::CoreMl);
        let refused = open_prefill(Path::new("p"), EngineOptions { engine, ..EngineOptions::default() });
        let decode = open_decode(Path::new("p"), EngineOptions { engine, ..EngineOptions::default() });
        for error in [refused.err().unwrap(), decode.err().unwrap()] {
            assert_eq!((error.kind(), error.kind().exit_code()), (ErrorKind::Unavailable, 2));
            assert!(error.to_string().contains(std::env::consts::OS) && error.get_hint().is_some());
        }
    }
}
