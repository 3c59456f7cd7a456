//! Passes over a whole row: sums, softmax, layer norm.
//!
//! Sums run in sixteen partial sums (value `i` goes to partial sum `i mod 16`), then halves are added: the order
//! does not depend on the instruction set, and zeros at the end of a row change nothing.

use half::f16;

use super::lanes::{Kernel, LANES, Lanes};
use super::{HALF_SUM_TERMS, Isa};

/// What [`reduce`] computes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    SumOfSquares,
    /// 0 if every value is finite, NaN otherwise.
    SumOfFinite,
}

/// One value from a row. Of an empty row: 0 for sums, NaN for the mean, infinities for the extremes. The result is
/// not rounded; the sums on the way to it are, if `isa` keeps them in fp16.
pub fn reduce(isa: Isa, what: Reduction, row: &[f32]) -> f32 {
    isa.run(ReduceKernel { what, row, half_sums: isa.has_half_sums() })
}

struct ReduceKernel<'a> {
    what: Reduction,
    row: &'a [f32],
    half_sums: bool,
}

impl Kernel for ReduceKernel<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let (row, h) = (self.row, self.half_sums);
        match self.what {
            Reduction::Sum => sum_of(l, row, 0.0, Sum, h),
            #[expect(clippy::cast_precision_loss, reason = "rows are far shorter than 2^24")]
            Reduction::Mean => sum_of(l, row, 0.0, Sum, h) / row.len() as f32,
            Reduction::SumOfSquares => sum_of(l, row, 0.0, Deviation(0.0), h),
            Reduction::SumOfFinite => sum_of(l, row, 0.0, Zero, false),
            Reduction::Max => {
                nan_or(row, l.largest(fold(l, row, f32::NEG_INFINITY, f32::NEG_INFINITY, Largest)))
            }
            Reduction::Min => {
                let negated = l.mul(fold(l, row, f32::INFINITY, f32::INFINITY, Smallest), l.splat(-1.0));
                nan_or(row, -l.largest(negated))
            }
        }
    }
}

/// `value` unless the row holds a NaN.
#[inline(always)]
fn nan_or(row: &[f32], value: f32) -> f32 {
    if row.iter().any(|x| x.is_nan()) { f32::NAN } else { value }
}

/// What one value does to an accumulator.
trait Accumulate: Copy {
    fn step<L: Lanes>(self, l: L, x: L::V, acc: L::V) -> L::V;
}

#[derive(Clone, Copy)]
struct Sum;

impl Accumulate for Sum {
    #[inline(always)]
    fn step<L: Lanes>(self, l: L, x: L::V, acc: L::V) -> L::V {
        l.add(acc, x)
    }
}

/// Adds the square of the distance from a value.
#[derive(Clone, Copy)]
struct Deviation(f32);

impl Accumulate for Deviation {
    #[inline(always)]
    fn step<L: Lanes>(self, l: L, x: L::V, acc: L::V) -> L::V {
        let d = l.sub(x, l.splat(self.0));
        l.fma(d, d, acc)
    }
}

/// Adds 0 for numbers, NaN for infinities and NaN.
#[derive(Clone, Copy)]
struct Zero;

impl Accumulate for Zero {
    #[inline(always)]
    fn step<L: Lanes>(self, l: L, x: L::V, acc: L::V) -> L::V {
        l.fma(x, l.splat(0.0), acc)
    }
}

#[derive(Clone, Copy)]
struct Largest;

impl Accumulate for Largest {
    #[inline(always)]
    fn step<L: Lanes>(self, l: L, x: L::V, acc: L::V) -> L::V {
        l.max(x, acc)
    }
}

#[derive(Clone, Copy)]
struct Smallest;

impl Accumulate for Smallest {
    #[inline(always)]
    fn step<L: Lanes>(self, l: L, x: L::V, acc: L::V) -> L::V {
        l.min(x, acc)
    }
}

