//! What a function takes of memory, computed at load, against what an allocator counts; and refusals.
//!
//! The bound: what is allocated stays below what was computed, and that stays below twice what is allocated.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use half::f16;
use kvbaton_exec::{Array, ExecError, Executable, Options, WeightStorage};
use kvbaton_mil::Package;

/// The system's allocator, counting.
struct Counting;

static NOW: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

fn grow(bytes: usize) {
    let now = NOW.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every call is handed to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test measures at a time.
static ALONE: Mutex<()> = Mutex::new(());

fn open(name: &str) -> Arc<Package> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name);
    Arc::new(Package::open(&path).unwrap())
}

/// Bytes that `run` allocated at a time, at most.
fn peak_of<T>(run: impl FnOnce() -> T) -> (u64, T) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let result = run();
    (PEAK.load(Ordering::Relaxed) - before, result)
}

/// Graph, names and threads: what does not grow with the sizes of values.
const FIXED: u64 = 2 << 20;

fn check(name: &str, options: &Options, inputs: &[(&str, Array)]) {
    let package = open(name);
    let (peak, program) = peak_of(|| {
        let program = Executable::load(package, "main", options).unwrap();
        let outputs = program.run(inputs).unwrap();
        assert_eq!(outputs.len(), program.run(inputs).unwrap().len());
        program
    });
    let computed = program.footprint().unwrap().allocated_bytes();
    let what = format!("{name}, fused {}: {peak} measured, {computed} computed", options.fuse);
    assert!(peak <= computed + FIXED, "{what}");
    assert!(computed <= 2 * peak + FIXED, "{what}");
}

fn noise(shape: &[usize]) -> Array {
    let values: Vec<f16> = (0..shape.iter().product())
        .map(|i: usize| f16::from_f32((i * 31 % 97) as f32 / 48.0 - 1.0))
        .collect();
    Array::from_f16(shape, &values).unwrap()
}

#[test]
fn what_is_computed_bounds_what_is_allocated() {
    let _alone = ALONE.lock();
    let x = noise(&[1, 96, 32]);
    for fuse in [false, true] {
        for threads in [1, 3] {
            let options = Options::with_threads(threads).fused(fuse);
            check("attention.mlpackage", &options, &[("x", x.clone())]);
        }
    }
    let ids = Array::from_i32(&[4], &[3, 1, 2, 0]).unwrap();
    let inputs = [("x", noise(&[9, 64])), ("ids", ids)];
    for storage in WeightStorage::ALL {
        check("products.mlpackage", &Options::with_threads(1).with_weights(storage), &inputs);
    }
}

/// Rounds decide which block runs and how often; what is computed holds for all of them, and for one after the other.
#[test]
fn what_is_computed_bounds_functions_with_blocks() {
    let _alone = ALONE.lock();
    let inputs = |rounds| [("x", noise(&[64, 16])), ("rounds", Array::from_i32(&[1], &[rounds]).unwrap())];
    for fuse in [false, true] {
        let options = Options::with_threads(1).fused(fuse);
        let (peak, program) = peak_of(|| {
            let program = Executable::load(open("blocks.mlpackage"), "main", &options).unwrap();
            for rounds in [0, 1, 2, 5, 4] {
                program.run(&inputs(rounds)).unwrap();
            }
            program
        });
        let computed = program.footprint().unwrap();
        let what = format!("fused {fuse}: {peak} measured, {computed:?}");
        assert!(peak <= computed.allocated_bytes() + FIXED, "{what}");
        assert!(program.allocated_bytes() <= computed.activation_bytes, "{what}");
        // The wide block alone takes 64 × 4096 values.
        assert!(program.allocated_bytes() >= 64 * 4096 * 4, "{what}");
        assert!(computed.activation_bytes <= 2 * program.allocated_bytes() + FIXED, "{what}");
    }
}

#[test]
fn functions_with_blocks_are_refused_before_anything_is_allocated() {
    let _alone = ALONE.lock();
    let load = |limit| {
        let options = Options::with_threads(1).with_max_memory(Some(limit));
        Executable::load(open("blocks.mlpackage"), "main", &options)
    };
    let (peak, error) = peak_of(|| load(400_000).unwrap_err());
    let ExecError::Memory { needed_bytes, limit_bytes: 400_000, .. } = error else { panic!("{error}") };
    assert!(peak < FIXED, "{peak} bytes were allocated");
    load(needed_bytes).unwrap();
    load(needed_bytes - 1).unwrap_err();
}

#[test]
fn more_than_the_limit_is_refused_before_anything_is_allocated() {
    let _alone = ALONE.lock();
    let package = open("attention.mlpackage");
    let options = Options::with_threads(1).with_max_memory(Some(100_000));
    let (peak, error) = peak_of(|| Executable::load(package, "main", &options).unwrap_err());
    let ExecError::Memory { needed_bytes, limit_bytes, available, .. } = &error else { panic!("{error}") };
    assert_eq!((*limit_bytes, *available), (100_000, false));
    let text = error.to_string();
    assert!(text.contains(&format!("{needed_bytes} bytes")) && text.contains("the 100000 bytes"), "{text}");
    assert!(peak < FIXED, "{peak} bytes were allocated");
    let enough = Options::with_threads(1).with_max_memory(Some(*needed_bytes));
    Executable::load(open("attention.mlpackage"), "main", &enough).unwrap();
    let less = Options::with_threads(1).with_max_memory(Some(*needed_bytes - 1));
    Executable::load(open("attention.mlpackage"), "main", &less).unwrap_err();
}

#[test]
fn streamed_weights_are_not_kept() {
    let _alone = ALONE.lock();
    let weights = |storage| {
        let options = Options::with_threads(1).with_weights(storage);
        Executable::load(open("products.mlpackage"), "main", &options)
            .unwrap()
            .footprint()
            .unwrap()
            .weight_bytes
    };
    assert_eq!(weights(WeightStorage::Streamed), 0);
    assert_eq!(weights(WeightStorage::Resident), 2 * 96 * 64 * 2);
}
