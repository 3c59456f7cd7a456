//! Decompression of weights: packed codes, palettes, and scales per block.
//!
//! Parameters come per block along a row: value `i` of a pass belongs to block `(skip + i) / block` of those given, so
//! that a pass may begin inside a block. A block of 1 gives each value its own, one as long as the row the same to all.

use super::Isa;
use super::lanes::{Kernel, LANES, Lanes};

/// Codes of `bits` bits (1 to 8), packed with the lowest bits first, as bytes. `packed` begins with the first of them.
///
/// # Panics
///
/// When `packed` does not hold `out.len()` codes, or codes have no or more than eight bits.
pub fn unpack(isa: Isa, bits: usize, packed: &[u8], out: &mut [u8]) {
    assert!((1..=8).contains(&bits), "codes of {bits} bits");
    assert!((out.len() * bits).div_ceil(8) <= packed.len(), "packed holds all codes");
    isa.run(UnpackKernel { bits, packed, out });
}

struct UnpackKernel<'a> {
    bits: usize,
    packed: &'a [u8],
    out: &'a mut [u8],
}

impl Kernel for UnpackKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let UnpackKernel { bits, packed, out } = self;
        match bits {
            1 => eights::<1>(packed, out),
            2 => eights::<2>(packed, out),
            3 => eights::<3>(packed, out),
            4 => {
                let (pairs, last) = out.as_chunks_mut::<2>();
                for (pair, byte) in pairs.iter_mut().zip(packed) {
                    *pair = [byte & 15, byte >> 4];
                }
                if let [last] = last {
                    *last = packed[pairs.len()] & 15;
                }
            }
            5 => eights::<5>(packed, out),
            6 => eights::<6>(packed, out),
            7 => eights::<7>(packed, out),
            _ => out.copy_from_slice(&packed[..out.len()]),
        }
    }
}

/// Eight codes fill `BITS` bytes.
#[inline(always)]
fn eights<const BITS: usize>(packed: &[u8], out: &mut [u8]) {
    let (groups, tail) = out.as_chunks_mut::<8>();
    let (bytes, rest) = packed.as_chunks::<BITS>();
    for (group, bytes) in groups.iter_mut().zip(bytes) {
        *group = eight::<BITS>(bytes);
    }
    if !tail.is_empty() {
        let mut last = [0; BITS];
        let from = bytes.get(groups.len()).map_or(rest, |b| b.as_slice());
        let have = from.len().min(BITS);
        last[..have].copy_from_slice(&from[..have]);
        let codes = eight::<BITS>(&last);
        tail.copy_from_slice(&codes[..tail.len()]);
    }
}

#[inline(always)]
fn eight<const BITS: usize>(bytes: &[u8; BITS]) -> [u8; 8] {
    let mut word = [0; 8];
    word[..BITS].copy_from_slice(bytes);
    let word = u64::from_le_bytes(word);
    let mut codes = [0; 8];
    for (i, code) in codes.iter_mut().enumerate() {
        *code = (word >> (BITS * i)) as u8 & ((1u16 << BITS) - 1) as u8;
    }
    codes
}

/// Codes as numbers; `signed` codes of `bits` bits are two's complement.
///
/// # Panics
///
/// When the lengths differ, or codes have no or more than eight bits.
pub fn numbers(isa: Isa, bits: usize, signed: bool, codes: &[u8], out: &mut [f32]) {
    assert_eq!(codes.len(), out.len(), "as many numbers as codes");
    assert!((1..=8).contains(&bits), "codes of {bits} bits");
    isa.run(NumbersKernel { unused: 8 - bits, signed, codes, out });
}

struct NumbersKernel<'a> {
    unused: usize,
    signed: bool,
    codes: &'a [u8],
    out: &'a mut [f32],
}

impl Kernel for NumbersKernel<'_> {
    type Out = ();

    #[inline(always)]
    #[expect(clippy::cast_possible_wrap, reason = "the byte is a signed code")]
    fn run<L: Lanes>(self, _: L) {
        let NumbersKernel { unused, signed, codes, out } = self;
        if signed {
            for (x, code) in out.iter_mut().zip(codes) {
                *x = f32::from((code << unused) as i8 >> unused);
            }
        } else {
            for (x, code) in out.iter_mut().zip(codes) {
                *x = f32::from(*code);
            }
        }
    }
}

/// `(x - offset) * scale` in place, with a scale and an offset a block; with `half`, the difference is rounded to fp16
/// (the product is not).
///
/// # Panics
///
/// When there are fewer scales or offsets than blocks, or `block` is 0 or not above `skip`.
pub fn shift_scale(
    isa: Isa,
    values: &mut [f32],
    scales: &[f32],
    offsets: Option<&[f32]>,
    block: usize,
    skip: usize,
    half: bool,
) {
    assert!(skip < block, "a pass begins inside its first block");
    let blocks = (values.len() + skip).div_ceil(block);
    assert!(values.is_empty() || scales.len() >= blocks, "a scale a block");
    assert!(values.is_empty() || offsets.is_none_or(|o| o.len() >= blocks), "an offset a block");
    isa.run(ShiftScaleKernel { values, scales, offsets, block, skip, half });
}

