//! Passes over a whole row: sums, softmax, layer norm.
//!
//! Sums run in sixteen partial sums (value `i` goes to partial sum `i mod 16`), then halves are added: the order
//! does not depend on the instruction set, and zeros at the end of a row change nothing.

use super::Isa;
use super::lanes::{Kernel, LANES, Lanes};

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

/// One value from a row. Of an empty row: 0 for sums, NaN for the mean, infinities for the extremes.
pub fn reduce(isa: Isa, what: Reduction, row: &[f32]) -> f32 {
    isa.run(ReduceKernel { what, row })
}

struct ReduceKernel<'a> {
    what: Reduction,
    row: &'a [f32],
}

impl Kernel for ReduceKernel<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let row = self.row;
        match self.what {
            Reduction::Sum => sum_of(l, row, 0.0, |x, acc| l.add(acc, x)),
            #[expect(clippy::cast_precision_loss, reason = "rows are far shorter than 2^24")]
            Reduction::Mean => sum_of(l, row, 0.0, |x, acc| l.add(acc, x)) / row.len() as f32,
            Reduction::SumOfSquares => sum_of(l, row, 0.0, |x, acc| l.fma(x, x, acc)),
            // x · 0 is NaN for infinities and NaN.
            Reduction::SumOfFinite => sum_of(l, row, 0.0, |x, acc| l.fma(x, l.splat(0.0), acc)),
            Reduction::Max => {
                let m = fold(l, row, f32::NEG_INFINITY, f32::NEG_INFINITY, |x, acc| l.max(x, acc));
                nan_or(row, l.largest(m))
            }
            Reduction::Min => {
                let m = fold(l, row, f32::INFINITY, f32::INFINITY, |x, acc| l.min(x, acc));
                nan_or(row, -l.largest(l.mul(m, l.splat(-1.0))))
            }
        }
    }
}

/// `value` unless the row holds a NaN.
#[inline(always)]
fn nan_or(row: &[f32], value: f32) -> f32 {
    if row.iter().any(|x| x.is_nan()) { f32::NAN } else { value }
}

/// Folds a row into sixteen lanes that begin as `start`; the last step is filled up with `fill`.
#[inline(always)]
fn fold<L: Lanes>(l: L, row: &[f32], start: f32, fill: f32, f: impl Fn(L::V, L::V) -> L::V) -> L::V {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut acc = l.splat(start);
    for c in chunks {
        acc = f(l.load(c), acc);
    }
    if !tail.is_empty() {
        acc = f(l.load_part(tail, fill), acc);
    }
    acc
}

#[inline(always)]
fn sum_of<L: Lanes>(l: L, row: &[f32], fill: f32, f: impl Fn(L::V, L::V) -> L::V) -> f32 {
    let acc = fold(l, row, 0.0, fill, f);
    l.sum(acc)
}

/// Replaces a row by `e^(x - max) / Σ e^(x - max)`, rounded to fp16 if `half`. A row with a NaN, or with nothing
/// but `-inf`, becomes NaN.
pub fn softmax(isa: Isa, row: &mut [f32], half: bool) {
    isa.run(SoftmaxKernel { row, half });
}

struct SoftmaxKernel<'a> {
    row: &'a mut [f32],
    half: bool,
}

impl Kernel for SoftmaxKernel<'_> {
    type Out = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let SoftmaxKernel { row, half } = self;
        // A NaN is lost here and comes back through the exponentials.
        let max = l.largest(fold(l, row, f32::NEG_INFINITY, f32::NEG_INFINITY, |x, acc| l.max(x, acc)));
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
        let sum = l.sum(acc);
        let (s, inverse) = (l.splat(-sum), l.splat(1.0 / sum));
        let divide = |e: L::V| {
            let q = l.mul(e, inverse);
            let y = l.fma(l.fma(q, s, e), inverse, q);
            if half { l.round_half(y) } else { y }
        };
        for c in chunks {
            l.store(divide(l.load(c)), c);
        }
        if !tail.is_empty() {
            l.store_part(divide(l.load_part(tail, 0.0)), tail);
        }
    }
}

/// `dst = (src - mean) / √(variance + epsilon) * gamma + beta` over one row, rounded to fp16 if `half`.
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
        let mean = sum_of(l, src, 0.0, |x, acc| l.add(acc, x)) / n;
        let m = l.splat(mean);
        // The filler of a partial step is the mean, whose deviation is 0.
        let squares = sum_of(l, src, mean, |x, acc| {
            let d = l.sub(x, m);
            l.fma(d, d, acc)
        });
        let inverse = l.splat(1.0 / (squares / n + epsilon).sqrt());
        let finish = |x: L::V, g: Option<L::V>, b: Option<L::V>| {
            let mut y = l.mul(l.sub(x, m), inverse);
            if let Some(g) = g {
                y = l.mul(y, g);
            }
            if let Some(b) = b {
                y = l.add(y, b);
            }
            if half { l.round_half(y) } else { y }
        };
        let (chunks, tail) = dst.as_chunks_mut::<LANES>();
        let whole = chunks.len() * LANES;
        let at = |v: &[f32], i: usize| l.load(v[i * LANES..].first_chunk().expect("lengths are equal"));
        for (i, d) in chunks.iter_mut().enumerate() {
            let y = finish(at(src, i), gamma.map(|g| at(g, i)), beta.map(|b| at(b, i)));
            l.store(y, d);
        }
        if !tail.is_empty() {
            let part = |v: &[f32]| l.load_part(&v[whole..], 0.0);
            l.store_part(finish(part(src), gamma.map(part), beta.map(part)), tail);
        }
    }
}
