//! How fast compressed weights are decompressed, against a copy of as many bytes on the same threads.
//!
//!     cargo run --release -p kvbaton-exec --example decompress -- PACKAGE [THREADS]
//!
//! Loads the package's default function with streamed weights (nothing is decompressed) and with resident ones, and takes the
//! difference. Both the weights and the copy go to fresh memory. `bench/decompress.py` has a package of each form.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a tool for developers")]

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvbaton_exec::{Executable, Options, WeightStorage};
use kvbaton_mil::Package;
use rayon::prelude::*;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("usage: decompress PACKAGE [THREADS]");
    let threads = arguments.next().map_or(0, |t| t.parse().unwrap());
    let package = Arc::new(Package::open(Path::new(&path)).unwrap());
    let function = package.program().default_function.clone();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let (mut ratios, mut speeds) = (Vec::new(), Vec::new());
    for round in 0..7 {
        let load = |storage| {
            let options = Options::with_threads(threads).with_weights(storage);
            let start = Instant::now();
            let program = Executable::load(Arc::clone(&package), &function, &options).unwrap();
            (start.elapsed().as_secs_f64(), program.footprint().unwrap().weight_bytes)
        };
        let (base, _) = load(WeightStorage::Streamed);
        let (all, bytes) = load(WeightStorage::Resident);
        let source = vec![1u8; usize::try_from(bytes).unwrap()];
        let start = Instant::now();
        let mut target = vec![0u8; source.len()];
        pool.install(|| {
            target
                .par_chunks_mut(1 << 20)
                .zip(source.par_chunks(1 << 20))
                .for_each(|(t, s)| t.copy_from_slice(s));
        });
        let copy = start.elapsed().as_secs_f64();
        std::hint::black_box(&target);
        let seconds = all - base;
        println!(
            "{bytes} bytes: decompressed in {seconds:.3} s ({:.2} GB/s written), copied in {copy:.3} s ({:.2} GB/s written)",
            bytes as f64 / seconds / 1e9,
            bytes as f64 / copy / 1e9,
        );
        if round > 0 {
            ratios.push(copy / seconds);
            speeds.push(bytes as f64 / seconds / 1e9);
        }
    }
    for (what, values) in [("GB/s written", &mut speeds), ("share of a copy", &mut ratios)] {
        values.sort_by(f64::total_cmp);
        println!("median {what}: {:.2}", values[values.len() / 2]);
    }
}
