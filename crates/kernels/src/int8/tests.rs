use half::f16;
use proptest::prelude::*;

use super::*;

/// Packed rows of f16 values and f16 scales.
fn rows(extents: [usize; 3], per: ScalePer) -> Int8Rows {
    let [_, tokens, lanes] = extents.map(usize::cast_signed);
    Int8Rows {
        extents,
        // A byte and an element of padding: nothing is aligned, and nothing beside the rows may change.
        code_strides: [tokens * (lanes + 1), lanes + 1],
        scale_strides: [2 * tokens, 2],
        value_strides: [tokens * 2 * (lanes + 1), 2 * (lanes + 1)],
        per,
        scale: Elem::F16,
        value: Elem::F16,
    }
}

fn padded(extents: [usize; 3]) -> usize {
    extents[0] * extents[1] * (extents[2] + 1)
}

fn encode(cpu: Cpu, rows: &Int8Rows, values: &[f16]) -> (Vec<i8>, Vec<f16>, Tally) {
    let mut codes = vec![99; padded(rows.extents)];
    let mut scales = vec![f16::NAN; rows.extents[0] * rows.extents[1]];
    let mut tally = Tally::default();
    let to = (codes.as_mut_ptr(), scales.as_mut_ptr().cast());
    // SAFETY: the buffers span the box.
    unsafe { encode_on(cpu, rows, values.as_ptr().cast(), to.0, to.1, &mut tally) };
    (codes, scales, tally)
}

fn decode(cpu: Cpu, rows: &Int8Rows, codes: &[i8], scales: &[f16], policy: OnOverflow) -> (Vec<f16>, Tally) {
    let mut values = vec![f16::from_f32(-77.0); padded(rows.extents)];
    let mut tally = Tally::default();
    let to = values.as_mut_ptr().cast();
    // SAFETY: the buffers span the box.
    unsafe { decode_on(cpu, rows, codes.as_ptr(), scales.as_ptr().cast(), to, policy.into(), &mut tally) };
    (values, tally)
}

proptest! {
    /// Codes and scales against the definition in the module's own words, lane by lane.
    #[test]
    fn coding_and_decoding_match_the_definition(
        extents in [1..4_usize, 1..5_usize, 1..200_usize],
        per_row in any::<bool>(),
        seed in prop::collection::vec(-60.0_f32..60.0, 4 * 5 * 201),
        shrink in prop::sample::select(vec![1.0_f32, 1e-3, 1e-7, 0.0]),
    ) {
        let rows = rows(extents, if per_row { ScalePer::Row } else { ScalePer::HeadRow });
        let [heads, tokens, lanes] = extents;
        let values: Vec<f16> = seed[..padded(extents)].iter().map(|v| f16::from_f32(v * shrink)).collect();
        let index = |head: usize, row: usize, lane: usize| (head * tokens + row) * (lanes + 1) + lane;
        for cpu in Cpu::all() {
            let (codes, scales, tally) = encode(cpu, &rows, &values);
            prop_assert!(tally.is_clean());
            let (back, tally) = decode(cpu, &rows, &codes, &scales, OnOverflow::Error);
            prop_assert!(tally.is_clean());
            for head in 0..heads {
                for row in 0..tokens {
                    let sharing = if per_row { 0..heads } else { head..head + 1 };
                    let largest = sharing
                        .flat_map(|head| (0..lanes).map(move |lane| (head, lane)))
                        .fold(0.0_f32, |max, (head, lane)| max.max(values[index(head, row, lane)].to_f32().abs()));
                    let scale = f16::from_f32((largest / 127.0).max(1e-6));
                    if per_row && head > 0 {
                        prop_assert!(scales[head * tokens + row].is_nan(), "one scale a row");
                    } else {
                        prop_assert_eq!(scales[head * tokens + row], scale);
                    }
                    for lane in 0..lanes {
                        let value = values[index(head, row, lane)].to_f32();
                        let code = (value / scale.to_f32()).round_ties_even().clamp(-127.0, 127.0);
                        prop_assert_eq!(f32::from(codes[index(head, row, lane)]), code);
                        prop_assert_eq!(back[index(head, row, lane)], f16::from_f32(code * scale.to_f32()));
                    }
                    prop_assert_eq!(codes[index(head, row, lanes)], 99, "padding");
                    prop_assert_eq!(back[index(head, row, lanes)], f16::from_f32(-77.0), "padding");
                }
            }
        }
    }
}

#[test]
fn overflow_in_decoding_is_counted_and_clamped_on_request() {
    let rows = rows([1, 2, 4300], ScalePer::HeadRow);
    let mut codes = vec![1_i8; padded(rows.extents)];
    codes[4301 + 4200] = -100;
    let scales = [f16::ONE, f16::from_f32(1000.0)];
    for cpu in Cpu::all() {
        for (policy, written) in [(OnOverflow::Count, f16::NEG_INFINITY), (OnOverflow::Clamp, f16::MIN)] {
            let (values, tally) = decode(cpu, &rows, &codes, &scales, policy);
            assert_eq!((tally.overflow, tally.first_overflow), (1, Some([0, 1, 4200])));
            assert_eq!(values[4301 + 4200], written);
        }
    }
}

#[test]
fn values_that_are_not_finite_are_counted_in_coding() {
    let rows = rows([2, 1, 40], ScalePer::HeadRow);
    let mut values = vec![f16::ONE; padded(rows.extents)];
    values[41 + 3] = f16::NAN;
    values[5] = f16::INFINITY;
    for cpu in Cpu::all() {
        let (codes, _, tally) = encode(cpu, &rows, &values);
        assert_eq!((tally.nan, tally.first_nan), (1, Some([1, 0, 3])));
        assert_eq!((tally.infinity, tally.first_infinity), (1, Some([0, 0, 5])));
        assert_eq!((codes[41], codes[41 + 3]), (127, -127));
    }
}

#[test]
fn a_scale_too_large_for_its_encoding_is_an_overflow() {
    let values = [1e7_f32, 0.0];
    let rows = Int8Rows {
        extents: [1, 1, 2],
        code_strides: [0, 0],
        scale_strides: [0, 0],
        value_strides: [0, 0],
        per: ScalePer::HeadRow,
        scale: Elem::F16,
        value: Elem::F32,
    };
    for cpu in Cpu::all() {
        let (mut codes, mut scale, mut tally) = ([0_i8; 2], f16::ZERO, Tally::default());
        let to = (codes.as_mut_ptr(), (&raw mut scale).cast());
        // SAFETY: the buffers span the box.
        unsafe { encode_on(cpu, &rows, values.as_ptr().cast(), to.0, to.1, &mut tally) };
        assert_eq!((tally.overflow, tally.first_overflow, scale), (1, Some([0, 0, 0]), f16::INFINITY));
    }
}