struct ShiftScaleKernel<'a> {
    values: &'a mut [f32],
    scales: &'a [f32],
    offsets: Option<&'a [f32]>,
    block: usize,
    skip: usize,
    half: bool,
}

impl Kernel for ShiftScaleKernel<'_> {
    type Out = ();

    #[inline(always)]
    #[expect(clippy::manual_map, reason = "a closure would not be compiled for the instruction set")]
    fn run<L: Lanes>(self, l: L) {
        let ShiftScaleKernel { values, scales, offsets, block, skip, half } = self;
        if block == 1 {
            let (chunks, tail) = values.as_chunks_mut::<LANES>();
            for (i, v) in chunks.iter_mut().enumerate() {
                let at = i * LANES;
                let scale = l.load(scales[at..].first_chunk().expect("a scale a value"));
                let offset = match offsets {
                    Some(o) => Some(l.load(o[at..].first_chunk().expect("an offset a value"))),
                    None => None,
                };
                l.store(shifted(l, l.load(v), scale, offset, half), v);
            }
            let at = chunks.len() * LANES;
            let n = tail.len();
            if n > 0 {
                let scale = l.load_part(&scales[at..at + n], 0.0);
                let offset = match offsets {
                    Some(o) => Some(l.load_part(&o[at..at + n], 0.0)),
                    None => None,
                };
                l.store_part(shifted(l, l.load_part(tail, 0.0), scale, offset, half), tail);
            }
            return;
        }
        let (mut rest, mut len, mut b) = (values, block - skip, 0);
        while !rest.is_empty() {
            let (now, later) = rest.split_at_mut(len.min(rest.len()));
            let scale = l.splat(scales[b]);
            let offset = match offsets {
                Some(o) => Some(l.splat(o[b])),
                None => None,
            };
            let (chunks, tail) = now.as_chunks_mut::<LANES>();
            for v in chunks {
                l.store(shifted(l, l.load(v), scale, offset, half), v);
            }
            if !tail.is_empty() {
                l.store_part(shifted(l, l.load_part(tail, 0.0), scale, offset, half), tail);
            }
            (rest, len, b) = (later, block, b + 1);
        }
    }
}

#[inline(always)]
fn shifted<L: Lanes>(l: L, x: L::V, scale: L::V, offset: Option<L::V>, half: bool) -> L::V {
    let x = match offset {
        Some(o) if half => l.round_half(l.sub(x, o)),
        Some(o) => l.sub(x, o),
        None => x,
    };
    l.mul(x, scale)
}

/// Values that codes pick from palettes of `1 << bits` entries, a palette a block.
///
/// # Panics
///
/// When the lengths differ, there are fewer palettes than blocks, or `block` is 0 or not above `skip`.
pub fn lookup(
    isa: Isa,
    bits: usize,
    codes: &[u8],
    palettes: &[f32],
    block: usize,
    skip: usize,
    out: &mut [f32],
) {
    assert_eq!(codes.len(), out.len(), "as many values as codes");
    assert!((1..=8).contains(&bits), "codes of {bits} bits");
    assert!(skip < block, "a pass begins inside its first block");
    let blocks = (codes.len() + skip).div_ceil(block);
    assert!(codes.is_empty() || palettes.len() >= blocks << bits, "a palette a block");
    isa.run(LookupKernel { bits, codes, palettes, block, skip, out });
}

struct LookupKernel<'a> {
    bits: usize,
    codes: &'a [u8],
    palettes: &'a [f32],
    block: usize,
    skip: usize,
    out: &'a mut [f32],
}

impl Kernel for LookupKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        match self.bits {
            1 => self.pick::<2>(),
            2 => self.pick::<4>(),
            3 => self.pick::<8>(),
            4 => self.pick::<16>(),
            5 => self.pick::<32>(),
            6 => self.pick::<64>(),
            7 => self.pick::<128>(),
            _ => self.pick::<256>(),
        }
    }
}

impl LookupKernel<'_> {
    #[inline(always)]
    fn pick<const ENTRIES: usize>(self) {
        let LookupKernel { codes, palettes, block, skip, out, .. } = self;
        let palettes = palettes.as_chunks::<ENTRIES>().0;
        let (mut at, mut len, mut b) = (0, block - skip, 0);
        while at < codes.len() {
            let end = at.saturating_add(len).min(codes.len());
            let palette = &palettes[b];
            for (x, code) in out[at..end].iter_mut().zip(&codes[at..end]) {
                // The mask shows that the index is inside; codes have no more bits.
                *x = palette[usize::from(*code) & (ENTRIES - 1)];
            }
            (at, len, b) = (end, block, b + 1);
        }
    }
}
