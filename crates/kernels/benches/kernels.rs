//! Time of each kernel on one thread, a head of 4,096 rows and 128 lanes.
//!
//! ```text
//! cargo bench -p kvbaton-kernels
//! ```
//!
//! Rates are bytes read and written. `examples/ratio.rs` sets them against `memcpy` in the same run.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvbaton_kernels::{
    Affine, BoxMove, Elem, OnOverflow, Tally, Writing, affine_dequantize, affine_quantize, move_box,
};

const ROWS: usize = 4096;
const LANES: usize = 128;

/// As a large hand-off into used memory writes.
const WRITING: Writing = Writing { on_overflow: OnOverflow::Error, past_caches: true };

/// A box of one head; `src` and `dst` are encodings and strides of row and lane, in elements.
fn one_head(src: (Elem, [usize; 2]), dst: (Elem, [usize; 2])) -> BoxMove {
    let bytes = |(elem, [row, lane]): (Elem, [usize; 2])| {
        [0, (row * elem.bytes()).cast_signed(), (lane * elem.bytes()).cast_signed()]
    };
    BoxMove {
        extents: [1, ROWS, LANES],
        src_strides: bytes(src),
        dst_strides: bytes(dst),
        src: src.0,
        dst: dst.0,
    }
}

fn moves(criterion: &mut Criterion) {
    use Elem::*;
    let (packed, padded, channels) = ([LANES, 1], [160, 1], [1, ROWS]);
    let mut group = criterion.benchmark_group("move_box");
    for (name, mv) in [
        ("packed", one_head((F16, packed), (F16, packed))),
        ("padded rows", one_head((F16, padded), (F16, packed))),
        ("transpose f16", one_head((F16, channels), (F16, packed))),
        ("transpose f32", one_head((F32, channels), (F32, packed))),
        ("transpose u8", one_head((U8, channels), (U8, packed))),
        ("f16 to f32", one_head((F16, packed), (F32, packed))),
        ("f16 to bf16", one_head((F16, packed), (BF16, packed))),
        ("f32 to f16", one_head((F32, packed), (F16, packed))),
        ("transpose f16 to bf16", one_head((F16, channels), (BF16, packed))),
    ] {
        let src = vec![0x11_u8; ROWS * 160 * 4];
        let mut dst = vec![0_u8; ROWS * LANES * 4];
        group.throughput(Throughput::Bytes((mv.elements() * (mv.src.bytes() + mv.dst.bytes())) as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let mut tally = Tally::default();
                let (from, to) = (black_box(src.as_ptr()), dst.as_mut_ptr());
                // SAFETY: both buffers span the box, whose widest row is 160 elements of 4 bytes.
                unsafe { move_box(&mv, from, to, WRITING, &mut tally) };
                assert!(tally.is_clean(), "the source holds small values");
            });
        });
    }
    group.finish();
}

fn quantisation(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("affine");
    for bits in [4, 6, 8] {
        let scheme = Affine::new(bits, 64).expect("MLX has these");
        let lanes = ROWS * LANES;
        let mut values: Vec<u8> = (0..lanes * 2).map(|n| 0x11 + (n % 31) as u8).collect();
        let mut packed = vec![0; scheme.packed_bytes(lanes)];
        let [mut scales, mut biases] = [(); 2].map(|()| vec![0; scheme.groups(lanes) * 2]);
        let moved = values.len() + packed.len() + scales.len() + biases.len();
        group.throughput(Throughput::Bytes(moved as u64));
        group.bench_function(format!("quantise {bits} bits"), |bencher| {
            bencher.iter(|| {
                let values = black_box(&values);
                affine_quantize(scheme, Elem::F16, values, &mut packed, &mut scales, &mut biases);
            });
        });
        group.bench_function(format!("dequantise {bits} bits"), |bencher| {
            bencher.iter(|| {
                let packed = black_box(&packed);
                affine_dequantize(scheme, Elem::F16, packed, &scales, &biases, &mut values);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, moves, quantisation);
criterion_main!(benches);
