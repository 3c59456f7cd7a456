//! Which engine runs a package, or a chain of them.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use kvbaton_runtime::{Patience, Runtime, Session, Units, is_compiled};

use crate::{
    ChainPrefill, CpuDecode, CpuOptions, CpuPrefill, Decode, Error, ErrorKind, Prefill, RuntimeDecode,
    RuntimePrefill, Stated, chain_file,
};

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

/// Somebody who is told, once a second, what is waited for (`m.mlpackage: loading the model`), and for how long already.
pub type Waiting = Arc<dyn Fn(&str, Duration) + Send + Sync>;

/// How to open a package, or a chain of them.
#[derive(Clone, Default)]
pub struct EngineOptions {
    /// The engine; this system's own when absent.
    pub engine: Option<Engine>,
    /// Where Core ML may run it; all units, and fewer when those fail, when absent.
    pub units: Option<Units>,
    /// How the executor runs it.
    pub cpu: CpuOptions,
    /// How long Core ML may take to load a function, its compilation included; twenty minutes when absent.
    pub timeout: Option<Duration>,
    /// How long one prediction of Core ML's may take; five minutes when absent.
    pub prediction_timeout: Option<Duration>,
    /// What the package does not say of itself.
    pub stated: Stated,
    /// Told of long calls.
    pub waiting: Option<Waiting>,
}

impl EngineOptions {
    /// A session of these time limits that tells whoever waits for `package`.
    fn session<R: Runtime>(&self, launched: Session<R>, package: &Path) -> Session<R> {
        let session = launched.with_patience(Patience::chosen(self.timeout, self.prediction_timeout));
        let Some(waiting) = self.waiting.clone() else { return session };
        let name = file_name(package).into_owned();
        session.with_waiting(move |call, waited| waiting(&format!("{name}: {call}"), waited))
    }
}

/// Opens a package, or a chain of them by its file or its folder, with the engine that the options name, or with this
/// system's own. All packages of a chain run on one engine.
///
/// # Errors
///
/// When the engine is not of this system, the options do not fit it, or a package cannot be opened.
pub fn open_prefill(path: &Path, options: EngineOptions) -> Result<Box<dyn Prefill>, Error> {
    match (chosen(path, &options)?, chain_file(path)) {
        (Engine::CoreMl, _) => open_prefill_on(path, options, coreml()?),
        (Engine::Cpu, Some(file)) => Ok(Box::new(ChainPrefill::open(&file, options.cpu, options.stated)?)),
        (Engine::Cpu, None) => {
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
        Engine::CoreMl => open_decode_on(path, options, coreml()?),
        Engine::Cpu => Ok(Box::new(CpuDecode::open(path, &options.cpu)?)),
    }
}

/// Opens a package or a chain on a runtime. `launch` makes the sessions.
pub(crate) fn open_prefill_on<R: Runtime>(
    path: &Path,
    options: EngineOptions,
    launch: impl Fn() -> Session<R>,
) -> Result<Box<dyn Prefill>, Error> {
    let (units, stated) = (options.units, options.stated.clone());
    let session = |package: &Path| options.session(launch(), package);
    match chain_file(path) {
        Some(file) => Ok(Box::new(ChainPrefill::open_on(&file, session, units, stated)?)),
        None => Ok(Box::new(RuntimePrefill::open(session(path), path, units, stated)?)),
    }
}

/// Opens a package that decodes on a runtime.
pub(crate) fn open_decode_on<R: Runtime>(
    path: &Path,
    options: EngineOptions,
    launch: impl Fn() -> Session<R>,
) -> Result<Box<dyn Decode>, Error> {
    let session = options.session(launch(), path);
    Ok(Box::new(RuntimeDecode::open(session, path, options.units)?))
}

/// What a package is called, wherever it lies.
pub(crate) fn file_name(package: &Path) -> Cow<'_, str> {
    package.file_name().unwrap_or(package.as_os_str()).to_string_lossy()
}

