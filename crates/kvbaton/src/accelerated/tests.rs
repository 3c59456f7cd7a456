//! Whole hand-offs with the fake runtime in Core ML's place.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvbaton_copy::Threads;
use kvbaton_layout::{CacheSpec, DType, presets};
use kvbaton_runtime::Patience;
use kvbaton_runtime::fake::{FakeRuntime, Habits, Tally, element};
use proptest::prelude::*;

use super::*;
use crate::{ErrorKind, HandoffOptions, Target, hand_off};

const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 32;

struct Rig {
    engine: RuntimePrefill<FakeRuntime>,
    tally: Arc<Tally>,
}

/// The fake runtime under the reader's test package of two functions.
fn rig(habits: Habits) -> Rig {
    rig_on("two_functions.mlpackage", LAYERS, habits)
}

/// The same under another of the reader's packages.
fn rig_on(package: &str, layers: usize, habits: Habits) -> Rig {
    let model = serde_json::json!({
        "architecture": "llama", "vocab_size": 48, "dtype": "float16",
        "rope": {"kind": "half-split", "theta": 10000.0, "dims": DIM, "scaling": {"kind": "default"}},
        "layers": CacheSpec::full(layers, HEADS, DIM),
    });
    let model = Some(serde_json::from_value(model).unwrap());
    let stated = Stated { layout: Some(presets::get("kvbaton-stacked").unwrap()), model };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mil/testdata").join(package);
    let tally = Arc::new(Tally::default());
    let session = limited(&tally, habits, Patience::default().predict);
    Rig { engine: RuntimePrefill::open(session, &path, None, stated).unwrap(), tally }
}

/// A session whose predictions may take so long.
fn limited(tally: &Arc<Tally>, habits: Habits, predict: Duration) -> Session<FakeRuntime> {
    let counted = tally.clone();
    Session::new(move || FakeRuntime::new(habits.clone(), counted.clone()))
        .with_patience(Patience::chosen(None, Some(predict)))
}

/// Hands a view over to mlx-lm's layout in float16 and checks every element.
fn hand_over(view: &CacheView, tokens: &[u32]) {
    let layout = presets::get("mlx-lm").unwrap();
    let names = layout.tensor_names(view.cache()).unwrap();
    let shape = [1, HEADS, 16, DIM];
    let mut memory: Vec<Vec<u8>> = vec![vec![0; shape.iter().product::<usize>() * 2]; names.len()];
    let mut targets: Vec<Target<'_>> = names
        .iter()
        .zip(&mut memory)
        .map(|(name, bytes)| Target {
            info: TensorInfo::contiguous(name.clone(), DType::Float16, &shape),
            bytes,
        })
        .collect();
    let (live, threads) = (LiveRows::seen(tokens.len()), Threads::new(1));
    hand_off(view, &layout, &live, &mut targets, &threads, HandoffOptions::default()).unwrap();
    for (index, bytes) in memory.iter().enumerate() {
        let (layer, part) = layer_of(&names[index]);
        for head in 0..HEADS {
            for (row, &token) in tokens.iter().enumerate() {
                for lane in 0..DIM {
                    let at = 2 * ((head * 16 + row) * DIM + lane);
                    let value = half::f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
                    assert_eq!(value, element(part, layer, head, row, lane, token), "{} {row}", names[index]);
                }
            }
        }
    }
}

/// The tensors are called `keys_{layer}` and `values_{layer}`.
fn layer_of(name: &str) -> (usize, kvbaton_layout::Part) {
    let (part, layer) = name.split_once('_').unwrap();
    let part = if part == "keys" { kvbaton_layout::Part::Key } else { kvbaton_layout::Part::Value };
    (layer.parse().unwrap(), part)
}

#[test]
fn a_second_prediction_is_refused_while_the_first_cache_is_held() {
    let Rig { mut engine, .. } = rig(Habits::default());
    let first = engine.prefill(&[1, 2, 3]).unwrap();
    assert_eq!(engine.prefill(&[4]).unwrap_err().kind(), ErrorKind::Lease);
    drop(first);
    assert!(engine.prefill(&[4]).is_ok());
}

#[test]
fn the_only_function_of_a_package_is_asked_for_without_its_name() {
    // A system on which functions cannot be named, and a package that needs no newer one.
    let old = || Habits { version: (13, 0), ..Habits::default() };
    let Rig { mut engine, .. } = rig_on("spec7.mlpackage", 1, old());
    let done = engine.prefill(&[1, 2, 3]).unwrap();
    assert_eq!(done.report.function, "main");
    hand_over(&done.cache, &[1, 2, 3]);
    let refused = rig(old()).engine.prefill(&[1]).unwrap_err();
    assert!(refused.to_string().contains("a package of several functions needs macOS 15.0"), "{refused}");
}

#[test]
fn an_engine_that_ignores_backings_never_touches_a_held_cache() {
    let Rig { mut engine, .. } = rig(Habits { ignores_backings: true, ..Habits::default() });
    let first = engine.prefill(&[1, 2, 3]).unwrap();
    let before = first.cache.bytes()[0].to_vec();
    engine.prefill(&[9, 9, 9]).unwrap();
    assert_eq!(first.cache.bytes()[0], before);
    assert!(first.report.notes.iter().any(|n| n.contains("did not use the memory")), "{:?}", first.report);
}

#[test]
fn a_failed_prediction_leaves_the_engine_usable() {
    let Rig { mut engine, .. } = rig(Habits { fails_at: vec![0], ..Habits::default() });
    assert_eq!(engine.prefill(&[1]).unwrap_err().kind(), ErrorKind::Program);
    assert!(engine.prefill(&[1]).is_ok());
}

