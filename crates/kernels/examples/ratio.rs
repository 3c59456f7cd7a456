//! Prints each kernel's speed as a share of `memcpy`'s, measured in the same run.
//!
//! ```text
//! cargo run --release -p kvbaton-kernels --example ratio -- [--kib N | --mib N] [--rounds N] [--threads N] [FILTER]
//! ```
//!
//! Every round times a `memcpy` that reads and writes as many bytes as the kernel, then the kernel, both into warm
//! memory. The table has the median rate of each and the median of the rounds' ratios. `--kib` or `--mib` is the size of the source.
#![expect(clippy::print_stdout, reason = "an example that prints its table")]

use std::hint::black_box;
use std::time::Instant;

use kvbaton_kernels::{
    Affine, BoxMove, Elem, Int8Rows, OnOverflow, ScalePer, Tally, Writing, affine_dequantize,
    affine_quantize, int8_decode, int8_encode, move_box,
};

/// A case: the box for a number of tokens, and the bytes it spans on either side.
struct Case {
    name: &'static str,
    mv: BoxMove,
    src_bytes: usize,
    dst_bytes: usize,
}

const HEADS: usize = 8;
const LANES: usize = 128;

/// As a large hand-off into used memory writes.
const WRITING: Writing = Writing { on_overflow: OnOverflow::Error, past_caches: true };

/// A box of 8 heads and 128 lanes; strides for `[head, row, lane]` in elements.
fn case(name: &'static str, rows: usize, src: (Elem, [usize; 3]), dst: (Elem, [usize; 3])) -> Case {
    let extents = [HEADS, rows, LANES];
    let bytes = |(elem, strides): (Elem, [usize; 3])| strides.map(|s| (s * elem.bytes()).cast_signed());
    let span = |(elem, strides): (Elem, [usize; 3])| {
        ((0..3).map(|axis| (extents[axis] - 1) * strides[axis]).sum::<usize>() + 1) * elem.bytes()
    };
    let mv = BoxMove { extents, src_strides: bytes(src), dst_strides: bytes(dst), src: src.0, dst: dst.0 };
    Case { name, mv, src_bytes: span(src), dst_bytes: span(dst) }
}

fn cases(rows: usize) -> Vec<Case> {
    use Elem::*;
    let packed = [rows * LANES, LANES, 1];
    let padded = [rows * 160, 160, 1];
    let rows_outside = [LANES, HEADS * LANES, 1];
    let channels = [rows * LANES, 1, rows];
    let capacity = rows.next_power_of_two();
    let channels_wide = [capacity * LANES, 1, capacity];
    let slack = [(rows + 256) * LANES, LANES, 1];
    vec![
        case("packed f16", rows, (F16, packed), (F16, packed)),
        case("packed f16, spare rows", rows, (F16, packed), (F16, slack)),
        case("rows 256 of 320 bytes -> packed", rows, (F16, padded), (F16, packed)),
        case("packed -> rows 256 of 320 bytes", rows, (F16, packed), (F16, padded)),
        case("rows 256 of 320 bytes -> same", rows, (F16, padded), (F16, padded)),
        case("NHD -> HND", rows, (F16, rows_outside), (F16, packed)),
        case("HND -> NHD", rows, (F16, packed), (F16, rows_outside)),
        case("BC1S -> HND f16", rows, (F16, channels), (F16, packed)),
        case("HND -> BC1S f16", rows, (F16, packed), (F16, channels)),
        case("BC1S -> HND f16, power-of-two", rows, (F16, channels_wide), (F16, packed)),
        case("HND -> BC1S f16, power-of-two", rows, (F16, packed), (F16, channels_wide)),
        case("BC1S -> HND f32", rows, (F32, channels), (F32, packed)),
        case("BC1S -> HND u8", rows, (U8, channels), (U8, packed)),
        case("f16 -> f32", rows, (F16, packed), (F32, packed)),
        case("f16 -> bf16", rows, (F16, packed), (BF16, packed)),
        case("f32 -> f16", rows, (F32, packed), (F16, packed)),
        case("f32 -> bf16", rows, (F32, packed), (BF16, packed)),
        case("bf16 -> f16", rows, (BF16, packed), (F16, packed)),
        case("bf16 -> f32", rows, (BF16, packed), (F32, packed)),
        case("rows 256 of 320 bytes, f16 -> bf16", rows, (F16, padded), (BF16, packed)),
        case("BC1S f16 -> HND bf16", rows, (F16, channels), (BF16, packed)),
    ]
}

