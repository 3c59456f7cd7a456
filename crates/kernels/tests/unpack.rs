//! Decompression passes against their definitions, bit by bit and value by value.

use half::f16;
use kvbaton_kernels::rows::{Isa, expand, expand_codes, keep, lookup, numbers, shift_scale, unpack};
use proptest::prelude::*;

/// Code `i` of `bits` bits, the lowest first: the definition.
fn code(packed: &[u8], bits: usize, i: usize) -> u8 {
    (0..bits).fold(0, |code, b| {
        let at = i * bits + b;
        code | (packed[at / 8] >> (at % 8) & 1) << b
    })
}

fn rounded(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

proptest! {
    #[test]
    fn unpacking_equals_its_definition(
        bits in 1usize..=8,
        packed in prop::collection::vec(any::<u8>(), 0..200),
        spare in 0usize..9,
    ) {
        let n = (packed.len() * 8 / bits).saturating_sub(spare);
        for isa in Isa::available() {
            let mut got = vec![0xA5; n];
            unpack(isa, bits, &packed, &mut got);
            let want: Vec<u8> = (0..n).map(|i| code(&packed, bits, i)).collect();
            prop_assert_eq!(&got, &want, "{} {} bits", isa.name(), bits);
            for signed in [false, true] {
                let mut got = vec![f32::NAN; n];
                numbers(isa, bits, signed, &want, &mut got);
                for (x, c) in got.iter().zip(&want) {
                    let c = i32::from(*c);
                    let negative = signed && c >= 1 << (bits - 1);
                    prop_assert_eq!(*x, (c - if negative { 1 << bits } else { 0 }) as f32);
                }
            }
        }
    }

    #[test]
    fn stored_values_go_where_bits_are_set(
        bits in prop::collection::vec(any::<u8>(), 0..40),
        dense: bool,
        skip in 0usize..8,
        spare in 0usize..20,
        more in 0usize..20,
    ) {
        let bits: Vec<u8> = if dense { bits.iter().map(|b| b | b.rotate_left(3)).collect() } else { bits };
        let n = (bits.len() * 8).saturating_sub(skip + spare);
        let set = |i: usize| code(&bits, 1, skip + i) == 1;
        let mut next = 0u16;
        let want: Vec<u8> = (0..n).map(|i| if set(i) { next += 1; (next % 251 + 1) as u8 } else { 0 }).collect();
        let mut stored: Vec<u8> = want.iter().copied().filter(|v| *v > 0).collect();
        // Values of later elements follow, or none do.
        stored.extend(std::iter::repeat_n(99, more));
        let floats = |v: &[u8]| v.iter().map(|v| f32::from(*v)).collect::<Vec<f32>>();
        for isa in Isa::available() {
            let mut got = vec![0xA5; n];
            expand_codes(isa, &bits, skip, &stored, &mut got);
            prop_assert_eq!(&got, &want, "{}", isa.name());
            let mut got = vec![f32::NAN; n];
            expand(isa, &bits, skip, &floats(&stored), &mut got);
            prop_assert_eq!(&got, &floats(&want), "{}", isa.name());
            let mut got: Vec<f32> = (0..n).map(|i| if set(i) { f32::from(want[i]) } else { f32::NAN }).collect();
            keep(isa, &bits, skip, &mut got);
            prop_assert_eq!(&got, &floats(&want), "{}", isa.name());
        }
    }

    #[test]
    fn shifts_and_scales_equal_their_definition(
        n in 0usize..150, block in 1usize..70, skip: usize, offset: bool, half: bool, seed: u32,
    ) {
        let skip = skip % block;
        let noise = |seed: u32, i: usize| {
            let x = (i as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add(seed);
            rounded((x >> 16) as f32 / 8192.0 - 4.0)
        };
        let blocks = (n + skip).div_ceil(block);
        let scales: Vec<f32> = (0..blocks).map(|i| noise(seed, i)).collect();
        let offsets: Vec<f32> = (0..blocks).map(|i| noise(seed ^ 7, i)).collect();
        let values: Vec<f32> = (0..n).map(|i| noise(seed ^ 99, i)).collect();
        for isa in Isa::available() {
            let mut got = values.clone();
            shift_scale(isa, &mut got, &scales, offset.then_some(&offsets[..]), block, skip, half);
            for (i, (x, y)) in values.iter().zip(&got).enumerate() {
                let b = (skip + i) / block;
                let shifted = if offset { x - offsets[b] } else { *x };
                let shifted = if half && offset { rounded(shifted) } else { shifted };
                prop_assert_eq!(*y, shifted * scales[b], "{} value {}", isa.name(), i);
            }
        }
    }

    #[test]
    fn lookups_equal_their_definition(
        bits in 1usize..=8, codes in prop::collection::vec(any::<u8>(), 0..150), block in 1usize..70, skip: usize,
    ) {
        let skip = skip % block;
        let codes: Vec<u8> = codes.iter().map(|c| c & ((1u16 << bits) - 1) as u8).collect();
        let blocks = (codes.len() + skip).div_ceil(block);
        let palettes: Vec<f32> = (0..blocks << bits).map(|i| i as f32 * 0.5 - 3.0).collect();
        for isa in Isa::available() {
            let mut got = vec![f32::NAN; codes.len()];
            lookup(isa, bits, &codes, &palettes, block, skip, &mut got);
            for (i, (c, y)) in codes.iter().zip(&got).enumerate() {
                prop_assert_eq!(*y, palettes[(((skip + i) / block) << bits) + usize::from(*c)]);
            }
        }
    }
}
