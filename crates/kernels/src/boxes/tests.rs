//! Every route on every instruction set, against the definition.

use proptest::prelude::*;

use super::*;
use crate::OnOverflow;

/// A buffer with every byte that a move must not touch known.
const UNTOUCHED: u8 = 0xA5;

/// One case: a move whose strides come from an order of the axes and a padding after each.
#[derive(Clone, Debug)]
struct Case {
    mv: BoxMove,
    src: Vec<u8>,
    dst_bytes: usize,
    writing: Writing,
}

/// Strides of a box whose axes lie in memory in `order`, innermost last, each followed by `padding` bytes.
fn strides(extents: [usize; 3], order: [usize; 3], bytes: usize, padding: [usize; 3]) -> ([isize; 3], usize) {
    let (mut strides, mut span) = ([0; 3], bytes);
    for (axis, padding) in order.into_iter().rev().zip(padding) {
        strides[axis] = span.cast_signed();
        span = span * extents[axis] + padding;
    }
    (strides, span)
}

fn order() -> impl Strategy<Value = [usize; 3]> {
    Just([0, 1, 2]).prop_shuffle()
}

fn encodings() -> impl Strategy<Value = (Elem, Elem)> {
    use Elem::*;
    let floats = || prop::sample::select(vec![F16, BF16, F32]);
    prop_oneof![
        prop::sample::select(vec![F16, F32, I8, U8, U16, U32, U64]).prop_map(|elem| (elem, elem)),
        (floats(), floats()),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let extent = || prop_oneof![3 => 1..5_usize, 2 => 5..40_usize, 1 => 60..140_usize];
    // The last padding is often zero, so that neighbours are neighbours.
    let padding =
        || (prop_oneof![4 => Just(0), 1 => 1..9_usize], prop_oneof![Just(0), 1..70_usize], 0..9_usize);
    (
        ([extent(), extent(), extent()], encodings()),
        (order(), order()),
        (padding(), padding()),
        writing(),
        any::<u64>(),
    )
        .prop_map(
            |((extents, (src, dst)), (src_order, dst_order), (src_pad, dst_pad), writing, seed)| {
                // The first padding separates elements themselves.
                let spread = |bytes, (element, line, plane): (usize, usize, usize), order| {
                    strides(extents, order, bytes + element, [line, plane, 0])
                };
                let (src_strides, src_bytes) = spread(src.bytes(), src_pad, src_order);
                let (dst_strides, dst_bytes) = spread(dst.bytes(), dst_pad, dst_order);
                let mv = BoxMove { extents, src_strides, dst_strides, src, dst };
                Case { mv, src: noise(src, src_bytes, seed), dst_bytes, writing }
            },
        )
}

fn writing() -> impl Strategy<Value = Writing> {
    let policies = vec![OnOverflow::Error, OnOverflow::Clamp, OnOverflow::Count];
    (prop::sample::select(policies), any::<bool>())
        .prop_map(|(on_overflow, past_caches)| Writing { on_overflow, past_caches })
}

/// Bytes that decode as mostly ordinary floats of `elem`, with now and then any bits at all.
fn noise(elem: Elem, bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 32) as u32
    };
    let rare = next() % 3 == 0;
    let mut out: Vec<u8> = (0..bytes).map(|_| next() as u8).collect();
    if elem.is_float() && !rare {
        // Clearing the exponent's top bit keeps a value small wherever it is read from.
        out.iter_mut().for_each(|byte| *byte &= 0xBF);
        if next() % 2 == 0 {
            let at = next() as usize % bytes;
            out[at] = 0xFF;
        }
    }
    out
}

fn run(cpu: Option<Cpu>, case: &Case) -> (Vec<u8>, Tally) {
    let mut dst = vec![UNTOUCHED; case.dst_bytes];
    let mut tally = Tally::default();
    let (src, to) = (case.src.as_ptr(), dst.as_mut_ptr());
    // SAFETY: both buffers span the box; see `strides`.
    unsafe {
        match cpu {
            Some(cpu) => move_box_on(cpu, &case.mv, src, to, case.writing, &mut tally),
            None => definition::move_box(&case.mv, src, to, case.writing.on_overflow, &mut tally),
        }
    }
    (dst, tally)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    /// Equal destinations also mean that nothing outside the box was written.
    #[test]
    fn every_route_matches_the_definition(case in case()) {
        let expected = run(None, &case);
        for cpu in Cpu::all() {
            let got = run(Some(cpu), &case);
            prop_assert_eq!(got.1, expected.1, "tally on {:?}", cpu);
            if let Some(at) = (0..case.dst_bytes).find(|&at| got.0[at] != expected.0[at]) {
                prop_assert!(false, "byte {} is {:#x} and should be {:#x} on {:?}", at, got.0[at], expected.0[at], cpu);
            }
        }
    }
}

