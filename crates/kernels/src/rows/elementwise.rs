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
            Binary::Add => map(l, a, b, dst, half, Add),
            Binary::Sub => map(l, a, b, dst, half, Sub),
            Binary::Mul => map(l, a, b, dst, half, Mul),
            Binary::Div => map(l, a, b, dst, half, Div),
            Binary::Max => map(l, a, b, dst, half, Max),
            Binary::Min => map(l, a, b, dst, half, Min),
        }
    }
}

/// A function of two operands, on lanes.
trait Function: Copy {
    fn apply<L: Lanes>(self, l: L, a: L::V, b: L::V) -> L::V;
}

/// Defines functions on lanes: a name, names for the lanes and the operands, and an expression.
macro_rules! functions {
    ($($name:ident($l:ident, $a:ident, $b:ident) $body:expr;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name;

        impl Function for $name {
            #[inline(always)]
            fn apply<L: Lanes>(self, $l: L, $a: L::V, $b: L::V) -> L::V {
                $body
            }
        }
    )*};
}

functions! {
    Add(l, a, b) l.add(a, b);
    Sub(l, a, b) l.sub(a, b);
    Mul(l, a, b) l.mul(a, b);
    Div(l, a, b) l.div(a, b);
    Max(l, a, b) keep_nan(l, a, l.max(a, b));
    Min(l, a, b) keep_nan(l, a, l.min(a, b));
    Identity(_l, a, _b) a;
    Exp(l, a, _b) l.exp(a);
    Silu(l, a, _b) l.div(a, one_plus_exp_minus(l, a));
    Sigmoid(l, a, _b) l.div(l.splat(1.0), one_plus_exp_minus(l, a));
    Square(l, a, _b) l.mul(a, a);
    Sqrt(l, a, _b) l.sqrt(a);
}

/// `1 / √(a + epsilon)`
#[derive(Clone, Copy)]
struct Rsqrt(f32);

impl Function for Rsqrt {
    #[inline(always)]
    fn apply<L: Lanes>(self, l: L, a: L::V, _: L::V) -> L::V {
        l.div(l.splat(1.0), l.sqrt(l.add(a, l.splat(self.0))))
    }
}

/// `1 / (a + epsilon)`
#[derive(Clone, Copy)]
struct Inverse(f32);

impl Function for Inverse {
    #[inline(always)]
    fn apply<L: Lanes>(self, l: L, a: L::V, _: L::V) -> L::V {
        l.div(l.splat(1.0), l.add(a, l.splat(self.0)))
    }
}

#[derive(Clone, Copy)]
struct Tabulated<'a>(&'a [f16]);

impl Function for Tabulated<'_> {
    #[inline(always)]
    fn apply<L: Lanes>(self, l: L, a: L::V, _: L::V) -> L::V {
        let mut values = [f16::ZERO; LANES];
        l.store_half(a, &mut values);
        for v in &mut values {
            *v = self.0[v.to_bits() as usize];
        }
        l.load_half(&values)
    }
}

#[derive(Clone, Copy)]
struct Each<'a>(&'a (dyn Fn(f32) -> f32 + Send + Sync));

impl Function for Each<'_> {
    #[inline(always)]
    fn apply<L: Lanes>(self, l: L, a: L::V, _: L::V) -> L::V {
        let mut values = l.to_array(a);
        for v in &mut values {
            *v = (self.0)(*v);
        }
        l.load(&values)
    }
}

/// `1 + e^-a`
#[inline(always)]
fn one_plus_exp_minus<L: Lanes>(l: L, a: L::V) -> L::V {
    l.add(l.splat(1.0), l.exp(l.mul(a, l.splat(-1.0))))
}

/// `value`, the larger or smaller of `a` and another, or NaN where `a` is NaN: `max` and `min` keep a NaN of their
/// second operand only.
#[inline(always)]
fn keep_nan<L: Lanes>(l: L, a: L::V, value: L::V) -> L::V {
    // 0 times a clamped `a` is 0 for every number, infinities included, and NaN for NaN.
    let clamped = l.max(l.splat(f32::MIN), l.min(l.splat(f32::MAX), a));
    l.fma(clamped, l.splat(0.0), value)
}

#[inline(always)]
fn map<L: Lanes, F: Function>(l: L, a: Source<'_>, b: Source<'_>, dst: &mut [f32], half: bool, f: F) {
    let (chunks, tail) = dst.as_chunks_mut::<LANES>();
    let whole = chunks.len() * LANES;
    for (i, d) in chunks.iter_mut().enumerate() {
        let at = i * LANES;
        let mut y = f.apply(l, a.full(l, at, d), b.full(l, at, d));
        if half {
            y = l.round_half(y);
        }
        l.store(y, d);
    }
    if !tail.is_empty() {
        let mut y = f.apply(l, a.part(l, whole, tail), b.part(l, whole, tail));
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

/// A function that is applied to one value at a time.
#[derive(Clone)]
pub struct Pointwise(std::sync::Arc<dyn Fn(f32) -> f32 + Send + Sync>);

impl Pointwise {
    /// The function `f`.
    pub fn new(f: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Pointwise {
        Pointwise(std::sync::Arc::new(f))
    }
}

impl std::fmt::Debug for Pointwise {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pointwise")
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
    Scalar(Pointwise),
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
        let none = Source::Scalar(0.0);
        match f {
            Unary::Identity => map(l, src, none, dst, half, Identity),
            Unary::Exp => map(l, src, none, dst, half, Exp),
            Unary::Silu => map(l, src, none, dst, half, Silu),
            Unary::Sigmoid => map(l, src, none, dst, half, Sigmoid),
            Unary::Square => map(l, src, none, dst, half, Square),
            Unary::Sqrt => map(l, src, none, dst, half, Sqrt),
            Unary::Rsqrt { epsilon } => map(l, src, none, dst, half, Rsqrt(*epsilon)),
            Unary::Inverse { epsilon } => map(l, src, none, dst, half, Inverse(*epsilon)),
            Unary::Table(table) => map(l, src, none, dst, false, Tabulated(&table.0)),
            Unary::Scalar(f) => map(l, src, none, dst, half, Each(&*f.0)),
        }
    }
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
