//! Chains on the executor, and on the fake runtime with the executor behind its calls: both give the same bits, and what
//! fails in one package is that package's, and leaves nothing behind.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvbaton_layout::Part;
use kvbaton_runtime::fake::{FakeRuntime, Habits, Tally};
use kvbaton_runtime::{CompiledFeature, CompiledFunction, Patience};

use super::*;
use crate::described::Described;
use crate::fake::{executed, open_on_runtime};
use crate::{CpuOptions, CpuPrefill, EngineOptions};

/// A chain that gives its packages the past as inputs, and one whose packages keep it in states.
const CHAINS: [&str; 2] = ["chain", "states"];

fn testdata(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

fn file(chain: &str) -> PathBuf {
    chain_file(&testdata(chain)).unwrap()
}

/// What the packages of `states` do not say of themselves.
fn stated() -> Stated {
    let package = CpuPrefill::open(&testdata("prefill.mlpackage"), 1).unwrap();
    Stated { layout: None, model: package.model().cloned() }
}

fn on_executor(chain: &str) -> ChainPrefill {
    ChainPrefill::open(&file(chain), CpuOptions::with_threads(1), stated()).unwrap()
}

/// A chain on fake runtimes.
struct Rig {
    engine: ChainPrefill,
    /// What each package's runtime counts, by the package's name.
    tallies: BTreeMap<String, Arc<Tally>>,
}

impl Rig {
    /// `habits` are those of the package that is named.
    fn with(chain: &str, units: Option<Units>, patience: Patience, habits: impl Fn(&str) -> Habits) -> Rig {
        let tallies = RefCell::new(BTreeMap::new());
        let session = |package: &Path| {
            let name = package.file_name().unwrap().to_str().unwrap();
            let (habits, tally, programs) = (habits(name), Arc::new(Tally::default()), executed(1));
            tallies.borrow_mut().insert(name.to_owned(), tally.clone());
            let launch = move || FakeRuntime::new(habits.clone(), tally.clone()).computing(programs.clone());
            Session::new(launch).with_patience(patience)
        };
        let engine = ChainPrefill::open_on(&file(chain), session, units, stated()).unwrap();
        Rig { engine, tallies: tallies.into_inner() }
    }

    fn new(chain: &str, habits: impl Fn(&str) -> Habits) -> Rig {
        Rig::with(chain, None, Patience::default(), habits)
    }

    /// Nobody holds a lock, and no rule was broken.
    fn check(&self, when: &str) {
        for (name, tally) in &self.tallies {
            let left = (tally.locks.load(Ordering::SeqCst), tally.violations.load(Ordering::SeqCst));
            assert_eq!(left, (0, 0), "locks and broken rules of {name}, {when}");
            assert!(tally.states.load(Ordering::SeqCst) <= 1, "states of {name}, {when}");
        }
    }
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens).map(|i| u32::try_from((7 * i * i + 3 * i + 5) % 48).unwrap()).collect()
}

/// Every row of every layer, as bytes in the canonical order, and the logits.
fn left(done: &Prefilled) -> (Vec<Vec<u8>>, Option<Vec<f32>>) {
    let layers = done.cache.cache().layers.len();
    let parts = (0..layers).flat_map(|layer| [Part::Key, Part::Value].map(|part| (layer, part)));
    let rows = parts.map(|(layer, part)| done.cache.canonical(layer, part).unwrap().0);
    (rows.collect(), done.logits.as_ref().map(|l| l.values.clone()))
}

#[test]
fn both_engines_leave_the_same_rows_and_logits() {
    for chain in CHAINS {
        let mut executor = on_executor(chain);
        for (row_align_bytes, ignores_backings) in [(0, false), (96, false), (64, true)] {
            let habits = |_: &str| Habits { row_align_bytes, ignores_backings, ..Habits::default() };
            let Rig { mut engine, tallies } = Rig::new(chain, habits);
            assert_eq!((engine.engine(), executor.engine()), ("fake", "cpu"));
            assert_eq!(engine.longest_prompt(), 32);
            for tokens in [1, 5, 8, 9, 16, 21, 32] {
                let prompt = prompt(tokens);
                engine.prepare(tokens).unwrap();
                let (own, expected) = (engine.prefill(&prompt).unwrap(), executor.prefill(&prompt).unwrap());
                assert!(left(&own) == left(&expected), "{chain}, {tokens} tokens, {row_align_bytes} bytes");
                assert_eq!(own.cache.tokens(), Some(&prompt[..]));
                assert_eq!((own.report.engine.as_str(), own.report.tokens), ("fake", tokens));
                assert_eq!(own.report.function, expected.report.function);
                assert_eq!(own.report.compute_units.as_deref(), Some("all"));
                assert_eq!(expected.report.compute_units, None);
            }
            Rig { engine, tallies }.check(chain);
        }
    }
}

