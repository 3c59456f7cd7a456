//! Row passes and products against plain definitions, on every instruction set this CPU has.

use half::f16;
use kvbaton_kernels::rows::{
    Binary, Isa, Matrix, Panels, Product, Reduction, Source, Table, Unary, binary, layer_norm, multiply,
    multiply_into, narrow, reduce, softmax, unary, widen,
};
use proptest::prelude::*;

fn all_halves() -> Vec<f32> {
    (0..=u16::MAX).map(|bits| f16::from_bits(bits).to_f32()).collect()
}

fn rounded(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

fn assert_same(what: &str, inputs: &[f32], got: &[f32], want: impl Fn(f32) -> f32) {
    for (x, y) in inputs.iter().zip(got) {
        let w = want(*x);
        assert!(
            y.to_bits() == w.to_bits() || (y.is_nan() && w.is_nan()),
            "{what}({x:e}) = {y:e}, the definition says {w:e}"
        );
    }
}

/// Every fp16 input, after rounding to fp16, equals the definition written with the C library's functions.
#[test]
fn unary_functions_equal_their_definitions_for_all_fp16_inputs() {
    let inputs = all_halves();
    type Case = (&'static str, Unary, fn(f32) -> f32);
    let cases: [Case; 8] = [
        ("identity", Unary::Identity, |x| x),
        ("exp", Unary::Exp, |x| x.exp()),
        ("silu", Unary::Silu, |x| x / (1.0 + (-x).exp())),
        ("sigmoid", Unary::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
        ("square", Unary::Square, |x| x * x),
        ("sqrt", Unary::Sqrt, |x| x.sqrt()),
        ("rsqrt", Unary::Rsqrt { epsilon: 1e-5 }, |x| 1.0 / (x + 1e-5).sqrt()),
        ("tanh", Unary::Table(Table::new(f32::tanh)), |x| x.tanh()),
    ];
    for isa in Isa::available() {
        for (name, function, definition) in &cases {
            let mut got = vec![0.0; inputs.len()];
            unary(isa, function, Source::Singles(&inputs), &mut got, true);
            assert_same(&format!("{} {name}", isa.name()), &inputs, &got, |x| rounded(definition(x)));
        }
    }
}

/// `e^x` in `f32`, against `f64`: within 0.65 units in the last place over its whole range.
#[test]
fn exp_is_accurate_in_f32() {
    for isa in Isa::available() {
        let inputs: Vec<f32> = (-90_000..90_000).map(|i| i as f32 * 1e-3).filter(|x| *x > -87.0).collect();
        let mut got = vec![0.0; inputs.len()];
        unary(isa, &Unary::Exp, Source::Singles(&inputs), &mut got, false);
        for (x, y) in inputs.iter().zip(&got).filter(|(x, _)| **x < 88.7) {
            let exact = f64::from(*x).exp();
            let unit = f64::from(f32::from_bits(y.to_bits() + 1)) - f64::from(*y);
            let error = (f64::from(*y) - exact).abs() / unit;
            assert!(error < 0.65, "{} exp({x}) = {y}, {error} units off", isa.name());
        }
        for (x, want) in [(-104.0, 0.0), (-1e30, 0.0), (f32::NEG_INFINITY, 0.0), (89.0, f32::INFINITY)] {
            let mut got = [x];
            unary(isa, &Unary::Exp, Source::Destination, &mut got, false);
            assert_eq!(got[0].to_bits(), f32::to_bits(want), "exp({x})");
        }
    }
}

#[test]
fn widening_and_narrowing_equal_the_half_crate_for_all_values() {
    let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    for isa in Isa::available() {
        let mut wide = vec![0.0; halves.len()];
        widen(isa, &halves, &mut wide);
        assert_same(isa.name(), &all_halves(), &wide, |x| x);
        // Both neighbours of every midpoint between fp16 values, and the midpoint itself.
        let inputs: Vec<f32> = (0..0x7c00u16)
            .flat_map(|b| {
                let middle = (f16::from_bits(b).to_f32() + f16::from_bits(b + 1).to_f32()) / 2.0;
                let bits = middle.to_bits();
                [bits - 1, bits, bits + 1].map(f32::from_bits)
            })
            .collect();
        let mut narrowed = vec![f16::ZERO; inputs.len()];
        narrow(isa, &inputs, &mut narrowed);
        for (x, y) in inputs.iter().zip(&narrowed) {
            assert_eq!(y.to_bits(), f16::from_f32(*x).to_bits(), "{} narrow({x:e})", isa.name());
        }
    }
}

#[test]
fn binary_operations_equal_the_scalar_ones() {
    let special = [0.0, -0.0, 1.0, -3.5, 65504.0, 1e-7, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for x in special {
        for y in special {
            a.push(x);
            b.push(y);
        }
    }
    let nan_or = |a: f32, b: f32, m: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { m };
    for isa in Isa::available() {
        for op in [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::Max, Binary::Min] {
            for half in [false, true] {
                let mut got = vec![0.0; a.len()];
                binary(isa, op, Source::Singles(&a), Source::Singles(&b), &mut got, half);
                for i in 0..a.len() {
                    let (x, y) = (a[i], b[i]);
                    let want = match op {
                        Binary::Add => x + y,
                        Binary::Sub => x - y,
                        Binary::Mul => x * y,
                        Binary::Div => x / y,
                        Binary::Max => nan_or(x, y, x.max(y)),
                        Binary::Min => nan_or(x, y, x.min(y)),
                    };
                    let want = if half { rounded(want) } else { want };
                    assert!(
                        got[i] == want || (got[i].is_nan() && want.is_nan()),
                        "{} {op:?}({x}, {y}) = {}, not {want}",
                        isa.name(),
                        got[i]
                    );
                }
            }
        }
    }
}

fn values(len: impl Into<proptest::collection::SizeRange>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec((-8.0f32..8.0).prop_map(rounded), len)
}

proptest! {
    #[test]
    fn every_source_of_an_operand_gives_the_same(row in values(1..70), other in values(70)) {
        let other = &other[..row.len()];
        let halves: Vec<f16> = other.iter().map(|x| f16::from_f32(*x)).collect();
        let want: Vec<f32> = row.iter().zip(other).map(|(a, b)| rounded(a * b)).collect();
        for isa in Isa::available() {
            let mut got = vec![0.0; row.len()];
            binary(isa, Binary::Mul, Source::Singles(&row), Source::Halves(&halves), &mut got, true);
            prop_assert_eq!(&got, &want);
            got.copy_from_slice(&row);
            binary(isa, Binary::Mul, Source::Destination, Source::Singles(other), &mut got, true);
            prop_assert_eq!(&got, &want);
        }
    }

    #[test]
    fn softmax_equals_f64_within_two_units(row in values(1..200)) {
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let e: Vec<f64> = row.iter().map(|x| f64::from(x - max).exp()).collect();
        let sum: f64 = e.iter().sum();
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut got = row.clone();
            softmax(isa, &mut got, false);
            for (y, e) in got.iter().zip(&e) {
                let want = e / sum;
                // The sum of up to 200 terms in f32 is off by a few units.
                prop_assert!((f64::from(*y) - want).abs() <= want * 5e-7, "{} {y} {want}", isa.name());
            }
            prop_assert_eq!(&got, first.get_or_insert(got.clone()), "all instruction sets agree");
        }
    }

    #[test]
    fn softmax_ignores_what_underflows(row in values(1..100), hidden in 0usize..64) {
        for isa in Isa::available() {
            let mut short = row.clone();
            softmax(isa, &mut short, true);
            let mut long = row.clone();
            long.resize(row.len() + hidden, -40000.0);
            softmax(isa, &mut long, true);
            prop_assert_eq!(&long[..row.len()], &short[..]);
            prop_assert!(long[row.len()..].iter().all(|x| x.to_bits() == 0));
        }
    }

    #[test]
    fn layer_norm_equals_f64(row in values(2..200), gain in values(200), shift in values(200)) {
        let n = row.len();
        let mean = row.iter().map(|x| f64::from(*x)).sum::<f64>() / n as f64;
        let variance = row.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n as f64;
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let mut got = vec![0.0; n];
            layer_norm(isa, &row, 1e-3, Some(&gain[..n]), Some(&shift[..n]), &mut got, false);
            for i in 0..n {
                let norm = (f64::from(row[i]) - mean) / (variance + f64::from(1e-3f32)).sqrt();
                let want = norm * f64::from(gain[i]) + f64::from(shift[i]);
                // The mean is off by up to 2e-6, which a variance near 0 divides by √epsilon = 0.03.
                let size = (norm.abs() + 1.0) * (f64::from(gain[i].abs()) + 1.0);
                prop_assert!((f64::from(got[i]) - want).abs() < 1e-4 * size, "{} {} {want}", isa.name(), got[i]);
            }
            prop_assert_eq!(&got, first.get_or_insert(got.clone()), "all instruction sets agree");
        }
    }

    #[test]
    fn reductions_equal_f64(row in values(1..200)) {
        let wide = || row.iter().map(|x| f64::from(*x));
        for isa in Isa::available() {
            let sum = wide().sum::<f64>();
            prop_assert!((f64::from(reduce(isa, Reduction::Sum, &row)) - sum).abs() < 1e-3);
            prop_assert!((f64::from(reduce(isa, Reduction::Mean, &row)) - sum / row.len() as f64).abs() < 1e-4);
            let squares = wide().map(|x| x * x).sum::<f64>();
            prop_assert!((f64::from(reduce(isa, Reduction::SumOfSquares, &row)) - squares).abs() < 1e-2);
            prop_assert_eq!(reduce(isa, Reduction::Max, &row), row.iter().copied().fold(f32::MIN, f32::max));
            prop_assert_eq!(reduce(isa, Reduction::Min, &row), row.iter().copied().fold(f32::MAX, f32::min));
        }
    }

    /// The definition: one chain of fused multiply-adds over k. Bits, not tolerances.
    #[test]
    fn products_equal_the_chain_of_multiply_adds(
        m in 2usize..20, k in 0usize..50, n in 1usize..70, turned: bool, half: bool, with_bias: bool, seed: u32,
    ) {
        let left = noise(m * (k + 3), seed);
        let right = noise(k * n, seed ^ 1);
        let halves: Vec<f16> = right.iter().map(|x| f16::from_f32(*x)).collect();
        let bias = noise(n, seed ^ 2);
        let bias = with_bias.then_some(&bias[..]);
        let (k_stride, n_stride) = if turned { (1, k) } else { (n, 1) };
        let mut want = vec![0.0; m * n];
        for i in 0..m {
            for j in 0..n {
                let mut sum = 0.0f32;
                for p in 0..k {
                    sum = left[i * (k + 3) + p].mul_add(right[p * k_stride + j * n_stride], sum);
                }
                let sum = bias.map_or(sum, |b| sum + b[j]);
                want[i * n + j] = if half { rounded(sum) } else { sum };
            }
        }
        for isa in Isa::available() {
            for values in [Source::Singles(&right), Source::Halves(&halves)] {
                let right = Matrix { values, k, n, k_stride, n_stride };
                let product = Product { left: &left, left_stride: k + 3, m, right, bias, half };
                let mut got = vec![f32::NAN; m * n];
                multiply(isa, &product, &mut got);
                prop_assert_eq!(&got, &want, "{} {:?}", isa.name(), right);
                if bias.is_none() {
                    let mut panels = Panels::default();
                    panels.pack(isa, &right);
                    let mut got = vec![f32::NAN; m * n];
                    panels.multiply(isa, &left, k + 3, m, k, n, &mut got, n, half);
                    prop_assert_eq!(&got, &want, "panels {}", isa.name());
                }
            }
        }
    }

    #[test]
    fn a_single_row_equals_f64(k in 0usize..200, n in 1usize..40, seed: u32) {
        let left = noise(k, seed);
        let right = noise(k * n, seed ^ 1);
        let halves: Vec<f16> = right.iter().map(|x| f16::from_f32(*x)).collect();
        for isa in Isa::available() {
            let values = Source::Halves(&halves);
            let right_matrix = Matrix { values, k, n, k_stride: 1, n_stride: k };
            let product = Product { left: &left, left_stride: k, m: 1, right: right_matrix, bias: None, half: false };
            let mut got = vec![f32::NAN; n];
            multiply(isa, &product, &mut got);
            for j in 0..n {
                let want: f64 = (0..k).map(|p| f64::from(left[p]) * f64::from(right[j * k + p])).sum();
                prop_assert!((f64::from(got[j]) - want).abs() < 1e-4, "{} {} {want}", isa.name(), got[j]);
            }
        }
    }
}

/// fp16 values in -2..2 from a small generator.
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            rounded((state >> 8) as f32 / (1 << 22) as f32 - 2.0)
        })
        .collect()
}