proptest! {
    /// A scan counts what a conversion to its target counts.
    #[test]
    fn a_scan_counts_as_a_conversion_does(case in case()) {
        prop_assume!(case.mv.src.is_float());
        let mv = case.mv;
        let (_, expected) = run(None, &case);
        let mut tally = Tally::default();
        // SAFETY: the source spans the box.
        unsafe { scan_box(mv.src, mv.dst, mv.extents, mv.src_strides, case.src.as_ptr(), &mut tally) };
        if mv.src == mv.dst {
            // A move reads no values: count them here.
            let wide = BoxMove { dst: if mv.src == Elem::F32 { Elem::F16 } else { Elem::F32 }, ..mv };
            let (strides, bytes) = strides(mv.extents, [0, 1, 2], wide.dst.bytes(), [0; 3]);
            let wide = BoxMove { dst_strides: strides, ..wide };
            let (_, expected) = run(None, &Case { mv: wide, dst_bytes: bytes, ..case });
            prop_assert_eq!((tally.nan, tally.first_nan), (expected.nan, expected.first_nan));
            prop_assert_eq!((tally.infinity, tally.first_infinity), (expected.infinity, expected.first_infinity));
            prop_assert_eq!(tally.overflow, 0);
        } else {
            prop_assert_eq!(tally, expected);
        }
    }
}

/// A destination of cache lines, whose lines start `skip` bytes into one.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct CacheLine([u8; 64]);

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Large boxes, whose destinations start and end on and off the boundaries of cache lines.
    #[test]
    fn large_boxes_match_the_definition(
        (src, dst) in encodings(),
        extents in ((1..4_usize, 300..600_usize, prop::sample::select(vec![64_usize, 96, 128])), order())
            .prop_map(|((heads, rows, lanes), order)| order.map(|axis| [heads, rows, lanes][axis])),
        orders in (order(), order()),
        src_pad in prop::sample::select(vec![0_usize, 64, 6]),
        dst_pad in prop::sample::select(vec![0_usize, 64, 6]),
        skip in prop::sample::select(vec![0_usize, 24, 3]),
        writing in writing(),
        seed in any::<u64>(),
    ) {
        let (src_strides, src_bytes) = strides(extents, orders.0, src.bytes(), [0, src_pad, 0]);
        let (dst_strides, dst_bytes) = strides(extents, orders.1, dst.bytes(), [0, dst_pad, 0]);
        let mv = BoxMove { extents, src_strides, dst_strides, src, dst };
        let case = Case { mv, src: noise(src, src_bytes, seed), dst_bytes, writing };
        let expected = run(None, &case);
        for cpu in Cpu::all() {
            let mut lines = vec![CacheLine([UNTOUCHED; 64]); (skip + dst_bytes).div_ceil(64)];
            let mut tally = Tally::default();
            let to = lines.as_mut_ptr().cast::<u8>().wrapping_add(skip);
            // SAFETY: both buffers span the box.
            unsafe { move_box_on(cpu, &mv, case.src.as_ptr(), to, case.writing, &mut tally) };
            prop_assert_eq!(tally, expected.1, "tally on {:?}", cpu);
            let got = lines.iter().flat_map(|line| line.0);
            let wrong = got.skip(skip).zip(&expected.0).position(|(got, expected)| got != *expected);
            prop_assert!(wrong.is_none(), "byte {} on {:?}", wrong.unwrap_or(0), cpu);
        }
    }
}

