//! Decoding with the fake runtime in Core ML's place, the executor behind its calls.

use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use kvbaton_memory::Buffer;
use kvbaton_runtime::Patience;
use kvbaton_runtime::fake::{FakeRuntime, Habits, Tally};
use proptest::prelude::*;

use super::*;
use crate::fake::executed;
use crate::{CpuDecode, CpuOptions, CpuPrefill, Prefill, RuntimePrefill};

fn package(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)
}

struct Rig {
    engine: RuntimeDecode<FakeRuntime>,
    tally: Arc<Tally>,
}

fn session(habits: Habits, tally: &Arc<Tally>) -> Session<FakeRuntime> {
    let counted = tally.clone();
    Session::new(move || FakeRuntime::new(habits.clone(), counted.clone()).computing(executed(1)))
}

fn try_rig(habits: Habits) -> Result<Rig, Error> {
    let tally = Arc::new(Tally::default());
    let engine = RuntimeDecode::open(session(habits, &tally), &package("decode.mlpackage"), None)?;
    Ok(Rig { engine, tally })
}

fn rig(habits: Habits) -> Rig {
    try_rig(habits).unwrap()
}

fn executor() -> CpuDecode {
    CpuDecode::open(&package("decode.mlpackage"), &CpuOptions::with_threads(1)).unwrap()
}

/// What the executor prefills.
fn view(tokens: &[u32]) -> CacheView {
    static PREFILL: LazyLock<Mutex<CpuPrefill>> =
        LazyLock::new(|| Mutex::new(CpuPrefill::open(&package("prefill.mlpackage"), 1).unwrap()));
    PREFILL.lock().unwrap().prefill(tokens).unwrap().cache
}

fn one() -> Threads {
    Threads::new(1)
}

/// Logits of the executor's steps after the prompt.
fn expected(prompt: &[u32], steps: &[u32]) -> Vec<Logits> {
    let mut engine = executor();
    if !prompt.is_empty() {
        engine.receive(&view(prompt), &one()).unwrap();
    }
    steps.iter().map(|&token| engine.step(token).unwrap()).collect()
}

#[test]
fn steps_after_a_hand_off_are_the_executor_s() {
    let (prompt, steps) = ([5, 9, 1, 33, 7], [2, 40, 11, 3]);
    for row_align_bytes in [0, 96] {
        let mut engine = rig(Habits { row_align_bytes, ..Habits::default() }).engine;
        let report = engine.receive(&view(&prompt), &one()).unwrap();
        // Keys and values of two layers, two heads of 32 lanes, in float16.
        assert_eq!((report.rows, report.bytes), (5, 5 * 2 * 2 * 2 * 32 * 2));
        for (step, logits) in steps.iter().zip(expected(&prompt, &steps)) {
            assert_eq!(engine.step(*step).unwrap(), logits, "rows on multiples of {row_align_bytes}");
        }
        assert_eq!((engine.tokens_seen(), engine.capacity()), (9, 32));
        assert_eq!(engine.compute_units(), Some(Units::All));
        // What comes out again is what went in, and the rows of the steps.
        let mut other = executor();
        other.receive(&view(&prompt), &one()).unwrap();
        steps.iter().for_each(|&token| drop(other.step(token).unwrap()));
        assert_eq!(engine.cache().unwrap().bytes(), other.cache().unwrap().bytes());
    }
}

