//! Rows that are coded on the way, on one thread: eight layers of 8 heads, 1,024 rows of 128 lanes.
//!
//! ```text
//! cargo bench -p kvbaton-copy
//! ```
//!
//! Rates are bytes read and written; `plain` is the move that all others are compared with.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvbaton_copy::{CopyOptions, Threads, run};
use kvbaton_layout::{CacheSpec, DType, Layout, LiveRows, Resolved, Sizes, TensorInfo, presets};
use kvbaton_plan::plan;

struct Side {
    infos: Vec<TensorInfo>,
    resolved: Resolved,
}

impl Side {
    fn new(layout: &Layout, cache: &CacheSpec) -> Side {
        let sizes = Sizes { capacity: 1024, dtype: DType::Float16, block_rows: 16, row_stride_bytes: None };
        let infos = layout.tensors(cache, &sizes).expect("a uniform model fits");
        let live = LiveRows { pad: Some(0), ..LiveRows::seen(1024) };
        let resolved = layout.resolve(cache, &infos, &live).expect("its own tensors");
        Side { infos, resolved }
    }

    /// Buffers of small floats: every half is between 1 and 2.
    fn buffers(&self) -> Vec<Vec<u8>> {
        let bytes = |len: usize| (0..len / 2).flat_map(|i| [(i * 37) as u8, 0x3C | (i & 3) as u8]).collect();
        self.infos.iter().map(|t| bytes(t.len_bytes)).collect()
    }
}

fn coding(c: &mut Criterion) {
    let cache = CacheSpec::full(8, 8, 128);
    let threads = Threads::new(1);
    let mut group = c.benchmark_group("coded");
    group.sample_size(20);
    let preset = |name: &str| presets::get(name).expect("a preset");
    let eight = preset("mlx-lm-8bit");
    let cases = [
        ("plain", preset("mlx-lm"), preset("mlx-lm")),
        ("to 8 bits", preset("mlx-lm"), eight.clone()),
        ("to 4 bits", preset("mlx-lm"), preset("mlx-lm-4bit")),
        ("from 8 bits", eight.clone(), preset("mlx-lm")),
        ("from 4 bits", preset("mlx-lm-4bit"), preset("mlx-lm")),
        ("8 bits to 4", eight, preset("mlx-lm-4bit")),
        ("to int8 values", preset("mlx-lm"), preset("forge-v8")),
        ("from int8 values", preset("forge-v8"), preset("mlx-lm")),
    ];
    for (name, source, target) in cases {
        let (source, target) = (Side::new(&source, &cache), Side::new(&target, &cache));
        let (from, mut to) = (source.buffers(), target.buffers());
        let planned = plan(&source.resolved, &target.resolved, &cache).expect("a plan");
        group.throughput(Throughput::Bytes((planned.bytes_read() + planned.bytes_written()) as u64));
        group.bench_function(name, |b| {
            let from: Vec<&[u8]> = from.iter().map(Vec::as_slice).collect();
            let mut to: Vec<&mut [u8]> = to.iter_mut().map(Vec::as_mut_slice).collect();
            b.iter(|| run(&planned, &from, &mut to, &threads, CopyOptions::default()).expect("a copy"));
        });
    }
}

criterion_group!(benches, coding);
criterion_main!(benches);
