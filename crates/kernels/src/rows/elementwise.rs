//! One value at a time: arithmetic, elementary functions, conversions.

use super::Isa;
use super::lanes::{Kernel, LANES, Lanes};
use half::f16;

/// Where an operand of an elementwise kernel comes from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// As many values as the result has.
    Singles(&'a [f32]),
    /// The same, stored as fp16.
    Halves(&'a [f16]),
    /// One value for all.
    Scalar(f32),
    /// What the destination holds before the call: an operation in place.
    Destination,
}

impl Source<'_> {
    fn assert_len(&self, len: usize) {
        let have = match self {
            Source::Singles(s) => s.len(),
            Source::Halves(s) => s.len(),
            Source::Scalar(_) | Source::Destination => len,
        };
        assert_eq!(have, len, "an operand holds as many values as the result");
    }

    /// Lanes `at..at + 16` of the operand.
    #[inline(always)]
    fn full<L: Lanes>(&self, l: L, at: usize, destination: &[f32; LANES]) -> L::V {
        match self {
            Source::Singles(s) => l.load(s[at..].first_chunk().expect("length checked by the caller")),
            Source::Halves(s) => l.load_half(s[at..].first_chunk().expect("length checked by the caller")),
            Source::Scalar(x) => l.splat(*x),
            Source::Destination => l.load(destination),
        }
    }

    /// The operand from `at` to its end, which is less than sixteen values away.
    #[inline(always)]
    fn part<L: Lanes>(&self, l: L, at: usize, destination: &[f32]) -> L::V {
        match self {
            Source::Singles(s) => l.load_part(&s[at..], 0.0),
            Source::Halves(s) => {
                let mut full = [f16::ZERO; LANES];
                full[..s.len() - at].copy_from_slice(&s[at..]);
                l.load_half(&full)
            }
            Source::Scalar(x) => l.splat(*x),
            Source::Destination => l.load_part(destination, 0.0),
        }
    }
}

/// Operations on two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    /// The larger; NaN when either is NaN.
    Max,
    /// The smaller; NaN when either is NaN.
    Min,
}

/// `dst[i] = a[i] op b[i]`, rounded to fp16 if `half`.
///
/// # Panics
///
/// When an operand's length differs from `dst`'s.
pub fn binary(isa: Isa, op: Binary, a: Source<'_>, b: Source<'_>, dst: &mut [f32], half: bool) {
    a.assert_len(dst.len());
    b.assert_len(dst.len());
    isa.run(BinaryKernel { op, a, b, dst, half });
}

struct BinaryKernel<'a> {
    op: Binary,
    a: Source<'a>,
    b: Source<'a>,
    dst: &'a mut [f32],
    half: bool,
}

impl Kernel for BinaryKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let BinaryKernel { op, a, b, dst, half } = self;
        match op {
            Binary::Add => map2(l, a, b, dst, half, |a, b| l.add(a, b)),
            Binary::Sub => map2(l, a, b, dst, half, |a, b| l.sub(a, b)),
            Binary::Mul => map2(l, a, b, dst, half, |a, b| l.mul(a, b)),
            Binary::Div => map2(l, a, b, dst, half, |a, b| l.div(a, b)),
            // `max(a, b)` loses a NaN in `a`; `max(a, b) + (a - a)` would turn infinities into NaN. Taking both
            // orders and adding nothing keeps it: a NaN in either operand comes second once.
            Binary::Max => map2(l, a, b, dst, half, |a, b| keep_nan(l, a, l.max(a, b))),
            Binary::Min => map2(l, a, b, dst, half, |a, b| keep_nan(l, a, l.min(a, b))),
        }
    }
}

/// `value`, or NaN where `a` is NaN: `min(inf, a)` passes a NaN of `a` through and is never below `-inf`.
#[inline(always)]
fn keep_nan<L: Lanes>(l: L, a: L::V, value: L::V) -> L::V {
    // 0 * clamp(a) is 0 for every number (the clamp removes infinities) and NaN for NaN.
    let finite = l.max(l.splat(f32::MIN), l.min(l.splat(f32::MAX), a));
    l.fma(finite, l.splat(0.0), value)
}

#[inline(always)]
fn map2<L: Lanes>(
    l: L,
    a: Source<'_>,
    b: Source<'_>,
    dst: &mut [f32],
    half: bool,
    f: impl Fn(L::V, L::V) -> L::V,
) {
    let (chunks, tail) = dst.as_chunks_mut::<LANES>();
    let whole = chunks.len() * LANES;
    for (i, d) in chunks.iter_mut().enumerate() {
        let at = i * LANES;
        let mut y = f(a.full(l, at, d), b.full(l, at, d));
        if half {
            y = l.round_half(y);
        }
        l.store(y, d);
    }
    if !tail.is_empty() {
        let mut y = f(a.part(l, whole, tail), b.part(l, whole, tail));
        if half {
            y = l.round_half(y);
        }
        l.store_part(y, tail);
    }
}

