//! Least squares with coefficients that are never negative.

/// A figure: what it took, and what there was to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Point {
    pub(crate) features: [f64; 3],
    pub(crate) seconds: f64,
}

/// Seconds as a sum of features times coefficients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Fit([f64; 3]);

impl Fit {
    /// Fits `points` by their relative errors; `None` of none.
    ///
    /// Few points decide few coefficients: one point a rate for all that is done, two a constant beside it.
    pub(crate) fn of(points: &[Point]) -> Option<Fit> {
        // The constant is feature 0; the others are amounts of work that may share one rate.
        let shared =
            |p: &Point| Point { features: [p.features[0], p.features[1] + p.features[2], 0.0], ..*p };
        let distinct = distinct(points);
        match distinct {
            0 => None,
            1 => {
                let points: Vec<Point> = points.iter().map(shared).collect();
                solve(&points, &[1]).map(|[a, b, _]| Fit([a, b, b]))
            }
            2 => {
                let points: Vec<Point> = points.iter().map(shared).collect();
                best(&points, &[&[0, 1], &[1], &[0]]).map(|[a, b, _]| Fit([a, b, b]))
            }
            _ => best(points, &[&[0, 1, 2], &[0, 1], &[0, 2], &[1, 2], &[0], &[1], &[2]]).map(Fit),
        }
    }

    /// Seconds for `features`.
    pub(crate) fn seconds(&self, features: [f64; 3]) -> f64 {
        self.0.iter().zip(features).map(|(c, f)| c * f).sum()
    }
}

/// How many points differ in what there was to do.
fn distinct(points: &[Point]) -> usize {
    let mut seen: Vec<[f64; 3]> = Vec::new();
    for point in points {
        let near = |other: &[f64; 3]| {
            other.iter().zip(point.features).all(|(a, b)| (a - b).abs() <= 1e-6 * a.abs().max(b.abs()))
        };
        if !seen.iter().any(near) {
            seen.push(point.features);
        }
    }
    seen.len()
}

/// The subset of features whose least squares are feasible and smallest: with three features, trying all is the
/// exact answer of non-negative least squares.
fn best(points: &[Point], subsets: &[&[usize]]) -> Option<[f64; 3]> {
    subsets
        .iter()
        .filter_map(|subset| solve(points, subset))
        .filter(|c| c.iter().all(|c| *c >= 0.0))
        .min_by(|a, b| error(points, a).total_cmp(&error(points, b)))
}

fn error(points: &[Point], coefficients: &[f64; 3]) -> f64 {
    points.iter().map(|p| (Fit(*coefficients).seconds(p.features) / p.seconds - 1.0).powi(2)).sum()
}

/// Solves the normal equations of the relative errors for the features of `subset`.
fn solve(points: &[Point], subset: &[usize]) -> Option<[f64; 3]> {
    let count = subset.len();
    // Features differ by twelve orders of magnitude: each is scaled to its largest share first.
    let scale = |f: usize| points.iter().map(|p| p.features[f] / p.seconds).fold(0.0, f64::max);
    let scales: Vec<f64> = subset.iter().map(|&f| scale(f)).collect();
    if scales.contains(&0.0) {
        return None;
    }
    let mut rows = vec![[0.0; 4]; count];
    for point in points {
        let x: Vec<f64> =
            subset.iter().zip(&scales).map(|(&f, s)| point.features[f] / point.seconds / s).collect();
        for (row, xi) in rows.iter_mut().zip(&x) {
            for (cell, xj) in row.iter_mut().zip(&x) {
                *cell += xi * xj;
            }
            row[3] += xi;
        }
    }
    let solution = gauss(&mut rows)?;
    let mut coefficients = [0.0; 3];
    for ((&feature, value), scale) in subset.iter().zip(solution).zip(&scales) {
        coefficients[feature] = value / scale;
    }
    Some(coefficients)
}

/// Gaussian elimination with pivots; the last column is the right-hand side. `None` where there is no one answer.
fn gauss(rows: &mut [[f64; 4]]) -> Option<Vec<f64>> {
    let count = rows.len();
    for column in 0..count {
        let pivot =
            (column..count).max_by(|&a, &b| rows[a][column].abs().total_cmp(&rows[b][column].abs()))?;
        if rows[pivot][column].abs() < 1e-12 {
            return None;
        }
        rows.swap(column, pivot);
        let lead = rows[column];
        for row in (0..count).filter(|&row| row != column) {
            let factor = rows[row][column] / lead[column];
            for (cell, of) in rows[row].iter_mut().zip(lead) {
                *cell -= factor * of;
            }
        }
    }
    Some((0..count).map(|i| rows[i][3] / rows[i][i]).collect())
}

