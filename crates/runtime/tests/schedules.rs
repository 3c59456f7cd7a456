//! The session against the fake runtime: what a caller sees, and what is left behind, under failures at every call,
//! random schedules, hangs and refusals.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvbaton_layout::CacheSpec;
use kvbaton_memory::Bytes;
use kvbaton_runtime::fake::{self, FakeRuntime, Habits, Tally};
use kvbaton_runtime::{
    ArrayInfo, CompiledFunction, Counts, Element, Memory, Output, Patience, RuntimeError, Session, Units,
};
use proptest::prelude::*;

struct Rig {
    session: Session<FakeRuntime>,
    tally: Arc<Tally>,
    function: CompiledFunction,
}

impl Rig {
    fn new(habits: Habits) -> Rig {
        let tally = Arc::new(Tally::default());
        let counted = tally.clone();
        let session = Session::new(move || FakeRuntime::new(habits.clone(), counted.clone()));
        let function = fake::functions(&CacheSpec::full(2, 2, 4), &[8]).remove(0);
        Rig { session, tally, function }
    }

    fn load(&mut self) -> Result<(), RuntimeError> {
        self.session.load(Path::new("p"), self.function.name.as_deref(), None).map(|_| ())
    }

    fn predict(&mut self, tokens: &[i32]) -> Result<Vec<Output>, RuntimeError> {
        let mut ids = tokens.to_vec();
        ids.resize(8, 0);
        let pack =
            |values: &[i32]| Bytes::new(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
        let last = i32::try_from(tokens.len()).unwrap() - 1;
        let inputs = vec![
            ("input_ids".to_owned(), ArrayInfo::packed(Element::Int32, &[1, 8]), pack(&ids)),
            ("last_index".to_owned(), ArrayInfo::packed(Element::Int32, &[1]), pack(&[last])),
        ];
        self.session.predict(self.function.name.as_deref(), inputs, &self.function.outputs)
    }

    fn get(&self, count: impl Fn(&Tally) -> usize) -> usize {
        count(&self.tally)
    }

    fn locks(&self) -> usize {
        self.get(|t| t.locks.load(Ordering::SeqCst))
    }

    fn arrays(&self) -> usize {
        self.get(|t| t.arrays.load(Ordering::SeqCst))
    }

    fn violations(&self) -> usize {
        self.get(|t| t.violations.load(Ordering::SeqCst))
    }
}

/// The element that a prediction of `tokens` must leave at layer 1, head 1, row `row`, lane 3 of the keys.
fn corner(tokens: &[i32], row: usize) -> f32 {
    let value = 31 + 17 + 7 * row + 3 * 3 + usize::try_from(tokens[row]).unwrap();
    (value % 2039) as f32
}

fn read_corner(outputs: &[Output], row: usize) -> f32 {
    let keys = outputs.iter().find(|o| o.name == "key_cache").unwrap();
    let at: usize = [1, 1, row, 3].iter().zip(&keys.info.strides_bytes).map(|(i, s)| i * s).sum();
    half::f16::from_le_bytes([keys.bytes[at], keys.bytes[at + 1]]).to_f32()
}

#[test]
fn a_failure_at_every_single_call_leaves_nothing_behind() {
    // Without failures, to know how many calls there are.
    let mut rig = Rig::new(Habits::default());
    rig.load().unwrap();
    drop(rig.predict(&[1, 2]).unwrap());
    let calls = rig.get(|t| t.calls.load(Ordering::SeqCst));
    assert!(calls >= 3 + 2 + 3 + 1 + 3 + 3, "compile, load, plan, inputs, backings, predict, describe, lock");
    for failing in 0..calls {
        let mut rig = Rig::new(Habits { fails_at_calls: vec![failing], ..Habits::default() });
        let first = rig.load().and_then(|()| rig.predict(&[1, 2]));
        // A plan that cannot be read and one surface that cannot be had are no failures.
        let survives = first.is_ok();
        assert!(
            survives || first.as_ref().unwrap_err().to_string().contains("as it was told to"),
            "{failing}"
        );
        drop(first);
        let counts = rig.session.counts();
        assert_eq!(Counts { free: counts.free, ..Counts::default() }, counts, "call {failing}");
        assert_eq!((rig.locks(), rig.violations()), (0, 0), "call {failing}");
        // And the session goes on as if nothing had been.
        rig.load().unwrap();
        let outputs = rig.predict(&[7, 8, 9]).unwrap();
        assert_eq!(read_corner(&outputs, 2), corner(&[7, 8, 9], 2));
    }
}

#[test]
fn a_thousand_hand_offs_with_a_tenth_failing_leave_the_counts_as_they_were() {
    let mut rig = Rig::new(Habits::default());
    rig.load().unwrap();
    drop(rig.predict(&[1]).unwrap());
    let before = (rig.session.counts(), rig.arrays(), rig.locks());

    // A tenth of the calls: of the nine or so calls of a prediction, more than half of the predictions.
    for percent in [1, 10] {
        let mut rig = Rig::new(Habits { fails_percent: percent, seed: 42, ..Habits::default() });
        while rig.load().is_err() {}
        let (mut done, mut failed) = (0, 0);
        for round in 0..1000 {
            let tokens = [round, round + 1, round + 2];
            match rig.predict(&tokens) {
                Ok(outputs) => {
                    assert_eq!(read_corner(&outputs, 1), corner(&tokens, 1), "round {round}");
                    done += 1;
                }
                Err(RuntimeError::Failed { .. }) => failed += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert!(done > 300 && failed > 50, "{done} done, {failed} failed");
        let after = (rig.session.counts(), rig.arrays(), rig.locks());
        assert_eq!(after, before, "{done} done, {failed} failed");
        assert_eq!(rig.violations(), 0);
    }
}

#[test]
fn a_second_prediction_is_refused_with_its_reason_while_the_first_is_read() {
    let mut rig = Rig::new(Habits::default());
    rig.load().unwrap();
    let first = rig.predict(&[1, 2, 3]).unwrap();
    let refused = rig.predict(&[4]).unwrap_err();
    assert!(refused.to_string().contains("still read by 1 cannot be proposed"), "{refused}");
    assert_eq!(read_corner(&first, 2), corner(&[1, 2, 3], 2));
    drop(first);
    assert!(rig.predict(&[4]).is_ok());
}

#[test]
fn ignored_backings_are_seen_by_identity_and_given_back() {
    let mut rig = Rig::new(Habits { ignores_backings: true, row_align_bytes: 64, ..Habits::default() });
    rig.load().unwrap();
    let first = rig.predict(&[1, 2, 3]).unwrap();
    for output in &first {
        assert_eq!(output.memory, Memory::Own);
        assert!(output.because.as_ref().is_some_and(|b| b.contains("did not use")));
    }
    let second = rig.predict(&[4, 5, 6]).unwrap();
    assert_eq!(read_corner(&first, 0), corner(&[1, 2, 3], 0));
    assert_eq!(read_corner(&second, 0), corner(&[4, 5, 6], 0));
    assert_eq!(rig.session.counts().lent, 6);
    drop((first, second));
    assert_eq!((rig.session.counts().lent, rig.arrays(), rig.locks()), (0, 3, 0));
}

#[test]
fn strides_are_those_of_the_result() {
    let mut rig = Rig::new(Habits { row_align_bytes: 100, ..Habits::default() });
    rig.load().unwrap();
    let outputs = rig.predict(&[1, 2, 3]).unwrap();
    let keys = outputs.iter().find(|o| o.name == "key_cache").unwrap();
    assert_eq!((keys.memory, keys.info.strides_bytes[2]), (Memory::Surface, 100));
    assert_eq!(read_corner(&outputs, 2), corner(&[1, 2, 3], 2));
}

#[test]
fn a_surface_that_is_refused_becomes_heap_memory_and_says_why() {
    let mut rig = Rig::new(Habits { refuses_surfaces: true, ..Habits::default() });
    rig.load().unwrap();
    let outputs = rig.predict(&[1]).unwrap();
    let said = outputs[1].because.as_deref().unwrap();
    assert_eq!(outputs[1].memory, Memory::Heap);
    assert!(said.contains("no surface of this size"), "{said}");
}

#[test]
fn a_prediction_that_hangs_is_given_up_and_its_buffers_are_lost() {
    let hang = Duration::from_millis(300);
    let habits = Habits { hangs_at: vec![0], hang, ..Habits::default() };
    let mut rig = Rig::new(habits);
    let predict = Duration::from_millis(60);
    rig.session = rig.session.with_patience(Patience { predict, ..Patience::default() });
    rig.load().unwrap();
    let hung = rig.predict(&[1]).unwrap_err();
    assert_eq!(hung.to_string(), "the prediction did not return within 0.06 s");
    assert_eq!(rig.session.counts().lost, 3);
    // A new thread, the model loaded again, buffers of its own.
    let outputs = rig.predict(&[2, 3]).unwrap();
    assert_eq!(read_corner(&outputs, 1), corner(&[2, 3], 1));
    drop(outputs);
    std::thread::sleep(2 * hang);
    // The late result was dropped where it arrived, with everything it had.
    assert_eq!((rig.session.counts().lost, rig.arrays(), rig.locks()), (0, 3, 0));
}

#[test]
fn what_a_session_compiles_without_a_cache_goes_with_it() {
    let hang = Duration::from_millis(300);
    let mut rig = Rig::new(Habits { hangs_at: vec![0], hang, ..Habits::default() });
    let predict = Duration::from_millis(60);
    rig.session = rig.session.with_patience(Patience { predict, ..Patience::default() });
    rig.load().unwrap();
    let compiled = rig.tally.compiled_to.lock().unwrap().clone();
    assert!(compiled.len() == 1 && compiled[0].is_dir(), "{compiled:?}");
    // The thread that is lost takes nothing along: the next one loads the same copy.
    assert!(rig.predict(&[1]).is_err());
    rig.predict(&[2]).unwrap();
    assert!(rig.tally.compiled_to.lock().unwrap().len() == 1 && compiled[0].is_dir());
    drop(rig.session);
    assert!(!compiled[0].exists());
}

#[test]
fn a_runtime_that_always_hangs_is_not_given_threads_without_end() {
    let habits = Habits { hangs_at: (0..9).collect(), hang: Duration::from_millis(300), ..Habits::default() };
    let mut rig = Rig::new(habits);
    let predict = Duration::from_millis(20);
    rig.session = rig.session.with_patience(Patience { predict, ..Patience::default() });
    rig.load().unwrap();
    for _ in 0..3 {
        assert!(matches!(rig.predict(&[1]), Err(RuntimeError::TimedOut { .. })));
    }
    assert!(matches!(rig.predict(&[1]), Err(RuntimeError::Stuck { abandoned: 3 })));
}

#[test]
fn units_that_nobody_chose_are_replaced_and_it_is_said() {
    let mut rig = Rig::new(Habits { refuses_units: vec![Units::All], ..Habits::default() });
    let loaded = rig.session.load(Path::new("p"), None, None).unwrap();
    assert_eq!(loaded.units, Units::CpuAndGpu);
    assert_eq!(loaded.notes, ["compute units all: loading the model failed: all is refused"]);
    // Those that somebody chose are not.
    let refused = rig.session.load(Path::new("p"), None, Some(Units::All)).unwrap_err();
    assert!(refused.to_string().contains("all is refused"));
}

#[test]
fn units_whose_compilation_hangs_are_replaced_after_their_time() {
    let hang = Duration::from_millis(200);
    let mut rig = Rig::new(Habits { hangs_loading: vec![Units::All], hang, ..Habits::default() });
    let load = Duration::from_millis(30);
    rig.session = rig.session.with_patience(Patience { load, ..Patience::default() });
    let loaded = rig.session.load(Path::new("p"), rig.function.name.as_deref(), None).unwrap();
    assert_eq!(loaded.units, Units::CpuAndGpu);
    assert!(loaded.notes[0].contains("did not return within"), "{:?}", loaded.notes);
    assert!(rig.predict(&[1]).is_ok());
}

#[test]
fn calls_that_an_old_system_lacks_are_not_made() {
    let mut rig = Rig::new(Habits { version: (14, 3), ..Habits::default() });
    let refused = rig.load().unwrap_err();
    assert_eq!(refused.to_string(), "a package of several functions needs macOS 15.0, this is 14.3");
    let loaded = rig.session.load(Path::new("p"), None, None).unwrap();
    assert_eq!(loaded.plan, None);
    assert_eq!(loaded.notes, ["what runs where is not known: a compute plan needs macOS 14.4, this is 14.3"]);
    // The compilation and the one load that the system has.
    assert_eq!(rig.get(|t| t.calls.load(Ordering::SeqCst)), 2);
}

#[test]
fn whoever_waits_hears_of_it() {
    let habits = Habits { hangs_at: vec![0], hang: Duration::from_millis(1200), ..Habits::default() };
    let mut rig = Rig::new(habits);
    let (heard, hearing) = std::sync::mpsc::channel();
    rig.session = rig.session.with_waiting(move |call, waited| {
        let _ = heard.send((call.to_string(), waited));
    });
    rig.load().unwrap();
    rig.predict(&[1]).unwrap();
    let (call, waited) = hearing.try_recv().unwrap();
    assert!(call == "the prediction" && waited >= Duration::from_secs(1), "{call} {waited:?}");
}

#[test]
fn a_panic_in_the_runtime_is_an_error_and_the_next_call_works() {
    let mut rig = Rig::new(Habits::default());
    rig.load().unwrap();
    let gone = rig.session.with_runtime(kvbaton_runtime::Call::Predict, |_| -> Result<(), RuntimeError> {
        panic!("as it was told to")
    });
    assert!(matches!(gone, Err(RuntimeError::WorkerGone { .. })));
    assert!(rig.predict(&[1]).is_ok());
}

#[derive(Clone, Debug)]
enum Step {
    Predict(usize),
    Drop(usize),
    Clone(usize),
    /// A GPU may be at work on it when it is dropped.
    Unsettle(usize),
    Settle,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1usize..8).prop_map(Step::Predict),
        3 => any::<usize>().prop_map(Step::Drop),
        1 => any::<usize>().prop_map(Step::Clone),
        1 => any::<usize>().prop_map(Step::Unsettle),
        1 => Just(Step::Settle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Consumers come and go in any order, calls fail at random: what is read is always the prediction that it came
    /// from, a refusal always has a holder, and in the end everything is as it was.
    #[test]
    fn random_schedules(
        steps in prop::collection::vec(step(), 1..40),
        ignores_backings: bool,
        row_align_bytes in prop::sample::select(vec![0, 64]),
        fails_percent in 0u64..15,
        seed: u64,
    ) {
        let habits = Habits { ignores_backings, row_align_bytes, fails_percent, seed, ..Habits::default() };
        let mut rig = Rig::new(habits);
        while rig.load().is_err() {}
        let mut held: Vec<(Vec<i32>, Vec<Output>)> = Vec::new();
        for (round, step) in steps.into_iter().enumerate() {
            match step {
                Step::Predict(n) => {
                    let tokens: Vec<i32> = (0..n).map(|i| i32::try_from(round * 10 + i).unwrap()).collect();
                    let before = rig.session.counts();
                    match rig.predict(&tokens) {
                        Ok(outputs) => {
                            prop_assert!(before.unsettled == 0 || ignores_backings, "a barrier was due");
                            held.push((tokens, outputs));
                        }
                        Err(RuntimeError::Custody(refused)) => {
                            prop_assert!(before.lent + before.unsettled > 0 && !ignores_backings, "{}", refused);
                        }
                        Err(RuntimeError::Failed { .. }) => prop_assert!(fails_percent > 0),
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                Step::Drop(i) if !held.is_empty() => drop(held.remove(i % held.len())),
                Step::Clone(i) if !held.is_empty() => held.push(held[i % held.len()].clone()),
                Step::Unsettle(i) if !held.is_empty() => {
                    held[i % held.len()].1.iter().for_each(|output| output.bytes.leave_unsettled());
                }
                Step::Settle => rig.session.settle(),
                _ => {}
            }
            for (tokens, outputs) in &held {
                let row = tokens.len() - 1;
                prop_assert_eq!(read_corner(outputs, row), corner(tokens, row));
            }
        }
        drop(held);
        let counts = rig.session.counts();
        prop_assert_eq!(counts, Counts { free: counts.free, unsettled: counts.unsettled, ..Counts::default() });
        rig.session.settle();
        let counts = rig.session.counts();
        prop_assert_eq!(counts, Counts { free: counts.free, ..Counts::default() });
        prop_assert!(counts.free <= 3);
        prop_assert_eq!((rig.arrays(), rig.locks(), rig.violations()), (counts.free, 0, 0));
    }
}
