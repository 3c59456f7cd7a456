//! Row passes over values in the first-level cache, on every instruction set: `cargo bench -p kvbaton-kernels --bench
//! rows`.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvbaton_kernels::rows::{Binary, Isa, Source, Unary, binary, layer_norm, softmax, unary};
use std::hint::black_box;

const LEN: usize = 1536;

fn rows(c: &mut Criterion) {
    let x: Vec<f32> = (0..LEN).map(|i| (i % 97) as f32 * 0.1 - 4.0).collect();
    let y: Vec<f32> = (0..LEN).map(|i| (i % 89) as f32 * 0.1 - 4.0).collect();
    let mut out = vec![0.0; LEN];
    for isa in Isa::available() {
        let mut group = c.benchmark_group("rows");
        group.throughput(Throughput::Elements(LEN as u64));
        let mut bench = |name: &str, run: &mut dyn FnMut(&mut [f32])| {
            group.bench_function(BenchmarkId::new(name, isa.name()), |b| {
                b.iter(|| run(black_box(&mut out)));
            });
        };
        let (a, b) = (Source::Singles(&x), Source::Singles(&y));
        bench("mul", &mut |out| binary(isa, Binary::Mul, a, b, out, true));
        bench("silu", &mut |out| unary(isa, &Unary::Silu, a, out, true));
        bench("exp", &mut |out| unary(isa, &Unary::Exp, a, out, true));
        bench("layer_norm", &mut |out| layer_norm(isa, &x, 1e-5, None, None, out, true));
        bench("softmax", &mut |out| {
            out.copy_from_slice(&x);
            softmax(isa, out, true);
        });
        group.finish();
    }
    // A bench checks its answer: a softmax sums to 1 up to fp16 roundings.
    let sum: f32 = out.iter().sum();
    assert!((sum - 1.0).abs() < 1e-2, "the softmax sums to {sum}");
}

criterion_group!(benches, rows);
criterion_main!(benches);
