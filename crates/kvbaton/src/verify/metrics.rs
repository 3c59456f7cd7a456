//! Distances between two lists of numbers.

use serde::Serialize;

/// How far one list of values is from another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Distance {
    /// The largest difference.
    pub(crate) max_abs: f64,
    /// Norm of the difference over the norm of what was expected.
    pub(crate) relative: f64,
    /// Cosine of the angle between both.
    pub(crate) cosine: f64,
    /// Norm found over norm expected.
    pub(crate) norm_ratio: f64,
}

/// Sums that distances are made of; they add up over pieces.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    max_abs: f64,
    expected: f64,
    found: f64,
    product: f64,
    difference: f64,
}

impl Sums {
    pub(crate) fn of(expected: &[f32], found: &[f32]) -> Sums {
        let mut sums = Sums::default();
        for (e, f) in expected.iter().zip(found) {
            let (e, f) = (f64::from(*e), f64::from(*f));
            let d = (f - e).abs();
            // A difference that is not a number counts as the largest there is.
            sums.max_abs = if d.is_nan() { f64::INFINITY } else { sums.max_abs.max(d) };
            sums.expected += e * e;
            sums.found += f * f;
            sums.product += e * f;
            sums.difference += d * d;
        }
        sums
    }

    pub(crate) fn add(&mut self, other: &Sums) {
        self.max_abs = self.max_abs.max(other.max_abs);
        self.expected += other.expected;
        self.found += other.found;
        self.product += other.product;
        self.difference += other.difference;
    }

    /// Root mean square of what was expected, per `count` pieces.
    pub(crate) fn expected_norm(&self, count: usize) -> f64 {
        (self.expected / count.max(1) as f64).sqrt()
    }

    pub(crate) fn difference_norm(&self) -> f64 {
        self.difference.sqrt()
    }

    pub(crate) fn distance(&self) -> Distance {
        let (expected, found) = (self.expected.sqrt(), self.found.sqrt());
        let ratio = |a: f64, b: f64| match (a == 0.0, b == 0.0) {
            (true, true) => 1.0,
            (false, true) => f64::INFINITY,
            _ => a / b,
        };
        let cosine = if expected == 0.0 || found == 0.0 {
            f64::from(u8::from(expected == found))
        } else {
            self.product / (expected * found)
        };
        let relative = if self.difference == 0.0 { 0.0 } else { ratio(self.difference.sqrt(), expected) };
        Distance { max_abs: self.max_abs, relative, cosine, norm_ratio: ratio(found, expected) }
    }
}

/// Whether two lists are the same but for rounding: what the explanations go by.
pub(crate) fn alike(expected: &[f32], found: &[f32]) -> bool {
    if expected.len() != found.len() || expected.is_empty() {
        return false;
    }
    let d = Sums::of(expected, found).distance();
    d.cosine > 0.999 && (0.98..1.02).contains(&d.norm_ratio)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_definitions() {
        let d = Sums::of(&[3.0, 4.0], &[4.0, 3.0]).distance();
        assert_eq!((d.max_abs, d.cosine, d.norm_ratio), (1.0, 24.0 / 25.0, 1.0));
        assert!((d.relative - 2.0_f64.sqrt() / 5.0).abs() < 1e-15);
    }

    #[test]
    fn a_value_that_is_no_number_is_as_far_as_can_be() {
        let d = Sums::of(&[1.0, f32::NAN, 1.0], &[1.0, 1.0, 1.0]).distance();
        assert_eq!(d.max_abs, f64::INFINITY);
        assert!(d.cosine.is_nan());
        assert!(!alike(&[1.0, 1.0], &[1.0, f32::NAN]));
    }

    #[test]
    fn zeros_are_like_zeros_and_like_nothing_else() {
        let d = Sums::of(&[0.0, 0.0], &[0.0, 0.0]).distance();
        assert_eq!((d.cosine, d.norm_ratio, d.relative), (1.0, 1.0, 0.0));
        let d = Sums::of(&[0.0, 0.0], &[1.0, 0.0]).distance();
        assert_eq!((d.cosine, d.norm_ratio), (0.0, f64::INFINITY));
        let d = Sums::of(&[1.0, 0.0], &[0.0, 0.0]).distance();
        assert_eq!((d.cosine, d.norm_ratio, d.relative), (0.0, 0.0, 1.0));
    }
}