/// A move of one line of `src` elements.
fn line(src: Elem, dst: Elem, values: Vec<u8>, policy: OnOverflow) -> Case {
    let lanes = values.len() / src.bytes();
    let mv = BoxMove {
        extents: [1, 1, lanes],
        src_strides: [0, 0, src.bytes().cast_signed()],
        dst_strides: [0, 0, dst.bytes().cast_signed()],
        src,
        dst,
    };
    Case { mv, src: values, dst_bytes: lanes * dst.bytes(), writing: policy.into() }
}

/// All 65,536 patterns of a 16-bit encoding.
fn all_patterns() -> Vec<u8> {
    (0..=u16::MAX).flat_map(u16::to_le_bytes).collect()
}

/// `half` is the oracle: `convert(pattern)` says what each pattern becomes. A NaN may be any NaN.
fn check_all<const N: usize>(
    src: Elem,
    dst: Elem,
    convert: impl Fn(u16) -> [u8; N],
    is_nan: impl Fn([u8; N]) -> bool,
) {
    for cpu in Cpu::all() {
        let (got, _) = run(Some(cpu), &line(src, dst, all_patterns(), OnOverflow::Count));
        for (pattern, got) in (0..=u16::MAX).zip(got.as_chunks::<N>().0) {
            let expected = convert(pattern);
            assert!(
                *got == expected || (is_nan(*got) && is_nan(expected)),
                "{src:?} {pattern:#06x} became {got:x?}, not {expected:x?} on {cpu:?}"
            );
        }
    }
}

#[test]
fn all_16_bit_patterns_convert_as_half_does() {
    use half::{bf16, f16};
    let nan_f16 = |b| f16::from_le_bytes(b).is_nan();
    let nan_bf16 = |b| bf16::from_le_bytes(b).is_nan();
    let nan_f32 = |b| f32::from_le_bytes(b).is_nan();
    check_all(Elem::F16, Elem::F32, |p| f16::from_bits(p).to_f32().to_le_bytes(), nan_f32);
    check_all(Elem::BF16, Elem::F32, |p| bf16::from_bits(p).to_f32().to_le_bytes(), nan_f32);
    check_all(Elem::F16, Elem::BF16, |p| bf16::from_f32(f16::from_bits(p).to_f32()).to_le_bytes(), nan_bf16);
    check_all(Elem::BF16, Elem::F16, |p| f16::from_f32(bf16::from_bits(p).to_f32()).to_le_bytes(), nan_f16);
}

/// Every 16-bit pattern as an f32, its neighbours, and the points halfway to the next pattern with theirs.
#[test]
fn f32_narrows_as_half_does_around_every_16_bit_value() {
    use half::{bf16, f16};
    let around = |value: f32, step: u32| {
        let bits = value.to_bits();
        [bits, bits.wrapping_add(step / 2)]
            .into_iter()
            .flat_map(|bits| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)])
            .map(f32::from_bits)
    };
    for (dst, step, to_f32) in [
        (Elem::F16, 1 << 13, (|p| f16::from_bits(p).to_f32()) as fn(u16) -> f32),
        (Elem::BF16, 1 << 16, |p| bf16::from_bits(p).to_f32()),
    ] {
        let values: Vec<f32> = (0..=u16::MAX).flat_map(|p| around(to_f32(p), step)).collect();
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let case = line(Elem::F32, dst, bytes, OnOverflow::Count);
        for cpu in Cpu::all() {
            let (got, _) = run(Some(cpu), &case);
            for (value, got) in values.iter().zip(got.as_chunks::<2>().0) {
                let got = u16::from_le_bytes(*got);
                let (expected, is_nan) = match dst {
                    Elem::F16 => (f16::from_f32(*value).to_bits(), f16::from_bits(got).is_nan()),
                    _ => (bf16::from_f32(*value).to_bits(), bf16::from_bits(got).is_nan()),
                };
                assert!(
                    got == expected || (value.is_nan() && is_nan),
                    "{value:e} became {got:#06x} on {cpu:?}"
                );
            }
        }
    }
}

