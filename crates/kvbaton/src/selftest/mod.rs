//! `kvbaton selftest`: what this machine does, asked of the machine itself.
//!
//! Much of what is known of Core ML was read, and some of it contradicts itself. So nothing rests on it: the code asks
//! or measures, and this module writes down what came out. Each probe of a runtime is generic, and runs against the
//! fake one on every system; on a Mac the same probes run against Core ML. What could not be asked here is listed with
//! the reason.

mod handoffs;
mod inverse;
mod packages;
mod runtime;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[cfg(target_os = "macos")]
use kvbaton_runtime::Patience;
use kvbaton_runtime::Session;
use kvbaton_runtime::fake::{FakeRuntime, Habits, Tally};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::bench::Machine;
use crate::fake::executed;
use crate::{Error, Stated};
use packages::Packages;

pub use inverse::{WrittenInto, write_into};

/// What to test.
pub struct Selftest {
    /// A package of the user's; the miniature that selftest carries when absent.
    pub package: Option<PathBuf>,
    /// What that package does not say of itself.
    pub stated: Stated,
    /// Hand-offs in a row.
    pub rounds: usize,
    /// Contexts whose hand-off is timed.
    pub contexts: Vec<usize>,
    /// Threads; 0 takes all cores.
    pub threads: usize,
    /// How long Core ML may take to load a function.
    pub timeout: Option<Duration>,
    /// How long one prediction of Core ML's may take.
    pub prediction_timeout: Option<Duration>,
}

/// How a probe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// What must hold does; or something was to be found out, and was.
    Pass,
    /// What must hold does not.
    Fail,
    /// It could not be asked here.
    NotRun,
}

/// One question, and what came out.
#[derive(Clone, Debug, Serialize)]
pub struct Probe {
    /// `executor`, `fake`, `coreml`, `handoff` or `mlx`.
    pub group: String,
    /// What was asked.
    pub name: String,
    /// How it ended.
    pub status: Status,
    /// Why it failed or was not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
    /// What was found, by name.
    pub found: Map<String, Value>,
    /// How long it took.
    pub seconds: f64,
}

/// Everything that was asked.
#[derive(Clone, Debug, Serialize)]
pub struct SelftestReport {
    /// `fail` when a probe failed, else `incomplete` when one was not run, else `pass`.
    pub verdict: &'static str,
    /// The machine.
    pub machine: Machine,
    /// The package.
    pub package: String,
    /// The probes, in the order they ran.
    pub probes: Vec<Probe>,
}

/// What a probe found, or why it failed.
pub type Found = Result<Map<String, Value>, Failed>;

/// A probe that failed, with what it had found until then.
#[derive(Clone, Debug)]
pub struct Failed {
    /// Why.
    pub because: String,
    /// What was found.
    pub found: Map<String, Value>,
}

impl<E: std::error::Error> From<E> for Failed {
    fn from(error: E) -> Failed {
        Failed { because: error.to_string(), found: Map::new() }
    }
}

/// Told of a probe before it runs: all that are done, its group, and its name.
pub type Progress<'a> = dyn FnMut(&[Probe], &str, &str) + 'a;

/// Runs probes and keeps what they find.
pub struct Probes<'a> {
    done: Vec<Probe>,
    progress: &'a mut Progress<'a>,
}

impl<'a> Probes<'a> {
    /// No probes yet. `progress` is told of each one before it runs: a probe may end the process.
    pub fn new(progress: &'a mut Progress<'a>) -> Probes<'a> {
        Probes { done: Vec::new(), progress }
    }

    /// Runs one.
    pub fn run(&mut self, group: &str, name: &str, probe: impl FnOnce() -> Found) {
        (self.progress)(&self.done, group, name);
        let start = Instant::now();
        let (status, because, found) = match probe() {
            Ok(found) => (Status::Pass, None, found),
            Err(failed) => (Status::Fail, Some(failed.because), failed.found),
        };
        let seconds = start.elapsed().as_secs_f64();
        self.done.push(Probe {
            group: group.to_owned(),
            name: name.to_owned(),
            status,
            because,
            found,
            seconds,
        });
    }

    /// Lists one that cannot be asked here.
    pub fn not_run(&mut self, group: &str, name: &str, because: impl Into<String>) {
        self.done.push(Probe {
            group: group.to_owned(),
            name: name.to_owned(),
            status: Status::NotRun,
            because: Some(because.into()),
            found: Map::new(),
            seconds: 0.0,
        });
    }

    /// The report of all that ran.
    pub fn report(self, package: Option<&PathBuf>) -> SelftestReport {
        SelftestReport::of(self.done, Machine::here(), package)
    }
}

