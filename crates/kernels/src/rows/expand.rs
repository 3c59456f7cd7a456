//! Sparse weights: stored values go where the bits of a mask are set.
//!
//! A mask has a bit an element, the lowest of a byte first; a pass begins at bit `skip` of its first byte.

use super::Isa;
use super::lanes::{Kernel, LANES, Lanes};

/// Puts the next of `stored` where a bit is set, 0 elsewhere.
///
/// # Panics
///
/// When `bits` has fewer than `skip + out.len()` bits, or more are set than values are stored.
pub fn expand(isa: Isa, bits: &[u8], skip: usize, stored: &[f32], out: &mut [f32]) {
    check(bits, skip, out.len());
    isa.run(ExpandKernel { bits, skip, stored, out });
}

/// As [`expand`], of codes.
///
/// # Panics
///
/// As [`expand`].
pub fn expand_codes(isa: Isa, bits: &[u8], skip: usize, stored: &[u8], out: &mut [u8]) {
    check(bits, skip, out.len());
    isa.run(ExpandKernel { bits, skip, stored, out });
}

/// Puts 0 where no bit is set.
///
/// # Panics
///
/// When `bits` has fewer than `skip + values.len()` bits.
pub fn keep(isa: Isa, bits: &[u8], skip: usize, values: &mut [f32]) {
    check(bits, skip, values.len());
    isa.run(KeepKernel { bits, skip, values });
}

fn check(bits: &[u8], skip: usize, len: usize) {
    assert!(skip < 8, "a pass begins inside its first byte");
    assert!(len == 0 || (skip + len).div_ceil(8) <= bits.len(), "a bit an element");
}

/// The bits of elements `16 i` to `16 i + 15`; those after the mask's end are 0.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "the lowest sixteen are wanted")]
fn sixteen(bits: &[u8], skip: usize, i: usize) -> u16 {
    let from = &bits[(2 * i).min(bits.len())..];
    let mut word = [0; 4];
    match from.first_chunk::<3>() {
        Some(three) => word[..3].copy_from_slice(three),
        None => word[..from.len()].copy_from_slice(from),
    }
    (u32::from_le_bytes(word) >> skip) as u16
}

/// Values that can be spread.
trait Value: Copy + Default {
    fn expand<L: Lanes>(l: L, bits: u16, from: &[Self; LANES], to: &mut [Self; LANES]);
}

impl Value for f32 {
    #[inline(always)]
    fn expand<L: Lanes>(l: L, bits: u16, from: &[f32; LANES], to: &mut [f32; LANES]) {
        l.store(l.expand(bits, from), to);
    }
}

impl Value for u8 {
    #[inline(always)]
    fn expand<L: Lanes>(l: L, bits: u16, from: &[u8; LANES], to: &mut [u8; LANES]) {
        l.expand_codes(bits, from, to);
    }
}

struct ExpandKernel<'a, T> {
    bits: &'a [u8],
    skip: usize,
    stored: &'a [T],
    out: &'a mut [T],
}

impl<T: Value> Kernel for ExpandKernel<'_, T> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let ExpandKernel { bits, skip, stored, out } = self;
        let mut left = stored;
        let (chunks, tail) = out.as_chunks_mut::<LANES>();
        let whole = chunks.len();
        for (i, chunk) in chunks.iter_mut().enumerate() {
            let now = sixteen(bits, skip, i);
            next(l, now, left, chunk);
            left = &left[now.count_ones() as usize..];
        }
        if !tail.is_empty() {
            let now = sixteen(bits, skip, whole) & ((1 << tail.len()) - 1);
            let mut last = [T::default(); LANES];
            next(l, now, left, &mut last);
            assert!(now.count_ones() as usize <= left.len(), "a value a bit");
            tail.copy_from_slice(&last[..tail.len()]);
        }
    }
}

#[inline(always)]
fn next<T: Value, L: Lanes>(l: L, bits: u16, left: &[T], to: &mut [T; LANES]) {
    if let Some(from) = left.first_chunk() {
        return T::expand(l, bits, from, to);
    }
    let mut from = [T::default(); LANES];
    from[..left.len()].copy_from_slice(left);
    T::expand(l, bits, &from, to);
}

struct KeepKernel<'a> {
    bits: &'a [u8],
    skip: usize,
    values: &'a mut [f32],
}

impl Kernel for KeepKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let KeepKernel { bits, skip, values } = self;
        let (chunks, tail) = values.as_chunks_mut::<LANES>();
        let whole = chunks.len();
        for (i, chunk) in chunks.iter_mut().enumerate() {
            l.store(l.keep(sixteen(bits, skip, i), l.load(chunk)), chunk);
        }
        if !tail.is_empty() {
            let v = l.load_part(tail, 0.0);
            l.store_part(l.keep(sixteen(bits, skip, whole), v), tail);
        }
    }
}