/// Folds a row into sixteen lanes that begin as `start`; the last step is filled up with `fill`.
#[inline(always)]
fn fold<L: Lanes>(l: L, row: &[f32], start: f32, fill: f32, f: impl Accumulate) -> L::V {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut acc = l.splat(start);
    for c in chunks {
        acc = f.step(l, l.load(c), acc);
    }
    if !tail.is_empty() {
        acc = f.step(l, l.load_part(tail, fill), acc);
    }
    acc
}

#[inline(always)]
fn sum_of<L: Lanes>(l: L, row: &[f32], fill: f32, f: impl Accumulate, half_sums: bool) -> f32 {
    if !half_sums {
        return l.sum(fold(l, row, 0.0, fill, f));
    }
    let (pairs, tail) = row.as_chunks::<HALF_SUM_TERMS>();
    let mut acc = l.splat(0.0);
    for pair in pairs {
        for c in pair.as_chunks::<LANES>().0 {
            acc = f.step(l, l.load(c), acc);
        }
        acc = l.round_half(acc);
    }
    for c in tail.chunks(LANES) {
        acc = f.step(l, l.load_part(c, fill), acc);
    }
    half_sum(l, l.round_half(acc))
}

/// The sum of all lanes as [`Lanes::sum`] takes it, every addition rounded to fp16.
#[inline(always)]
fn half_sum<L: Lanes>(l: L, v: L::V) -> f32 {
    let mut full = l.to_array(v);
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            full[i] = f16::from_f32(full[i] + full[i + width]).to_f32();
        }
        width /= 2;
    }
    full[0]
}

/// Replaces a row by `e^(x - max) / Σ e^(x - max)`, rounded to fp16 if `half`. A row with a NaN, or with nothing
/// but `-inf`, becomes NaN.
pub fn softmax(isa: Isa, row: &mut [f32], half: bool) {
    isa.run(SoftmaxKernel { row, half, half_sums: half && isa.has_half_sums() });
}

struct SoftmaxKernel<'a> {
    row: &'a mut [f32],
    half: bool,
    half_sums: bool,
}

impl Kernel for SoftmaxKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let SoftmaxKernel { row, half, half_sums } = self;
        // A NaN is lost here and comes back through the exponentials.
        let max = l.largest(fold(l, row, f32::NEG_INFINITY, f32::NEG_INFINITY, Largest));
        let m = l.splat(max);
        let (chunks, tail) = row.as_chunks_mut::<LANES>();
        let mut acc = l.splat(0.0);
        for c in chunks.iter_mut() {
            let e = l.exp(l.sub(l.load(c), m));
            acc = l.add(acc, e);
            l.store(e, c);
        }
        if !tail.is_empty() {
            let e = l.exp(l.sub(l.load_part(tail, f32::NEG_INFINITY), m));
            acc = l.add(acc, e);
            l.store_part(e, tail);
        }
        // One exact division, then products: e/s is corrected by its remainder, which rounds it correctly.
        let sum = if half_sums { sum_of(l, row, 0.0, Sum, true) } else { l.sum(acc) };
        let (chunks, tail) = row.as_chunks_mut::<LANES>();
        let by = Quotient { sum, inverse: 1.0 / sum, half };
        for c in chunks {
            l.store(by.of(l, l.load(c)), c);
        }
        if !tail.is_empty() {
            l.store_part(by.of(l, l.load_part(tail, 0.0)), tail);
        }
    }
}

/// `e / sum`.
#[derive(Clone, Copy)]
struct Quotient {
    sum: f32,
    inverse: f32,
    half: bool,
}

impl Quotient {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, e: L::V) -> L::V {
        let (minus_sum, inverse) = (l.splat(-self.sum), l.splat(self.inverse));
        let q = l.mul(e, inverse);
        let y = l.fma(l.fma(q, minus_sum, e), inverse, q);
        if self.half { l.round_half(y) } else { y }
    }
}

