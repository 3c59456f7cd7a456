//! Which engine runs a package.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use kvbaton_runtime::{Call, Units, is_compiled};

use crate::{CpuOptions, CpuPrefill, Error, ErrorKind, Prefill, Stated};

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
    let engine = options.engine.unwrap_or_else(Engine::of_this_system);
    match engine {
        Engine::CoreMl => open_coreml(path, options),
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
            let prefill = CpuPrefill::open_stated(path, options.cpu.threads, options.stated)?;
            Ok(Box::new(prefill.with_options(options.cpu)))
        }
    }
}

#[cfg(target_os = "macos")]
fn open_coreml(path: &Path, options: EngineOptions) -> Result<Box<dyn Prefill>, Error> {
    let session = crate::apple::session(options.timeout, options.waiting);
    Ok(Box::new(crate::RuntimePrefill::open(session, path, options.units, options.stated)?))
}

#[cfg(not(target_os = "macos"))]
fn open_coreml(_path: &Path, _options: EngineOptions) -> Result<Box<dyn Prefill>, Error> {
    Err(Error::new(
        ErrorKind::Unavailable,
        format!("the engine coreml needs a Mac, this is {}", std::env::consts::OS),
    )
    .hint("leave --engine out: the CPU executor runs the same package")
    .field("engine", "coreml")
    .field("os", std::env::consts::OS))
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
    }

    #[cfg(not(target_os = "macos"))]
    #[test]
    fn coreml_elsewhere_is_refused_with_the_way_out() {
        let engine = Some(Engine::CoreMl);
        let refused = open_prefill(Path::new("p"), EngineOptions { engine, ..EngineOptions::default() });
        let error = refused.err().unwrap();
        assert_eq!((error.kind(), error.kind().exit_code()), (ErrorKind::Unavailable, 2));
        assert!(error.to_string().contains(std::env::consts::OS) && error.get_hint().is_some());
    }
}