#[test]
fn both_legs_on_one_kind_of_runtime_hand_over_and_let_go() {
    let (prompt, steps) = ([1, 2, 3], [4, 5]);
    let tally = Arc::new(Tally::default());
    let habits = Habits { row_align_bytes: 96, ..Habits::default() };
    let session = session(habits.clone(), &tally);
    let path = package("prefill.mlpackage");
    let mut prefill = RuntimePrefill::open(session, &path, None, Stated::default()).unwrap();
    let Rig { mut engine, tally: decoding } = rig(habits);
    let cache = prefill.prefill(&prompt).unwrap().cache;
    engine.receive(&cache, &one()).unwrap();
    // The hand-off keeps no view: the producer's buffers are free as soon as this one is gone.
    drop(cache);
    assert_eq!(prefill.counts().lent, 0);
    for (step, logits) in steps.iter().zip(expected(&prompt, &steps)) {
        assert_eq!(engine.step(*step).unwrap(), logits);
    }
    assert_eq!(decoding.states.load(Ordering::SeqCst), 1);
    drop(engine);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(decoding.states.load(Ordering::SeqCst), 0);
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_seen() {
    let mut engine = rig(Habits::default()).engine;
    for token in 0..32 {
        engine.step(token).unwrap();
    }
    let full = engine.step(1).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Capacity);
    assert!(full.to_string().contains("33 tokens") && full.to_string().contains("32"), "{full}");
    engine.clear().unwrap();
    assert_eq!(engine.step(48).unwrap_err().kind(), ErrorKind::Usage);
    // A cache of another geometry.
    let layout = kvbaton_layout::presets::get("kvbaton-stacked").unwrap();
    let cache = kvbaton_layout::CacheSpec::full(2, 2, 16);
    let shape = [2, 2, 8, 16];
    let tensors = ["key_cache", "value_cache"].map(|name| Tensor {
        info: TensorInfo::contiguous(name, kvbaton_layout::DType::Float16, &shape),
        bytes: Bytes::new(Buffer::zeroed(2 * shape.iter().product::<usize>())),
    });
    let other = CacheView::new(layout, cache, tensors.into(), LiveRows::seen(3)).unwrap();
    let refused = engine.receive(&other, &one()).unwrap_err();
    assert_eq!((refused.kind().exit_code(), engine.tokens_seen()), (2, 0), "{refused}");
    assert_eq!(engine.step(3).unwrap(), expected(&[], &[3])[0]);
    // A package that prefills.
    let session = session(Habits::default(), &Arc::default());
    let refused = RuntimeDecode::open(session, &package("prefill.mlpackage"), None).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Package);
}

#[test]
fn a_system_without_states_is_not_asked_for_one() {
    let Err(refused) = try_rig(Habits { version: (14, 6), ..Habits::default() }) else {
        panic!("macOS 14 has no states");
    };
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.to_string().starts_with("a state needs macOS 15.0, this is 14.6"), "{refused}");
}

#[test]
fn a_failure_at_every_call_of_a_hand_off_and_two_steps_is_seen_and_recovered_from() {
    let (prompt, steps) = ([5, 9, 1], [2, 40]);
    let (source, want) = (view(&prompt), expected(&prompt, &steps));
    let run = |engine: &mut RuntimeDecode<FakeRuntime>| -> Result<Vec<Logits>, Error> {
        engine.receive(&source, &one())?;
        steps.iter().map(|&token| engine.step(token)).collect()
    };
    let mut whole = rig(Habits::default());
    let opened = whole.tally.calls.load(Ordering::SeqCst);
    assert_eq!(run(&mut whole.engine).unwrap(), want);
    let calls = whole.tally.calls.load(Ordering::SeqCst);
    for failing in 0..calls {
        let rig = match try_rig(Habits { fails_at_calls: vec![failing], ..Habits::default() }) {
            Ok(rig) => rig,
            Err(error) => {
                assert!(failing < opened && error.to_string().contains("as it was told to"), "{error}");
                continue;
            }
        };
        let Rig { mut engine, tally } = rig;
        // A plan that cannot be read is no failure, nor is one surface.
        if let Err(error) = run(&mut engine) {
            assert!(error.to_string().contains("as it was told to"), "call {failing}: {error}");
        }
        let counts = engine.counts();
        assert_eq!(counts, Counts { free: counts.free, ..Counts::default() }, "call {failing}");
        // The next hand-off is as if nothing had been.
        assert_eq!(run(&mut engine).unwrap(), want, "call {failing}");
        assert_eq!(tally.states.load(Ordering::SeqCst), 1, "call {failing}");
        assert_eq!((tally.locks.load(Ordering::SeqCst), tally.violations.load(Ordering::SeqCst)), (0, 0));
    }
}

