//! Times matrix products of a prefill, `f32` by fp16 weights: `cargo run --release -p kvbaton-kernels --example
//! roofline`.
#![expect(clippy::print_stdout, reason = "a developer's tool")]

use half::f16;
use kvbaton_kernels::rows::{Isa, Matrix, Product, Source, multiply};
use std::time::Instant;

fn main() {
    let isa = Isa::best();
    println!("{} threads, {}", rayon::current_num_threads(), isa.name());
    for (m, k, n) in [
        (512, 576, 576),
        (512, 576, 1536),
        (512, 1536, 576),
        (512, 576, 192),
        (128, 576, 1536),
        (512, 2048, 8192),
        (1, 576, 49152),
    ] {
        let left: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
        let right: Vec<f16> = (0..k * n).map(|i| f16::from_f32((i % 13) as f32 * 0.1 - 0.6)).collect();
        let mut out = vec![0.0; m * n];
        let right = Matrix { values: Source::Halves(&right), k, n, k_stride: 1, n_stride: k };
        let product = Product { left: &left, left_stride: k, m, right, bias: None, half: true };
        let mut times: Vec<f64> = (0..15)
            .map(|_| {
                let start = Instant::now();
                multiply(isa, &product, &mut out);
                start.elapsed().as_secs_f64()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let gigaflops = |t: f64| 2.0 * (m * n * k) as f64 / t / 1e9;
        println!("{m}x{k}x{n}: median {:.0}, best {:.0} GFLOP/s", gigaflops(times[7]), gigaflops(times[0]));
    }
}
