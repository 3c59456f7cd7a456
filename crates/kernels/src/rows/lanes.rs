//! Sixteen float lanes: what every row kernel is written in, once.
//!
//! A kernel body is generic over [`Lanes`] and is compiled once for each instruction set by
//! [`Isa`](super::Isa). Every instruction set has sixteen lanes (AVX2 uses two registers, the portable one an
//! array), so that sums are taken in the same order everywhere: a result does not depend on the machine.

use half::f16;

/// How many values one step of a kernel handles.
pub(crate) const LANES: usize = 16;

/// Arithmetic on sixteen `f32` values.
///
/// Bodies must not put arithmetic on lanes into closures: those are compiled for the base instruction set, and every
/// intrinsic in them may stay a call. Small traits with `#[inline(always)]` methods take their place.
/// A value of the implementing type is the proof that the CPU has the
/// instructions.
///
/// `max`, `min` and `select_less` follow the x86 rule: a comparison with a NaN is false, so `max(a, b)` and
/// `min(a, b)` give `b` when either is NaN.
pub(crate) trait Lanes: Copy + Send + Sync {
    /// Sixteen `f32` values.
    type V: Copy;
    /// Columns of a panel of a matrix product: as many as the registers allow.
    const COLUMNS: usize;

    fn splat(self, x: f32) -> Self::V;
    fn load(self, from: &[f32; LANES]) -> Self::V;
    fn store(self, v: Self::V, to: &mut [f32; LANES]);
    fn load_half(self, from: &[f16; LANES]) -> Self::V;
    fn store_half(self, v: Self::V, to: &mut [f16; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn sqrt(self, a: Self::V) -> Self::V;
    /// The nearest fp16 value, ties to even, as `f32`.
    fn round_half(self, a: Self::V) -> Self::V;
    /// The nearest integer, ties to even.
    fn nearest(self, a: Self::V) -> Self::V;
    /// `a * 2^n` for integral `n` in -254..=254, rounded once.
    fn scale(self, a: Self::V, n: Self::V) -> Self::V;

    /// The next values of `from` in the lanes whose bits are set, +0 in the others.
    #[inline(always)]
    fn expand(self, bits: u16, from: &[f32; LANES]) -> Self::V {
        let mut full = [0.0; LANES];
        for ((x, at), bit) in full.iter_mut().zip(places(bits)).zip(0..) {
            *x = if bits >> bit & 1 == 0 { 0.0 } else { from[at] };
        }
        self.load(&full)
    }

    /// As [`Lanes::expand`], of bytes.
    #[inline(always)]
    fn expand_codes(self, bits: u16, from: &[u8; LANES], to: &mut [u8; LANES]) {
        for ((x, at), bit) in to.iter_mut().zip(places(bits)).zip(0..) {
            *x = if bits >> bit & 1 == 0 { 0 } else { from[at] };
        }
    }

    /// `v` in the lanes whose bits are set, +0 in the others.
    #[inline(always)]
    fn keep(self, bits: u16, v: Self::V) -> Self::V {
        let mut full = self.to_array(v);
        for (x, bit) in full.iter_mut().zip(0..) {
            *x = if bits >> bit & 1 == 0 { 0.0 } else { *x };
        }
        self.load(&full)
    }

    /// The first `from.len()` lanes (at most sixteen) from `from`, the rest `fill`.
    #[inline(always)]
    fn load_part(self, from: &[f32], fill: f32) -> Self::V {
        let mut full = [fill; LANES];
        full[..from.len()].copy_from_slice(from);
        self.load(&full)
    }

    /// Stores the first `to.len()` lanes.
    #[inline(always)]
    fn store_part(self, v: Self::V, to: &mut [f32]) {
        let full = self.to_array(v);
        let count = to.len();
        to.copy_from_slice(&full[..count]);
    }

    /// Lane `j` of row `i` becomes lane `i` of row `j`.
    #[inline(always)]
    fn transpose(self, rows: [Self::V; LANES]) -> [Self::V; LANES] {
        let mut turned = [[0.0; LANES]; LANES];
        for (j, row) in rows.into_iter().enumerate() {
            for (i, x) in self.to_array(row).into_iter().enumerate() {
                turned[i][j] = x;
            }
        }
        let mut out = rows;
        for (v, row) in out.iter_mut().zip(&turned) {
            *v = self.load(row);
        }
        out
    }

    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; LANES] {
        let mut full = [0.0; LANES];
        self.store(v, &mut full);
        full
    }

    /// The sum of all lanes, halves first: the order every kernel uses.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut full = self.to_array(v);
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                full[i] += full[i + width];
            }
            width /= 2;
        }
        full[0]
    }

    /// The largest lane.
    #[inline(always)]
    fn largest(self, v: Self::V) -> f32 {
        self.to_array(v).into_iter().fold(f32::NEG_INFINITY, |m, x| if m > x { m } else { x })
    }

    /// `e^x` within 0.65 units in the last place; exactly 0 at and below -104, infinity above 88.73.
    ///
    /// `x = n ln 2 + r`; `e^r = 1 + r + r² q(r)` with the leading sum `1 + r` kept in two parts, so that only
    /// the last addition rounds visibly.
    #[inline(always)]
    fn exp(self, x: Self::V) -> Self::V {
        // The bounds come first in `min` and `max`, so that a NaN passes through.
        let x = self.max(self.splat(-105.0), self.min(self.splat(89.5), x));
        let n = self.nearest(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
        // ln 2 in two parts, the first with so few bits that n times it is exact.
        let high = self.fma(n, self.splat(-0.693_359_4), x);
        let low = self.mul(n, self.splat(2.121_944_4e-4));
        let r = self.add(high, low);
        let mut q = self.splat(1.0 / 40320.0);
        for c in [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
            q = self.fma(q, r, self.splat(c));
        }
        // r + lost is high + low; the sum 1 + r loses `lost_too`.
        let lost = self.sub(low, self.sub(r, high));
        let one = self.splat(1.0);
        let head = self.add(one, r);
        let lost_too = self.sub(r, self.sub(head, one));
        let tail = self.fma(self.mul(r, r), q, self.add(lost, lost_too));
        self.scale(self.add(head, tail), n)
    }
}

/// For each byte of a mask, how many of its bits are set before each bit: a table, as bits of a mask are as good as random,
/// and guessing costs more than looking up.
pub(crate) const BEFORE: [[u8; 8]; 256] = {
    let mut table = [[0; 8]; 256];
    let mut bits = 0;
    while bits < 256 {
        let (mut i, mut next) = (0, 0);
        while i < 8 {
            table[bits][i] = next;
            next += (bits >> i & 1) as u8;
            i += 1;
        }
        bits += 1;
    }
    table
};

/// For each of sixteen bits, how many are set before it.
#[inline(always)]
fn places(bits: u16) -> [usize; LANES] {
    let [low, high] = bits.to_le_bytes();
    let first = low.count_ones() as usize;
    let mut places = [0; LANES];
    for i in 0..8 {
        places[i] = usize::from(BEFORE[usize::from(low)][i]);
        places[i + 8] = (first + usize::from(BEFORE[usize::from(high)][i])) & (LANES - 1);
    }
    places
}

/// A computation generic over the instruction set; [`Isa::run`](super::Isa) compiles it for each.
pub(crate) trait Kernel {
    /// What it returns.
    type Out;
    /// Does it. Implementations are `#[inline(always)]`, as is all they call.
    fn run<L: Lanes>(self, l: L) -> Self::Out;
}