#[test]
fn overflow_is_counted_where_it_happens_and_clamped_on_request() {
    let mut values = vec![1.0_f32; 4 * 300];
    values[2 * 300 + 7] = 65519.0;
    values[2 * 300 + 8] = 65520.0;
    values[3 * 300] = -1e30;
    values[5] = f32::NEG_INFINITY;
    values[6] = f32::NAN;
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    for policy in [OnOverflow::Error, OnOverflow::Clamp, OnOverflow::Count] {
        let mut case = line(Elem::F32, Elem::F16, bytes.clone(), policy);
        case.mv.extents = [2, 2, 300];
        (case.mv.src_strides, case.mv.dst_strides) = ([2400, 1200, 4], [1200, 600, 2]);
        for cpu in Cpu::all() {
            let (got, tally) = run(Some(cpu), &case);
            assert_eq!((tally.overflow, tally.infinity, tally.nan), (2, 1, 1), "{cpu:?}");
            assert_eq!(tally.first_overflow, Some([1, 0, 8]));
            assert_eq!((tally.first_infinity, tally.first_nan), (Some([0, 0, 5]), Some([0, 0, 6])));
            let at = |index: usize| u16::from_le_bytes([got[index * 2], got[index * 2 + 1]]);
            let clamped = policy == OnOverflow::Clamp;
            assert_eq!(at(607), 0x7BFF);
            assert_eq!(at(608), if clamped { 0x7BFF } else { 0x7C00 });
            assert_eq!(at(900), if clamped { 0xFBFF } else { 0xFC00 });
            assert_eq!(at(5), 0xFC00, "an infinity is not an overflow and stays one");
        }
    }
}

/// Larger than a block of tiles on both sides, with tiles that stick out, in both orders of the walk.
#[test]
fn a_matrix_of_several_blocks_is_transposed_whole() {
    for elem in [Elem::U8, Elem::U16, Elem::U32, Elem::U64] {
        for [rows, cols] in [[530, 290], [70, 1100], [1100, 70]] {
            let extents = [1, rows, cols];
            let (src_strides, src_bytes) = strides(extents, [0, 1, 2], elem.bytes(), [0, 24, 0]);
            let (dst_strides, dst_bytes) = strides(extents, [0, 2, 1], elem.bytes(), [0, 8, 0]);
            let mv = BoxMove { extents, src_strides, dst_strides, src: elem, dst: elem };
            let case = Case { mv, src: noise(elem, src_bytes, 3), dst_bytes, writing: Writing::default() };
            let expected = run(None, &case).0;
            for cpu in Cpu::all() {
                assert!(run(Some(cpu), &case).0 == expected, "{elem:?}, {rows} × {cols} on {cpu:?}");
            }
        }
    }
}

#[test]
fn padded_rows_keep_their_padding() {
    let mv = BoxMove {
        extents: [2, 3, 2],
        src_strides: [30, 10, 2],
        dst_strides: [24, 8, 2],
        src: Elem::U16,
        dst: Elem::U16,
    };
    let case = Case { mv, src: (0..60).collect(), dst_bytes: 48, writing: Writing::default() };
    for cpu in Cpu::all() {
        let (got, _) = run(Some(cpu), &case);
        for row in 0..6_u8 {
            let (at, v) = (usize::from(row) * 8, row * 10);
            let pad = UNTOUCHED;
            assert_eq!(got[at..at + 8], [v, v + 1, v + 2, v + 3, pad, pad, pad, pad]);
        }
    }
}

#[test]
fn a_source_stride_of_zero_repeats_a_row() {
    let mv = BoxMove {
        extents: [1, 40, 64],
        src_strides: [0, 0, 2],
        dst_strides: [0, 128, 2],
        src: Elem::F16,
        dst: Elem::F16,
    };
    let src = noise(Elem::U16, 128, 7);
    let case = Case { mv, src: src.clone(), dst_bytes: 40 * 128, writing: Writing::default() };
    for cpu in Cpu::all() {
        assert_eq!(run(Some(cpu), &case).0, src.repeat(40));
    }
}

#[test]
fn an_empty_box_moves_nothing() {
    let mut case = line(Elem::F32, Elem::F16, vec![0; 8], OnOverflow::Error);
    case.mv.extents = [3, 0, 2];
    assert_eq!(run(Some(Cpu::best()), &case), (vec![UNTOUCHED; 4], Tally::default()));
}

#[test]
#[should_panic(expected = "no conversion from U8 to F32")]
fn codes_do_not_become_floats_without_a_scale() {
    run(Some(Cpu::Scalar), &line(Elem::U8, Elem::F32, vec![0; 8], OnOverflow::Error));
}