/// Depths beyond one block of k, and rows beyond one task.
#[test]
fn blocked_products_equal_the_chain_of_multiply_adds() {
    let (m, k, n) = (521, 1500, 40);
    let (left, right) = (noise(m * k, 3), noise(k * n, 4));
    let rows = [0, 7, 511, 512, 520];
    for isa in Isa::available().into_iter().filter(|isa| isa.name() != "portable") {
        let matrix = Matrix { values: Source::Singles(&right), k, n, k_stride: 1, n_stride: k };
        let product = Product { left: &left, left_stride: k, m, right: matrix, bias: None, half: false };
        let mut got = vec![f32::NAN; m * n];
        multiply(isa, &product, &mut got);
        for i in rows {
            for j in 0..n {
                let chain = (0..k).fold(0.0f32, |sum, p| left[i * k + p].mul_add(right[j * k + p], sum));
                assert_eq!(got[i * n + j], chain, "{} row {i} column {j}", isa.name());
            }
        }
    }
}

/// Pieces of the right factor, each into its own columns, give the same bits as the whole.
#[test]
fn products_by_columns_equal_the_whole_product() {
    for m in [1, 5, 30] {
        let (k, n) = (70, 100);
        let (left, right) = (noise(m * k, 5), noise(n * k, 6));
        for isa in Isa::available() {
            let matrix = Matrix { values: Source::Singles(&right), k, n, k_stride: 1, n_stride: k };
            let product = Product { left: &left, left_stride: k, m, right: matrix, bias: None, half: true };
            let mut whole = vec![f32::NAN; m * n];
            multiply(isa, &product, &mut whole);
            let mut pieces = vec![f32::NAN; m * n];
            for (at, width) in [(0, 33), (33, 64), (97, 3)] {
                let values = Source::Singles(&right[at * k..(at + width) * k]);
                let right = Matrix { values, n: width, ..matrix };
                multiply_into(isa, &Product { right, ..product }, &mut pieces[at..], n);
            }
            assert_eq!(pieces, whole, "{} with {m} rows", isa.name());
        }
    }
}
