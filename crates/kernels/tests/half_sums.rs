//! Sums that are kept in fp16, against numpy's definition of them (`testdata/half_sums.py`).

use half::f16;
use kvbaton_kernels::rows::{
    Isa, Matrix, Panels, Product, Reduction, Source, layer_norm, multiply, reduce, softmax,
};

/// The records of the golden file.
fn golden() -> Vec<Vec<f32>> {
    let mut rest: &[u8] = include_bytes!("../testdata/half_sums.bin");
    let mut records = Vec::new();
    while let Some((len, tail)) = rest.split_first_chunk() {
        let (values, tail) = tail.split_at(u32::from_le_bytes(*len) as usize * 4);
        records.push(values.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect());
        rest = tail;
    }
    assert_eq!(records.len(), 45, "five products of five records, five rows of four");
    records
}

fn half_sums() -> impl Iterator<Item = Isa> {
    Isa::available().into_iter().map(|isa| isa.with_half_sums(true))
}

#[test]
fn products_equal_numpy() {
    for case in golden()[..25].chunks(5) {
        let [m, k, n] = [0, 1, 2].map(|i| case[0][i] as usize);
        let (left, right, bias, want) = (&case[1], &case[2], &case[3], &case[4]);
        for isa in half_sums() {
            let matrix = Matrix { values: Source::Singles(right), k, n, k_stride: 1, n_stride: k };
            let product = Product { left, left_stride: k, m, right: matrix, bias: Some(bias), half: true };
            let mut got = vec![f32::NAN; m * n];
            multiply(isa, &product, &mut got);
            assert_eq!(&got, want, "{} [{m}, {k}] × [{k}, {n}]", isa.name());

            // A product without bias, cut and packed in another way.
            multiply(isa, &Product { bias: None, ..product }, &mut got);
            let mut panels = Panels::default();
            panels.pack(isa, &matrix);
            let mut cut = vec![f32::NAN; m * n];
            for (i, out) in cut.chunks_mut(n).enumerate() {
                panels.multiply(isa, &left[i * k..], k, 1, k, n, out, n, true);
            }
            assert_eq!(got, cut, "{} [{m}, {k}] × [{k}, {n}], row by row", isa.name());
        }
    }
}

/// Within one fp16 step: exponentials round by themselves.
fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    let bits = |x: f32| i32::from(f16::from_f32(x).to_bits() & 0x7FFF);
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let steps = (bits(*g) - bits(*w)).abs();
        assert!(g.signum() == w.signum() && steps <= 1, "{what} value {i}: {g}, not {w}");
    }
}

#[test]
fn row_sums_equal_numpy() {
    for case in golden()[25..].chunks(4) {
        let row = &case[0];
        for isa in half_sums() {
            let what = format!("{} row of {}", isa.name(), row.len());
            assert_eq!(reduce(isa, Reduction::Sum, row), case[1][0], "{what}");
            assert_eq!(reduce(isa, Reduction::SumOfSquares, row), case[2][0], "{what}");
            let mut got = row.clone();
            softmax(isa, &mut got, true);
            assert_close(&what, &got, &case[3]);
        }
    }
}

/// 5000 times 20 is beyond fp16.
#[test]
fn fp16_sums_lose_what_f32_keeps() {
    let row = vec![20.0; 5000];
    for isa in half_sums() {
        assert_eq!(reduce(isa.with_half_sums(false), Reduction::Sum, &row), 100_000.0);
        assert_eq!(reduce(isa, Reduction::Sum, &row), f32::INFINITY);
    }
}

#[test]
fn results_that_are_not_fp16_are_summed_in_f32() {
    let row: Vec<f32> = (0..300).map(|i| (i % 17) as f32 * 0.3).collect();
    for isa in half_sums() {
        let exact = isa.with_half_sums(false);
        let (mut a, mut b) = (row.clone(), row.clone());
        softmax(isa, &mut a, false);
        softmax(exact, &mut b, false);
        assert_eq!(a, b);
        let norm = |isa, half| {
            let mut normed = vec![0.0; row.len()];
            layer_norm(isa, &row, 1e-5, None, None, &mut normed, half);
            normed
        };
        assert_eq!(norm(isa, false), norm(exact, false));
        assert_eq!(norm(isa, true), norm(exact, true), "the sums of a norm stay in f32");
        let matrix = Matrix { values: Source::Singles(&row), k: 100, n: 3, k_stride: 1, n_stride: 100 };
        let product = Product { left: &row, left_stride: 100, m: 3, right: matrix, bias: None, half: false };
        let (mut a, mut b) = (vec![0.0; 9], vec![0.0; 9]);
        multiply(isa, &product, &mut a);
        multiply(exact, &product, &mut b);
        assert_eq!(a, b);
    }
}