/// What measurements are of the fit at length `at`, by the logarithm of the length; beyond the shortest and the
/// longest, theirs.
pub(crate) fn correction(fit: &Fit, measured: &[(usize, Point)], at: usize) -> f64 {
    let mut ratios: Vec<(f64, f64)> = Vec::new();
    let mut lengths: Vec<usize> = measured.iter().map(|(n, _)| *n).collect();
    lengths.sort_unstable();
    lengths.dedup();
    for length in lengths {
        let own: Vec<f64> = measured
            .iter()
            .filter(|(n, _)| *n == length)
            .map(|(_, p)| p.seconds / fit.seconds(p.features))
            .filter(|r| r.is_finite())
            .collect();
        if !own.is_empty() {
            ratios.push(((length.max(1) as f64).ln(), own.iter().sum::<f64>() / own.len() as f64));
        }
    }
    let x = (at.max(1) as f64).ln();
    let (Some(first), Some(last)) = (ratios.first(), ratios.last()) else { return 1.0 };
    if x <= first.0 {
        return first.1;
    }
    if x >= last.0 {
        return last.1;
    }
    let after = ratios.partition_point(|(length, _)| *length < x).clamp(1, ratios.len() - 1);
    let ((x0, r0), (x1, r1)) = (ratios[after - 1], ratios[after]);
    r0 + (r1 - r0) * (x - x0) / (x1 - x0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(truth: [f64; 3], amounts: &[f64]) -> Vec<Point> {
        let features = |n: f64| [1.0, 2e9 * n, 3e5 * n * n];
        amounts
            .iter()
            .map(|&n| Point { features: features(n), seconds: Fit(truth).seconds(features(n)) })
            .collect()
    }

    #[test]
    fn coefficients_that_made_the_points_are_found() {
        let truth = [0.02, 3e-12, 8e-12];
        let fit = Fit::of(&points(truth, &[16.0, 100.0, 512.0, 2048.0])).unwrap();
        for (found, made) in fit.0.iter().zip(truth) {
            assert!((found / made - 1.0).abs() < 1e-6, "{fit:?}");
        }
    }

    #[test]
    fn a_coefficient_that_would_be_negative_is_none() {
        let mut points = points([0.0, 3e-12, 0.0], &[16.0, 100.0, 512.0, 2048.0]);
        points[0].seconds *= 0.8;
        let fit = Fit::of(&points).unwrap();
        assert!(fit.0.iter().all(|c| *c >= 0.0), "{fit:?}");
    }

    #[test]
    fn one_point_is_a_rate_and_two_have_a_constant() {
        let one = Fit::of(&points([0.0, 3e-12, 3e-12], &[100.0])).unwrap();
        let of = |n: f64| one.seconds([1.0, 2e9 * n, 3e5 * n * n]);
        assert!((of(200.0) / (3e-12 * (4e11 + 1.2e10)) - 1.0).abs() < 1e-9);
        let two = Fit::of(&points([0.5, 3e-12, 3e-12], &[100.0, 400.0])).unwrap();
        assert!((two.0[0] - 0.5).abs() < 1e-6);
        assert_eq!(Fit::of(&[]), None);
    }

    #[test]
    fn equal_points_twice_are_one() {
        let twice = points([0.0, 3e-12, 3e-12], &[100.0, 100.0]);
        assert_eq!(Fit::of(&twice), Fit::of(&twice[..1]));
    }

    #[test]
    fn corrections_pass_through_the_measurements() {
        let fit = Fit([0.0, 1.0, 0.0]);
        let point = |n: usize, seconds| (n, Point { features: [1.0, n as f64, 0.0], seconds });
        let measured = [point(100, 110.0), point(400, 360.0), point(400, 360.0)];
        for (at, ratio) in [(10, 1.1), (100, 1.1), (200, 1.0), (400, 0.9), (9999, 0.9)] {
            assert!((correction(&fit, &measured, at) - ratio).abs() < 1e-9, "{at}");
        }
        assert_eq!(correction(&fit, &[], 5), 1.0);
    }
}