/// `dst = (src - mean) / √(variance + epsilon) * gamma + beta` over one row, rounded to fp16 if `half`.
///
/// Mean and variance are always summed in `f32`: the squares of ordinary activations are beyond fp16.
///
/// # Panics
///
/// When a length differs from `src`'s.
pub fn layer_norm(
    isa: Isa,
    src: &[f32],
    epsilon: f32,
    gamma: Option<&[f32]>,
    beta: Option<&[f32]>,
    dst: &mut [f32],
    half: bool,
) {
    assert_eq!(src.len(), dst.len(), "src and dst hold the same number of elements");
    for v in [gamma, beta].into_iter().flatten() {
        assert_eq!(v.len(), src.len(), "gamma and beta are as long as the row");
    }
    isa.run(LayerNormKernel { src, epsilon, gamma, beta, dst, half });
}

struct LayerNormKernel<'a> {
    src: &'a [f32],
    epsilon: f32,
    gamma: Option<&'a [f32]>,
    beta: Option<&'a [f32]>,
    dst: &'a mut [f32],
    half: bool,
}

impl Kernel for LayerNormKernel<'_> {
    type Out = ();

    #[inline(always)]
    #[expect(clippy::cast_precision_loss, reason = "rows are far shorter than 2^24")]
    fn run<L: Lanes>(self, l: L) {
        let LayerNormKernel { src, epsilon, gamma, beta, dst, half } = self;
        let n = src.len() as f32;
        let mean = sum_of(l, src, 0.0, Sum, false) / n;
        // The filler of a partial step is the mean, whose deviation is 0.
        let squares = sum_of(l, src, mean, Deviation(mean), false);
        let normal = Normal { mean, inverse: 1.0 / (squares / n + epsilon).sqrt(), half };
        let (chunks, tail) = dst.as_chunks_mut::<LANES>();
        let whole = chunks.len() * LANES;
        for (i, d) in chunks.iter_mut().enumerate() {
            let y = normal.of(l, at(l, src, i), at_option(l, gamma, i), at_option(l, beta, i));
            l.store(y, d);
        }
        if !tail.is_empty() {
            let x = l.load_part(&src[whole..], 0.0);
            let g = part_option(l, gamma, whole);
            let b = part_option(l, beta, whole);
            l.store_part(normal.of(l, x, g, b), tail);
        }
    }
}

#[inline(always)]
fn at<L: Lanes>(l: L, v: &[f32], i: usize) -> L::V {
    l.load(v[i * LANES..].first_chunk().expect("lengths are equal, checked by the caller"))
}

#[inline(always)]
#[expect(clippy::manual_map, reason = "a closure would not be compiled for the instruction set")]
fn at_option<L: Lanes>(l: L, v: Option<&[f32]>, i: usize) -> Option<L::V> {
    match v {
        Some(v) => Some(at(l, v, i)),
        None => None,
    }
}

#[inline(always)]
#[expect(clippy::manual_map, reason = "a closure would not be compiled for the instruction set")]
fn part_option<L: Lanes>(l: L, v: Option<&[f32]>, whole: usize) -> Option<L::V> {
    match v {
        Some(v) => Some(l.load_part(&v[whole..], 0.0)),
        None => None,
    }
}

/// `(x - mean) * inverse * gamma + beta`.
#[derive(Clone, Copy)]
struct Normal {
    mean: f32,
    inverse: f32,
    half: bool,
}

impl Normal {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, x: L::V, gamma: Option<L::V>, beta: Option<L::V>) -> L::V {
        let mut y = l.mul(l.sub(x, l.splat(self.mean)), l.splat(self.inverse));
        if let Some(g) = gamma {
            y = l.mul(y, g);
        }
        if let Some(b) = beta {
            y = l.add(y, b);
        }
        if self.half { l.round_half(y) } else { y }
    }
}