/// A function of fp16 values, tabulated: exact for every input, whatever the function.
#[derive(Clone)]
pub struct Table(std::sync::Arc<[f16]>);

impl Table {
    /// Tabulates `f`, rounding its results to fp16.
    pub fn new(f: impl Fn(f32) -> f32) -> Table {
        Table((0..=u16::MAX).map(|bits| f16::from_f32(f(f16::from_bits(bits).to_f32()))).collect())
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Table")
    }
}

/// Functions of one value.
#[derive(Clone, Debug)]
pub enum Unary {
    /// The value itself; with `half`, rounded.
    Identity,
    /// `e^x`.
    Exp,
    /// `x / (1 + e^-x)`.
    Silu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
    /// `x²`.
    Square,
    /// `√x`.
    Sqrt,
    /// `1 / √(x + epsilon)`.
    Rsqrt {
        /// Added before the root.
        epsilon: f32,
    },
    /// `1 / (x + epsilon)`.
    Inverse {
        /// Added before the division.
        epsilon: f32,
    },
    /// Any function of fp16 values; the operand must hold fp16 values.
    Table(Table),
    /// Any function, one value at a time.
    Scalar(fn(f32) -> f32),
}

/// `dst[i] = f(src[i])`, rounded to fp16 if `half`.
///
/// # Panics
///
/// When the operand's length differs from `dst`'s.
pub fn unary(isa: Isa, f: &Unary, src: Source<'_>, dst: &mut [f32], half: bool) {
    src.assert_len(dst.len());
    isa.run(UnaryKernel { f, src, dst, half });
}

struct UnaryKernel<'a> {
    f: &'a Unary,
    src: Source<'a>,
    dst: &'a mut [f32],
    half: bool,
}

impl Kernel for UnaryKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let UnaryKernel { f, src, dst, half } = self;
        let one = l.splat(1.0);
        let minus = l.splat(-1.0);
        // 1 + e^-x
        let denominator = |x: L::V| l.add(one, l.exp(l.mul(x, minus)));
        match f {
            Unary::Identity => map1(l, src, dst, half, |x| x),
            Unary::Exp => map1(l, src, dst, half, |x| l.exp(x)),
            Unary::Silu => map1(l, src, dst, half, |x| l.div(x, denominator(x))),
            Unary::Sigmoid => map1(l, src, dst, half, |x| l.div(one, denominator(x))),
            Unary::Square => map1(l, src, dst, half, |x| l.mul(x, x)),
            Unary::Sqrt => map1(l, src, dst, half, |x| l.sqrt(x)),
            Unary::Rsqrt { epsilon } => {
                let epsilon = l.splat(*epsilon);
                map1(l, src, dst, half, |x| l.div(one, l.sqrt(l.add(x, epsilon))));
            }
            Unary::Inverse { epsilon } => {
                let epsilon = l.splat(*epsilon);
                map1(l, src, dst, half, |x| l.div(one, l.add(x, epsilon)));
            }
            Unary::Table(table) => {
                map1(l, src, dst, false, |x| {
                    let mut values = [f16::ZERO; LANES];
                    l.store_half(x, &mut values);
                    for v in &mut values {
                        *v = table.0[v.to_bits() as usize];
                    }
                    l.load_half(&values)
                });
            }
            Unary::Scalar(f) => map1(l, src, dst, half, |x| l.load(&l.to_array(x).map(f))),
        }
    }
}

#[inline(always)]
fn map1<L: Lanes>(l: L, src: Source<'_>, dst: &mut [f32], half: bool, f: impl Fn(L::V) -> L::V) {
    map2(l, src, Source::Scalar(0.0), dst, half, |x, _| f(x));
}

/// Widens fp16 to `f32`.
///
/// # Panics
///
/// When the lengths differ.
pub fn widen(isa: Isa, src: &[f16], dst: &mut [f32]) {
    unary(isa, &Unary::Identity, Source::Halves(src), dst, false);
}

/// Rounds to the nearest fp16 value, ties to even; values beyond 65,519 become infinite.
///
/// # Panics
///
/// When the lengths differ.
pub fn narrow(isa: Isa, src: &[f32], dst: &mut [f16]) {
    assert_eq!(src.len(), dst.len(), "src and dst hold the same number of elements");
    isa.run(NarrowKernel { src, dst });
}

struct NarrowKernel<'a> {
    src: &'a [f32],
    dst: &'a mut [f16],
}

impl Kernel for NarrowKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (s, s_tail) = self.src.as_chunks::<LANES>();
        let (d, d_tail) = self.dst.as_chunks_mut::<LANES>();
        for (s, d) in s.iter().zip(d) {
            l.store_half(l.load(s), d);
        }
        if !d_tail.is_empty() {
            let mut full = [f16::ZERO; LANES];
            l.store_half(l.load_part(s_tail, 0.0), &mut full);
            d_tail.copy_from_slice(&full[..d_tail.len()]);
        }
    }
}