#[test]
fn a_prediction_that_hangs_is_named_with_its_limit_and_nothing_is_left_of_it() {
    let hang = Duration::from_millis(400);
    let Rig { mut engine, tally } = rig(Habits::default());
    let hangs = Habits { hangs_at: vec![0], hang, ..Habits::default() };
    engine.package.session = limited(&tally, hangs, Duration::from_millis(100));
    let error = engine.prefill(&[1]).unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("the prediction did not return within 0.1 s (function `prefill_8` of `"),
        "{text}"
    );
    assert!(text.contains("two_functions.mlpackage"), "{text}");
    assert!(error.get_hint().unwrap().contains("--prediction-timeout"));
    assert_eq!((error.kind(), error.fields()["function"].as_str()), (ErrorKind::Internal, Some("prefill_8")));
    hand_over(&engine.prefill(&[1, 2]).unwrap().cache, &[1, 2]);
    std::thread::sleep(hang);
    let counts = engine.counts();
    assert_eq!(counts, Counts { free: counts.free, ..Counts::default() });
    assert_eq!((tally.arrays.load(Ordering::SeqCst), tally.locks.load(Ordering::SeqCst)), (counts.free, 0));
}

#[test]
fn the_report_says_which_units_ran_and_what_was_replaced() {
    let refuses_units = vec![kvbaton_runtime::Units::All];
    let Rig { mut engine, .. } = rig(Habits { refuses_units, refuses_surfaces: true, ..Habits::default() });
    let report = engine.prefill(&[1]).unwrap().report;
    assert_eq!(report.compute_units.as_deref(), Some("cpu-and-gpu"));
    assert!(report.notes[0].contains("all is refused"), "{:?}", report.notes);
    assert!(report.notes.iter().any(|n| n.contains("`key_cache` is not in a surface")), "{:?}", report.notes);
}

#[test]
fn a_thousand_hand_offs_with_a_tenth_failing_leave_the_counts_as_they_were() {
    let habits = Habits { fails_percent: 10, seed: 7, row_align_bytes: 96, ..Habits::default() };
    let Rig { mut engine, tally } = rig(habits);
    while engine.prepare(1).is_err() {}
    let (mut done, mut failed) = (0, 0);
    for round in 0..1000u32 {
        let tokens = [round % 48, 3 * round % 48, (5 * round + 1) % 48];
        match engine.prefill(&tokens) {
            Ok(prefilled) => {
                hand_over(&prefilled.cache, &tokens);
                done += 1;
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Program, "{error}");
                failed += 1;
            }
        }
        let counts = engine.counts();
        assert_eq!(counts, Counts { free: counts.free, ..Counts::default() }, "round {round}");
    }
    assert!(done > 200 && failed > 200, "{done} done, {failed} failed");
    assert_eq!(engine.counts().free, 3, "one buffer for each of three outputs");
    assert_eq!(tally.arrays.load(Ordering::SeqCst), 3);
    assert_eq!(tally.locks.load(Ordering::SeqCst), 0);
    assert_eq!(tally.violations.load(Ordering::SeqCst), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Views that are held, cloned, cut and dropped in any order, under any habits and failures, hold their rows.
    #[test]
    fn random_schedules_of_hand_offs(
        steps in prop::collection::vec((0usize..5, any::<usize>(), 1usize..=8), 1..24),
        ignores_backings: bool,
        row_align_bytes in prop::sample::select(vec![0, 64, 96]),
        refuses_surfaces: bool,
        fails_percent in 0u64..12,
        seed: u64,
    ) {
        let habits =
            Habits { ignores_backings, row_align_bytes, refuses_surfaces, fails_percent, seed, ..Habits::default() };
        let Rig { mut engine, tally } = rig(habits);
        let mut held: Vec<(CacheView, Vec<u32>)> = Vec::new();
        for (round, (step, which, count)) in steps.into_iter().enumerate() {
            let which = which % held.len().max(1);
            match step {
                0 | 1 => {
                    let tokens: Vec<u32> = (0..count).map(|i| u32::try_from((97 * round + i) % 48).unwrap()).collect();
                    match engine.prefill(&tokens) {
                        Ok(prefilled) => held.push((prefilled.cache, tokens)),
                        Err(e) if e.kind() == ErrorKind::Lease => {
                            prop_assert!(!held.is_empty() && !ignores_backings, "{}", e);
                        }
                        Err(e) => prop_assert!(fails_percent > 0 && e.kind() == ErrorKind::Program, "{}", e),
                    }
                }
                2 if !held.is_empty() => drop(held.remove(which)),
                3 if !held.is_empty() => {
                    let copy = (held[which].0.clone(), held[which].1.clone());
                    held.push(copy);
                }
                4 if !held.is_empty() && held[which].1.len() > 1 => {
                    let keep = held[which].1.len() - 1;
                    let cut = held[which].0.prefix(keep).unwrap();
                    let tokens = held[which].1[..keep].to_vec();
                    held[which] = (cut, tokens);
                }
                _ => {}
            }
            for (view, tokens) in &held {
                hand_over(view, tokens);
            }
        }
        drop(held);
        let counts = engine.counts();
        prop_assert_eq!(counts, Counts { free: counts.free, ..Counts::default() });
            prop_assert_eq!(tally.arrays.load(Ordering::SeqCst), counts.free);
        prop_assert_eq!(tally.violations.load(Ordering::SeqCst), 0);
    }
}