#[test]
fn a_state_that_a_failed_step_had_is_never_read_again() {
    let mut engine = rig(Habits { fails_at: vec![1], ..Habits::default() }).engine;
    engine.step(1).unwrap();
    assert!(engine.step(2).unwrap_err().to_string().contains("as it was told to"));
    for refused in [engine.step(2).unwrap_err(), engine.cache().unwrap_err()] {
        assert_eq!(refused.kind(), ErrorKind::Program);
        assert!(refused.to_string().starts_with("the state is gone"), "{refused}");
        assert!(refused.get_hint().is_some());
    }
    engine.clear().unwrap();
    assert_eq!(engine.step(1).unwrap(), expected(&[], &[1])[0]);
}

#[test]
fn a_step_that_hangs_takes_its_state_along() {
    let tally = Arc::new(Tally::default());
    let hang = Duration::from_millis(600);
    let patience = Patience { predict: Duration::from_millis(150), ..Patience::default() };
    let session =
        session(Habits { hangs_at: vec![0], hang, ..Habits::default() }, &tally).with_patience(patience);
    let mut engine = RuntimeDecode::open(session, &package("decode.mlpackage"), None).unwrap();
    let hung = engine.step(1).unwrap_err().to_string();
    assert!(
        hung.starts_with("the prediction did not return within 0.15 s (function `decode` of `"),
        "{hung}"
    );
    assert!(hung.contains("decode.mlpackage"), "{hung}");
    assert!(engine.step(1).unwrap_err().to_string().starts_with("the state is gone"));
    engine.clear().unwrap();
    assert_eq!(engine.step(1).unwrap(), expected(&[], &[1])[0]);
    std::thread::sleep(2 * hang);
    assert_eq!(tally.states.load(Ordering::SeqCst), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Hand-offs, steps, reads and fresh starts in any order, with failures at any call: what succeeds is what the
    /// executor says, and what is not certain is refused.
    #[test]
    fn random_schedules_of_steps(
        moves in prop::collection::vec((0usize..6, 0u32..48), 1..24),
        row_align_bytes in prop::sample::select(vec![0, 96]),
        ignores_backings: bool,
        fails_percent in 0u64..8,
        seed: u64,
    ) {
        let mut habits = Habits { row_align_bytes, ignores_backings, seed, ..Habits::default() };
        let mut tries = 0;
        habits.fails_percent = fails_percent;
        let Rig { mut engine, tally } = loop {
            match try_rig(habits.clone()) {
                Ok(rig) => break rig,
                Err(_) => { tries += 1; habits.seed = seed.wrapping_add(tries); }
            }
        };
        let mut oracle = executor();
        let mut certain = true;
        for (what, token) in moves {
            let outcome = match what {
                0 => {
                    let source = view(&[token, 3, 4]);
                    let done = engine.receive(&source, &one()).map(|_| ());
                    oracle.clear().unwrap();
                    if done.is_ok() { oracle.receive(&source, &one()).unwrap(); }
                    certain = done.is_ok();
                    done
                }
                1 => {
                    let done = engine.clear();
                    oracle.clear().unwrap();
                    certain = done.is_ok();
                    done
                }
                2 => engine.cache().map(|cache| assert_eq!(cache.bytes(), oracle.cache().unwrap().bytes())),
                _ => match engine.step(token) {
                    Ok(logits) => {
                        prop_assert!(certain);
                        prop_assert_eq!(logits, oracle.step(token).unwrap());
                        Ok(())
                    }
                    Err(error) => Err(error),
                },
            };
            if let Err(error) = outcome {
                prop_assert!(fails_percent > 0, "{}", error);
                // A failed hand-off has seen nothing; whether the state of a failed step is there is the engine's to know.
                if !certain && what < 2 {
                    prop_assert_eq!(engine.tokens_seen(), 0);
                    if engine.clear().is_ok() { certain = true; }
                }
            }
            prop_assert!(tally.states.load(Ordering::SeqCst) <= 1);
        }
        let counts = engine.counts();
        prop_assert_eq!(counts, Counts { free: counts.free, ..Counts::default() });
        prop_assert_eq!(tally.violations.load(Ordering::SeqCst), 0);
    }
}
