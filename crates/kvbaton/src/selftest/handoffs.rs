//! Probes that need no runtime of the system: the executor, injected failures, and the cost of a hand-off.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvbaton_layout::{DType, presets};
use kvbaton_runtime::fake::{FakeRuntime, Habits, Tally};
use kvbaton_runtime::{Counts, Session};
use serde_json::{Map, json};

use super::packages::Packages;
use super::{Failed, Probes, Selftest, failed, found};
use crate::bench::{HandoffBench, bench_handoff, shape};
use crate::{CpuPrefill, ErrorKind, Prefill, RuntimePrefill, Stated};

/// The executor gives the same bits on one thread and on all.
pub(super) fn executor(what: &Selftest, package: &Path, probes: &mut Probes<'_>) {
    probes.run("executor", "same bits on one thread and on all", || {
        let stated = what.stated.clone();
        let mut caches = Vec::new();
        let mut seconds = Vec::new();
        for threads in [1, what.threads] {
            let mut engine = CpuPrefill::open_stated(package, threads, stated.clone())?;
            let length = engine.functions().first().map_or(1, |f| f.tokens);
            let vocab = engine.model().map_or(1, |m| m.vocab_size).max(1);
            let tokens: Vec<u32> =
                (0..length).map(|i| u32::try_from((i * 7919 + 13) % vocab).unwrap_or(0)).collect();
            engine.prepare(length)?;
            let done = engine.prefill(&tokens)?;
            seconds.push(done.report.seconds);
            caches.push(done.cache);
        }
        let found = found! {"tokens": caches[0].tokens_seen(), "seconds": seconds};
        if caches[0].bytes() != caches[1].bytes() {
            return failed("the caches differ", found);
        }
        Ok(found)
    });
}

/// A tenth of a runtime's calls fail: whatever succeeds is right, and nothing is left behind.
pub(super) fn injected_failures(what: &Selftest, packages: &Packages, probes: &mut Probes<'_>) {
    probes.run("fake", "hand-offs with a tenth of the calls failing", || {
        let tally = Arc::new(Tally::default());
        let counted = tally.clone();
        let habits = Habits { fails_percent: 10, seed: 1, row_align_bytes: 64, ..Habits::default() };
        let session = Session::new(move || FakeRuntime::new(habits.clone(), counted.clone()));
        let session = packages.session(session);
        let mut engine = RuntimePrefill::open(session, &packages.prefill, None, Stated::default())?;
        while engine.prepare(1).is_err() {}
        let (mut done, mut failures) = (0usize, 0usize);
        for round in 0..what.rounds {
            match engine.prefill(&[u32::try_from(round % 48).unwrap_or(0), 1, 2]) {
                Ok(_) => done += 1,
                Err(error) if error.kind() == ErrorKind::Program => failures += 1,
                Err(error) => return Err(Failed::from(error)),
            }
        }
        let counts = engine.counts();
        let left = json!({
            "buffers": counts, "arrays": tally.arrays.load(Ordering::SeqCst),
            "locks": tally.locks.load(Ordering::SeqCst), "broken_rules": tally.violations.load(Ordering::SeqCst),
        });
        let found = found! {"rounds": what.rounds, "done": done, "failed": failures, "left": left};
        let clean = counts == Counts { free: counts.free, ..Counts::default() }
            && tally.arrays.load(Ordering::SeqCst) == counts.free
            && tally.locks.load(Ordering::SeqCst) == 0
            && tally.violations.load(Ordering::SeqCst) == 0;
        if clean { Ok(found) } else { failed("something was left behind", found) }
    });
}

/// What a hand-off costs, against a memcpy of as many bytes in the same run.
pub(super) fn cost(what: &Selftest, probes: &mut Probes<'_>) {
    for &context in &what.contexts {
        probes.run("handoff", &format!("cost at {context} rows"), || {
            let name = "smollm2-135m";
            let bench = HandoffBench {
                shape: name.to_owned(),
                cache: shape(name).ok_or_else(|| Failed { because: name.to_owned(), found: Map::new() })?,
                source: presets::get("kvbaton-stacked")?,
                target: presets::get("mlx-lm")?,
                contexts: vec![context],
                live_fraction: 0.75,
                dtype: DType::Float16,
                row_stride_bytes: None,
                threads: what.threads,
                repeats: 7,
            };
            let report = bench_handoff(&bench, |_| {})?;
            let row = report
                .rows
                .first()
                .ok_or_else(|| Failed { because: "the bench has no row".to_owned(), found: Map::new() })?;
            Ok(found! {
                "shape": name, "live_rows": row.live_rows, "bytes": row.bytes,
                "copy_seconds": row.copy_seconds, "gigabytes_per_second": row.gigabytes_per_second,
                "memcpy_ratio": row.memcpy_ratio, "cold_memcpy_ratio": row.cold_memcpy_ratio,
            })
        });
    }
}