#[test]
fn a_chain_leaves_what_the_package_leaves_that_was_split() {
    let mut whole = CpuPrefill::open(&testdata("prefill.mlpackage"), 1).unwrap();
    let mut chain = Rig::new("chain", |_| Habits::default()).engine;
    for tokens in [1, 8] {
        let prompt = prompt(tokens);
        let (own, expected) = (chain.prefill(&prompt).unwrap(), whole.prefill(&prompt).unwrap());
        assert!(left(&own) == left(&expected), "{tokens} tokens");
    }
}

/// Core ML's description of a package, beside a copy of the package, which the executor behind the fake reads.
fn compile(package: &Path, to: &Path) {
    for file in
        ["Manifest.json", "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"]
    {
        std::fs::create_dir_all(to.join(file).parent().unwrap()).unwrap();
        std::fs::copy(package.join(file), to.join(file)).unwrap();
    }
    let described = Described::read(package).unwrap();
    let schema = |features: &[CompiledFeature]| -> Vec<serde_json::Value> {
        let one = |f: &CompiledFeature| {
            serde_json::json!({
                "name": f.name, "dataType": format!("{:?}", f.element), "shape": format!("{:?}", f.shape),
            })
        };
        features.iter().map(one).collect()
    };
    let function = |(name, f): (&String, &CompiledFunction)| {
        serde_json::json!({
            "name": name, "inputSchema": schema(&f.inputs), "outputSchema": schema(&f.outputs),
            "stateSchema": schema(&f.states),
        })
    };
    let functions: Vec<serde_json::Value> = described.functions.iter().map(function).collect();
    let document = serde_json::json!([{"userDefinedMetadata": described.metadata, "functions": functions}]);
    std::fs::write(to.join("metadata.json"), document.to_string()).unwrap();
}

#[test]
fn a_chain_of_compiled_models_is_the_chain_that_they_were_compiled_from() {
    let folder = tempfile::tempdir().unwrap();
    let mut text = "format = 1\n".to_owned();
    for part in ["part_0", "part_1"] {
        let package = testdata("chain").join(format!("{part}.mlpackage"));
        compile(&package, &folder.path().join(format!("{part}.mlmodelc")));
        text.push_str(&format!("[[stage]]\npackage = \"{part}.mlmodelc\"\n"));
    }
    std::fs::write(folder.path().join("chain.toml"), text).unwrap();
    let refused = ChainPrefill::open(&folder.path().join("chain.toml"), CpuOptions::default(), stated());
    assert!(refused.err().unwrap().to_string().contains("part_0.mlmodelc` is a compiled model"));
    let options = EngineOptions { cpu: CpuOptions::with_threads(1), ..EngineOptions::default() };
    let mut engine = open_on_runtime(folder.path(), Habits::default(), options).unwrap();
    for tokens in [5, 20] {
        let own = engine.prefill(&prompt(tokens)).unwrap();
        assert!(left(&own) == left(&on_executor("chain").prefill(&prompt(tokens)).unwrap()));
    }
}

#[test]
fn what_is_lent_is_refused_to_the_next_prompt_until_it_is_given_back() {
    let mut engine = Rig::new("chain", |_| Habits::default()).engine;
    let held = engine.prefill(&prompt(5)).unwrap();
    let rows = left(&held);
    assert_eq!(engine.prefill(&prompt(4)).unwrap_err().kind(), ErrorKind::Lease);
    assert!(left(&held) == rows);
    drop(held);
    // Chunks are copied to their place: their cache is nobody's buffer.
    let first = engine.prefill(&prompt(12)).unwrap();
    let rows = left(&first);
    engine.prefill(&prompt(20)).unwrap();
    assert!(left(&first) == rows);
}

#[test]
fn a_failure_at_every_call_of_every_package_names_it_and_leaves_nothing_behind() {
    for chain in CHAINS {
        let prompt = prompt(12);
        let mut good = Rig::new(chain, |_| Habits::default());
        let expected = left(&good.engine.prefill(&prompt).unwrap());
        for (name, tally) in &good.tallies {
            for failing in 0..tally.calls.load(Ordering::SeqCst) {
                let habits = |package: &str| {
                    let fails_at_calls = if package == name { vec![failing] } else { Vec::new() };
                    Habits { fails_at_calls, ..Habits::default() }
                };
                let mut rig = Rig::new(chain, habits);
                let when = format!("call {failing} of {name}");
                match rig.engine.prefill(&prompt) {
                    // A plan that cannot be read, units that can be replaced, and one surface are no failures.
                    Ok(done) => assert!(left(&done) == expected, "{when}"),
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains("as it was told to") && text.contains(name), "{when}: {text}");
                        assert!(error.fields()["package"].as_str().unwrap().ends_with(name), "{when}");
                    }
                }
                rig.check(&when);
                assert!(left(&rig.engine.prefill(&prompt).unwrap()) == expected, "after {when}");
                rig.check(&when);
            }
        }
    }
}