struct Options {
    kib: usize,
    rounds: usize,
    threads: usize,
    filter: String,
}

fn options() -> Options {
    let mut options = Options { kib: 8 << 10, rounds: 31, threads: 1, filter: String::new() };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|n| n.parse().ok()).expect("a number after the option");
        match arg.as_str() {
            "--kib" => options.kib = number(),
            "--mib" => options.kib = number() << 10,
            "--rounds" => options.rounds = number(),
            "--threads" => options.threads = number(),
            _ => options.filter = arg,
        }
    }
    options
}

/// Seconds that `work(thread)` takes on every thread at once.
fn time(threads: usize, work: impl Fn(usize) + Sync) -> f64 {
    let start = Instant::now();
    if threads == 1 {
        work(0);
    } else {
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let work = &work;
                scope.spawn(move || work(thread));
            }
        });
    }
    start.elapsed().as_secs_f64()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Memory that scoped threads share; each thread works on bytes of its own.
struct Shared {
    memory: Vec<u8>,
    skip: usize,
}

impl Shared {
    /// Small finite values in every encoding, aligned to a cache line.
    fn new(bytes: usize) -> Shared {
        let memory: Vec<u8> = (0..bytes + 64).map(|n| 0x11 + (n % 31) as u8).collect();
        let skip = memory.as_ptr().addr().next_multiple_of(64) - memory.as_ptr().addr();
        Shared { memory, skip }
    }

    /// The address `offset` bytes in. Written through by one thread a byte: see the callers.
    fn at(&self, offset: isize) -> *mut u8 {
        black_box(self.memory[self.skip..].as_ptr()).cast_mut().wrapping_offset(offset)
    }
}

/// A kernel with its memory: what a thread does, and the bytes that all threads read and write.
struct Work<'a> {
    name: &'static str,
    moved: usize,
    run: Box<dyn Fn(usize) + Sync + 'a>,
}

fn moves(rows: usize, threads: usize) -> impl Iterator<Item = Work<'static>> {
    cases(rows).into_iter().map(move |case| {
        let (src, dst) = (Shared::new(case.src_bytes), Shared::new(case.dst_bytes));
        let moved = case.mv.elements() * (case.mv.src.bytes() + case.mv.dst.bytes());
        let run = move |thread: usize| {
            let heads = HEADS / threads;
            let first = (thread * heads).cast_signed();
            let mut mv = case.mv;
            mv.extents[0] = heads;
            let mut tally = Tally::default();
            let (src, dst) = (src.at(first * mv.src_strides[0]), dst.at(first * mv.dst_strides[0]));
            // SAFETY: the buffers span the box; each thread has heads of its own.
            unsafe { move_box(&mv, src, dst, WRITING, &mut tally) };
            assert!(tally.is_clean(), "the source holds small values");
        };
        Work { name: case.name, moved, run: Box::new(run) }
    })
}

