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

use kvbaton_kernels::{BoxMove, Elem, OnOverflow, Tally, move_box};

/// A case: the box for a number of tokens, and the bytes it spans on either side.
struct Case {
    name: &'static str,
    mv: BoxMove,
    src_bytes: usize,
    dst_bytes: usize,
}

const HEADS: usize = 8;
const LANES: usize = 128;

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

/// Pointers that scoped threads share; each thread works on bytes of its own.
#[derive(Clone, Copy)]
struct Shared(*const u8, *mut u8);
// SAFETY: the threads of `time` touch disjoint heads or halves.
unsafe impl Sync for Shared {}

impl Shared {
    fn get(&self) -> (*const u8, *mut u8) {
        (self.0, self.1)
    }
}

fn main() {
    let options = options();
    println!("{} KiB of f16, {} rounds, {} threads", options.kib, options.rounds, options.threads);
    println!("{:38} {:>12} {:>12} {:>7}", "kernel", "memcpy GB/s", "kernel GB/s", "ratio");
    // Not a power of two, as a prompt's length is not.
    let rows = (options.kib << 10) / (HEADS * LANES * 2) - 8;
    for case in cases(rows).iter().filter(|case| case.name.contains(&options.filter)) {
        // 1.0 in no encoding, but small and finite in all of them.
        let src = vec![0x11_u8; case.src_bytes + 64];
        let mut dst = vec![0x22_u8; case.dst_bytes + 64];
        let align = |at: usize| at.next_multiple_of(64) - at;
        let (src_skip, dst_skip) = (align(src.as_ptr().addr()), align(dst.as_ptr().addr()));
        let shared = Shared(src[src_skip..].as_ptr(), dst[dst_skip..].as_mut_ptr());
        let moved = case.mv.elements() * (case.mv.src.bytes() + case.mv.dst.bytes());
        let (mut from, mut to) = (vec![0x33_u8; moved / 2], vec![0x44_u8; moved / 2]);
        let plain = Shared(from.as_mut_ptr(), to.as_mut_ptr());
        let share = moved / 2 / options.threads;
        let memcpy = |thread: usize| {
            let (from, to) = plain.get();
            // SAFETY: each thread copies its own share of both buffers.
            unsafe {
                to.add(thread * share).copy_from_nonoverlapping(black_box(from).add(thread * share), share)
            };
        };
        let heads = HEADS / options.threads;
        let kernel = |thread: usize| {
            let (src, dst) = shared.get();
            let mut mv = case.mv;
            mv.extents[0] = heads;
            let first = (thread * heads).cast_signed();
            let mut tally = Tally::default();
            // SAFETY: the buffers span the box; each thread has heads of its own.
            unsafe {
                let (src, dst) =
                    (src.offset(first * mv.src_strides[0]), dst.offset(first * mv.dst_strides[0]));
                move_box(&mv, black_box(src), dst, OnOverflow::Error, &mut tally);
            }
            assert!(tally.is_clean(), "the source holds small values");
        };
        let (mut plain, mut ours, mut ratios) = (vec![], vec![], vec![]);
        for round in 0..options.rounds + 2 {
            let (a, b) = (time(options.threads, memcpy), time(options.threads, kernel));
            if round >= 2 {
                plain.push(a);
                ours.push(b);
                ratios.push(a / b);
            }
        }
        let rate = |seconds: &mut [f64]| moved as f64 / median(seconds) / 1e9;
        println!(
            "{:38} {:12.1} {:12.1} {:7.2}",
            case.name,
            rate(&mut plain),
            rate(&mut ours),
            median(&mut ratios)
        );
    }
}