/// Runs every probe that needs no decoder.
///
/// # Errors
///
/// When the packages that it carries cannot be unpacked. A probe that fails is in the report, not an error. What was
/// unpacked, and compiled, is gone when this returns.
pub fn selftest(what: &Selftest, probes: &mut Probes<'_>) -> Result<(), Error> {
    let packages = Packages::unpack()?;
    let package = what.package.as_ref().unwrap_or(&packages.prefill);
    handoffs::executor(what, package, probes);

    // Two fakes that differ where the sources differ: whatever Core ML does, one of them has done it here.
    let strict = Habits { row_align_bytes: 64, ..Habits::default() };
    let lenient = Habits { refuses_locked: false, refuses_inputs: false, ..Habits::default() };
    for (group, habits) in [("fake", strict), ("fake, lenient", lenient)] {
        runtime::probe(group, || fake_session(habits.clone()), what, &packages, probes);
    }
    handoffs::injected_failures(what, &packages, probes);
    coreml(what, &packages, probes);
    handoffs::cost(what, probes);
    Ok(())
}

/// A session with a fake that runs packages.
fn fake_session(habits: Habits) -> Session<FakeRuntime> {
    let programs = executed(1);
    Session::new(move || {
        FakeRuntime::new(habits.clone(), Arc::new(Tally::default())).computing(programs.clone())
    })
}

#[cfg(target_os = "macos")]
fn coreml(what: &Selftest, packages: &Packages, probes: &mut Probes<'_>) {
    let patience = Patience::chosen(what.timeout, what.prediction_timeout);
    runtime::probe("coreml", || crate::apple::session().with_patience(patience), what, packages, probes);
}

#[cfg(not(target_os = "macos"))]
fn coreml(_what: &Selftest, _packages: &Packages, probes: &mut Probes<'_>) {
    for name in runtime::NAMES {
        probes.not_run("coreml", name, format!("needs macOS, this is {}", std::env::consts::OS));
    }
}

impl SelftestReport {
    fn of(probes: Vec<Probe>, machine: Machine, package: Option<&PathBuf>) -> SelftestReport {
        let has = |status: Status| probes.iter().any(|p| p.status == status);
        let verdict = match (has(Status::Fail), has(Status::NotRun)) {
            (true, _) => "fail",
            (false, true) => "incomplete",
            (false, false) => "pass",
        };
        let package =
            package.map_or_else(|| "a prefill in miniature".to_owned(), |p| p.display().to_string());
        SelftestReport { verdict, machine, package, probes }
    }

    /// The report of a run that is under way, to be left behind if the next probe, `name` of `group`, ends the process.
    pub fn until(
        done: &[Probe],
        (group, name): (&str, &str),
        machine: &Machine,
        package: Option<&PathBuf>,
    ) -> SelftestReport {
        let mut probes = done.to_vec();
        probes.push(Probe {
            group: group.to_owned(),
            name: name.to_owned(),
            status: Status::Fail,
            because: Some("it never ended: the process did, or was ended".to_owned()),
            found: Map::new(),
            seconds: 0.0,
        });
        SelftestReport::of(probes, machine.clone(), package)
    }

    /// The report as one Markdown file, the JSON document in it: to read, and to attach.
    pub fn to_markdown(&self) -> String {
        let machine = &self.machine;
        let mut text = format!(
            "# kvbaton selftest: {}\n\nkvbaton {}, {} {} on {}, {}, {} cores; package: {}\n\n\
             | group | probe | status | seconds | found |\n|---|---|---|---|---|\n",
            self.verdict,
            machine.kvbaton,
            machine.os,
            machine.os_version.as_deref().unwrap_or("of unknown version"),
            machine.arch,
            machine.cpu,
            machine.cores,
            self.package
        );
        for probe in &self.probes {
            let status = match probe.status {
                Status::Pass => "pass",
                Status::Fail => "**fail**",
                Status::NotRun => "not run",
            };
            let mut found: Vec<String> = probe.because.iter().cloned().collect();
            found.extend(probe.found.iter().map(|(name, value)| match value {
                Value::String(text) => format!("{name}: {text}"),
                other => format!("{name}: {other}"),
            }));
            let found = found.join("; ").replace('|', "\\|").replace('\n', " ");
            let (group, name, seconds) = (&probe.group, &probe.name, probe.seconds);
            text.push_str(&format!("| {group} | {name} | {status} | {seconds:.2} | {found} |\n"));
        }
        let json = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push_str(&format!("\n<details><summary>JSON</summary>\n\n```json\n{json}\n```\n\n</details>\n"));
        text
    }
}

/// An object of what was found.
macro_rules! found {
    ($($name:literal: $value:expr),* $(,)?) => {{
        let mut found = serde_json::Map::new();
        $(found.insert($name.to_owned(), serde_json::json!($value));)*
        found
    }};
}
pub(crate) use found;

/// A failure with what was found.
pub(crate) fn failed<T>(because: impl Into<String>, found: Map<String, Value>) -> Result<T, Failed> {
    Err(Failed { because: because.into(), found })
}

#[cfg(test)]
mod tests;