#[test]
fn a_failure_in_the_middle_of_a_prompt_ends_what_is_streamed() {
    let fails = |name: &str| {
        let fails_at = if name == "part_1.mlpackage" { vec![1] } else { Vec::new() };
        Habits { fails_at, ..Habits::default() }
    };
    let mut engine = Rig::new("chain", fails).engine;
    let mut shown = Vec::new();
    let failed = engine.prefill_streamed(&prompt(20), &mut |_, rows| {
        shown.push(rows);
        Ok(())
    });
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Program);
    assert_eq!(
        shown,
        std::slice::from_ref(&(0..8)),
        "the rows of the chunk that failed are told of to nobody"
    );
    shown.clear();
    let done = engine.prefill_streamed(&prompt(20), &mut |_, rows| {
        shown.push(rows);
        Ok(())
    });
    assert_eq!((shown.as_slice(), done.unwrap().cache.tokens_seen()), (&[0..8, 8..16, 16..20][..], 20));
    assert_eq!(engine.chunk_times().len(), 3);
}

#[test]
fn a_package_that_hangs_is_named_with_its_limit_and_the_chain_goes_on() {
    for (chain, package, function) in
        [("chain", "part_1.mlpackage", "prefill_8_of_32"), ("states", "chunk_0.mlpackage", "prefill")]
    {
        let (prompt, hang) = (prompt(12), Duration::from_millis(700));
        let expected = left(&on_executor(chain).prefill(&prompt).unwrap());
        let patience = Patience { predict: Duration::from_millis(250), ..Patience::default() };
        let mut rig = Rig::with(chain, None, patience, |name| {
            let hangs_at = if name == package { vec![1] } else { Vec::new() };
            Habits { hangs_at, hang, ..Habits::default() }
        });
        let error = rig.engine.prefill(&prompt).unwrap_err();
        let text = error.to_string();
        let start = format!("the prediction did not return within 0.25 s (function `{function}` of `");
        assert!(text.starts_with(&start) && text.contains(package), "{text}");
        assert!(error.get_hint().unwrap().contains("--prediction-timeout"));
        assert!(left(&rig.engine.prefill(&prompt).unwrap()) == expected, "{chain}");
        std::thread::sleep(hang);
        rig.check(chain);
        assert!(left(&rig.engine.prefill(&prompt).unwrap()) == expected, "{chain}");
    }
}

#[test]
fn a_package_that_does_not_load_in_time_runs_elsewhere_and_the_report_says_which() {
    let hang = Duration::from_millis(400);
    let patience = Patience { load: Duration::from_millis(150), ..Patience::default() };
    let habits = |name: &str| {
        let hangs_loading = if name == "part_1.mlpackage" { vec![Units::All] } else { Vec::new() };
        Habits { hangs_loading, hang, ..Habits::default() }
    };
    let report = Rig::with("chain", None, patience, habits).engine.prefill(&prompt(5)).unwrap().report;
    assert_eq!(report.compute_units.as_deref(), Some("all, cpu-and-gpu"));
    let said = "part_1.mlpackage: compute units all: loading the model did not return within 0.15 s";
    assert!(report.notes.iter().any(|n| n == said), "{:?}", report.notes);
    // Units that somebody asked for are not replaced.
    let mut asked = Rig::with("chain", Some(Units::All), patience, habits).engine;
    let error = asked.prepare(5).unwrap_err();
    assert!(error.to_string().contains("part_1.mlpackage"), "{error}");
    assert!(error.get_hint().unwrap().contains("--engine-timeout"));
}

#[test]
fn a_chain_is_opened_on_a_runtime_with_its_options() {
    let (heard, hearing) = std::sync::mpsc::channel();
    let heard = std::sync::Mutex::new(heard);
    let options = || EngineOptions {
        units: Some(Units::CpuAndGpu),
        prediction_timeout: Some(Duration::from_millis(200)),
        cpu: CpuOptions::with_threads(1),
        ..EngineOptions::default()
    };
    let hang = Duration::from_millis(1200);
    let slow = Habits { hangs_loading: vec![Units::CpuAndGpu], hang, ..Habits::default() };
    let waiting: crate::Waiting =
        Arc::new(move |what: &str, _| heard.lock().unwrap().send(what.to_owned()).unwrap());
    let mut engine =
        open_on_runtime(&testdata("chain"), slow, EngineOptions { waiting: Some(waiting), ..options() })
            .unwrap();
    let report = engine.prefill(&prompt(3)).unwrap().report;
    assert_eq!((report.engine.as_str(), report.compute_units.as_deref()), ("fake", Some("cpu-and-gpu")));
    let heard: Vec<String> = hearing.try_iter().collect();
    let loading = |package: &str| format!("{package}: loading the model");
    assert_eq!(heard, [loading("part_0.mlpackage"), loading("part_1.mlpackage")]);
    let hangs = Habits { hangs_at: vec![0], hang: Duration::from_millis(600), ..Habits::default() };
    let mut engine = open_on_runtime(&testdata("chain"), hangs, options()).unwrap();
    let error = engine.prefill(&prompt(3)).unwrap_err().to_string();
    assert!(error.contains("within 0.2 s") && error.contains("part_0.mlpackage"), "{error}");
}