fn int8(rows: usize, threads: usize) -> impl Iterator<Item = Work<'static>> {
    [("int8 + scale -> f16", true), ("f16 -> int8 + scale", false)].into_iter().map(move |(name, decode)| {
        let lines = HEADS * rows;
        let (codes, values) = (Shared::new(lines * LANES), Shared::new(lines * LANES * 2));
        let scales = Shared::new(lines * 2);
        let step = |bytes: usize| [(rows * bytes).cast_signed(), bytes.cast_signed()];
        let shape = Int8Rows {
            extents: [HEADS / threads, rows, LANES],
            code_strides: step(LANES),
            scale_strides: step(2),
            value_strides: step(LANES * 2),
            per: ScalePer::HeadRow,
            scale: Elem::F16,
            value: Elem::F16,
        };
        let run = move |thread: usize| {
            let first = (thread * (HEADS / threads) * rows).cast_signed();
            let lanes = first * LANES.cast_signed();
            let (codes, values, scales) =
                (codes.at(lanes).cast(), values.at(lanes * 2), scales.at(first * 2));
            let mut tally = Tally::default();
            // SAFETY: the buffers span the box; each thread has heads of its own.
            unsafe {
                if decode {
                    int8_decode(&shape, codes, scales, values, WRITING, &mut tally);
                } else {
                    int8_encode(&shape, values, codes, scales, &mut tally);
                }
            }
        };
        Work { name, moved: lines * (LANES * 3 + 2), run: Box::new(run) }
    })
}

fn affine(rows: usize, threads: usize) -> impl Iterator<Item = Work<'static>> {
    [
        ("8-bit quantise f16", 8, true),
        ("8-bit dequantise f16", 8, false),
        ("4-bit quantise f16", 4, true),
        ("4-bit dequantise f16", 4, false),
        ("6-bit quantise f16", 6, true),
        ("6-bit dequantise f16", 6, false),
    ]
    .into_iter()
    .map(move |(name, bits, quantise)| {
        let scheme = Affine::new(bits, 64).expect("MLX has these");
        let lanes = HEADS * rows / threads * LANES;
        let (packed, groups) = (scheme.packed_bytes(lanes), scheme.groups(lanes) * 2);
        let lengths = [lanes * 2, packed, groups, groups];
        let memory = lengths.map(|bytes| Shared::new(bytes * threads));
        let run = move |thread: usize| {
            // SAFETY: each thread has a part of each buffer of its own.
            let [values, packed, scales, biases] = std::array::from_fn(|n| unsafe {
                let start = memory[n].at((thread * lengths[n]).cast_signed());
                std::slice::from_raw_parts_mut(start, lengths[n])
            });
            if quantise {
                affine_quantize(scheme, Elem::F16, values, packed, scales, biases);
            } else {
                affine_dequantize(scheme, Elem::F16, packed, scales, biases, values);
            }
        };
        Work { name, moved: lengths.iter().sum::<usize>() * threads, run: Box::new(run) }
    })
}

fn main() {
    let Options { kib, rounds, threads, filter } = options();
    println!("{kib} KiB of f16, {rounds} rounds, {threads} threads");
    println!("{:38} {:>12} {:>12} {:>7}", "kernel", "memcpy GB/s", "kernel GB/s", "ratio");
    // Not a power of two, as a prompt's length is not.
    let rows = (kib << 10) / (HEADS * LANES * 2) - 8;
    let all = moves(rows, threads).chain(int8(rows, threads)).chain(affine(rows, threads));
    for work in all.filter(|work| work.name.contains(&filter)) {
        let share = work.moved / 2 / threads;
        let (from, to) = (Shared::new(share * threads), Shared::new(share * threads));
        let memcpy = |thread: usize| {
            let start = (thread * share).cast_signed();
            // SAFETY: each thread copies its own share of both buffers.
            unsafe { to.at(start).copy_from_nonoverlapping(from.at(start), share) };
        };
        let (mut plain, mut ours, mut ratios) = (vec![], vec![], vec![]);
        for round in 0..rounds + 2 {
            let (a, b) = (time(threads, memcpy), time(threads, &work.run));
            // Two rounds warm the memory.
            if round >= 2 {
                plain.push(a);
                ours.push(b);
                ratios.push(a / b);
            }
        }
        let rate = |seconds: &mut [f64]| work.moved as f64 / median(seconds) / 1e9;
        let (plain, ours) = (rate(&mut plain), rate(&mut ours));
        println!("{:38} {plain:12.1} {ours:12.1} {:7.2}", work.name, median(&mut ratios));
    }
}