/// The engine to open `path` with, if the other options are its own.
fn chosen(path: &Path, options: &EngineOptions) -> Result<Engine, Error> {
    let engine = options.engine.unwrap_or_else(Engine::of_this_system);
    let limits =
        [("--engine-timeout", options.timeout), ("--prediction-timeout", options.prediction_timeout)];
    match engine {
        Engine::CoreMl => {
            if let Some(flag) = executor_flag(&options.cpu) {
                let message = format!("{flag} is for the engine cpu, this one is coreml");
                return Err(Error::new(ErrorKind::Usage, message)
                    .hint(format!("leave {flag} out, or add --engine cpu"))
                    .field("engine", "coreml"));
            }
            if let Some((flag, _)) = limits.iter().find(|(_, limit)| *limit == Some(Duration::ZERO)) {
                let message = format!("{flag} 0 leaves no time for a call");
                return Err(Error::new(ErrorKind::Usage, message));
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
            if let Some((flag, _)) = limits.iter().find(|(_, limit)| limit.is_some()) {
                return Err(only_coreml(flag));
            }
            refuse_compiled(path)?;
        }
    }
    Ok(engine)
}

/// Refuses what the executor cannot read.
pub(crate) fn refuse_compiled(path: &Path) -> Result<(), Error> {
    if !is_compiled(path) {
        return Ok(());
    }
    let message = format!("`{}` is a compiled model, which only Core ML runs", path.display());
    Err(Error::new(ErrorKind::Unavailable, message).hint("give the .mlpackage that it was compiled from"))
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

/// What makes sessions with this Mac's Core ML.
#[cfg(target_os = "macos")]
fn coreml() -> Result<impl Fn() -> Session<kvbaton_coreml::CoreMl>, Error> {
    Ok(crate::apple::session)
}

/// Where there is no Core ML, nothing makes sessions with it.
#[cfg(not(target_os = "macos"))]
fn coreml() -> Result<fn() -> Session<kvbaton_runtime::fake::FakeRuntime>, Error> {
    let os = std::env::consts::OS;
    Err(Error::new(ErrorKind::Unavailable, format!("the engine coreml needs a Mac, this is {os}"))
        .hint("leave --engine out: the CPU executor runs the same package")
        .field("engine", "coreml")
        .field("os", os))
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
        let prediction = EngineOptions { engine, prediction_timeout: timeout, ..EngineOptions::default() };
        assert!(open(prediction).unwrap().contains("--prediction-timeout is for the engine coreml"));
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
    fn a_chain_takes_the_options_of_a_package() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chain.toml"), "format = 1\n[[stage]]\npackage = \"p\"\n").unwrap();
        for path in [folder.path().to_owned(), folder.path().join("chain.toml")] {
            let open = |options| open_prefill(&path, options).err().unwrap();
            let engine = Some(Engine::Cpu);
            let units = EngineOptions { engine, units: Some(Units::All), ..EngineOptions::default() };
            assert!(open(units).to_string().contains("--compute-units is for the engine coreml"));
            let cpu = CpuOptions::default().with_max_memory(Some(1));
            let memory = EngineOptions { engine: Some(Engine::CoreMl), cpu, ..EngineOptions::default() };
            assert!(open(memory).to_string().contains("--max-memory is for the engine cpu"));
            let missing = open(EngineOptions { engine, ..EngineOptions::default() });
            assert_eq!(missing.kind(), ErrorKind::Package, "{missing}");
        }
        assert_eq!(chain_file(Path::new("p.mlpackage")), None);
    }

    #[test]
    fn a_limit_of_no_time_is_refused() {
        let (engine, none) = (Some(Engine::CoreMl), Some(Duration::ZERO));
        for (options, flag) in [
            (EngineOptions { engine, timeout: none, ..EngineOptions::default() }, "--engine-timeout 0"),
            (
                EngineOptions { engine, prediction_timeout: none, ..EngineOptions::default() },
                "--prediction-timeout 0",
            ),
        ] {
            let refused = open_prefill(Path::new("p.mlpackage"), options).err().unwrap();
            assert_eq!(refused.kind(), ErrorKind::Usage);
            assert!(refused.to_string().starts_with(flag), "{refused}");
        }
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
