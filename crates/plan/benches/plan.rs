//! Planning, and resolving before it: 64 layers, the figure to stay below is 100 µs for a plan.

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use kvbaton_layout::{CacheSpec, DType, Layout, LiveRows, Resolved, Sizes, TensorInfo, presets};
use kvbaton_plan::plan;

struct Side {
    layout: Layout,
    tensors: Vec<TensorInfo>,
    live: LiveRows,
}

impl Side {
    fn new(name: &str, cache: &CacheSpec) -> Side {
        let layout = presets::get(name).expect("a preset");
        let sizes = Sizes { capacity: 512, dtype: DType::Float16, block_rows: 16, row_stride_bytes: None };
        let tensors = layout.tensors(cache, &sizes).expect("a uniform model fits");
        let live = LiveRows { block_table: Some((0..32).collect()), pad: Some(0), ..LiveRows::seen(300) };
        Side { layout, tensors, live }
    }

    fn resolve(&self, cache: &CacheSpec) -> Resolved {
        self.layout.resolve(cache, &self.tensors, &self.live).expect("its own tensors")
    }
}

fn planning(c: &mut Criterion) {
    let cache = CacheSpec::full(64, 8, 128);
    let mlx = Side::new("mlx-lm", &cache);
    let mut group = c.benchmark_group("64 layers to mlx-lm");
    for name in
        ["yetter", "kvbaton-per-layer", "coreai-ios", "executorch-static-heads", "vllm-nhd", "mlx-lm-8bit"]
    {
        let source = Side::new(name, &cache);
        let (from, to) = (source.resolve(&cache), mlx.resolve(&cache));
        let planned = plan(&from, &to, &cache).expect("a plan");
        assert_eq!(planned.bytes_written(), 64 * 2 * 8 * 300 * 128 * 2, "{name}");
        group.bench_function(format!("plan {name}"), |b| {
            b.iter(|| plan(black_box(&from), black_box(&to), &cache).expect("a plan"));
        });
        group.bench_function(format!("resolve and plan {name}"), |b| {
            b.iter(|| plan(&source.resolve(&cache), &mlx.resolve(&cache), &cache).expect("a plan"));
        });
    }
}

criterion_group!(benches, planning);
criterion_main!(benches);
