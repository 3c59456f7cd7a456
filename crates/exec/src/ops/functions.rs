//! Functions of one value that have no kernel: their definitions.

pub(super) fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

pub(super) fn gelu(x: f32) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = (0.5 * f64::from(x) * (1.0 + erf64(f64::from(x) / std::f64::consts::SQRT_2))) as f32;
    // -inf times 0
    if x == f32::NEG_INFINITY { -0.0 } else { y }
}

pub(super) fn gelu_tanh(x: f32) -> f32 {
    if x == f32::NEG_INFINITY {
        return -0.0;
    }
    let x = f64::from(x);
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = (0.5 * x * (1.0 + inner.tanh())) as f32;
    y
}

pub(super) fn gelu_sigmoid(x: f32) -> f32 {
    if x == f32::NEG_INFINITY {
        return -0.0;
    }
    let x = f64::from(x);
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = (x / (1.0 + (-1.702 * x).exp())) as f32;
    y
}

pub(super) fn erf(x: f32) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "the result is an f32")]
    let y = erf64(f64::from(x)) as f32;
    y
}

/// -1, 0 or 1; NaN stays.
pub(super) fn sign(x: f32) -> f32 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        x
    }
}

/// `ln(1 + e^x)`, without overflow.
pub(super) fn softplus(x: f32) -> f32 {
    (-x.abs()).exp().ln_1p() + x.max(0.0)
}

/// The error function, to about 1e-15: its Taylor series near 0, the continued fraction of its complement beyond.
fn erf64(x: f64) -> f64 {
    let a = x.abs();
    if a.is_nan() {
        return x;
    }
    let y = if a < 2.5 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term.abs() > 1e-18 * sum.abs() && n < 100.0 {
            n += 1.0;
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
        }
        sum * std::f64::consts::FRAC_2_SQRT_PI
    } else if a < 6.0 {
        let mut fraction = a;
        for n in (1..=60).rev() {
            fraction = a + f64::from(n) / 2.0 / fraction;
        }
        1.0 - (-a * a).exp() / (fraction * std::f64::consts::PI.sqrt())
    } else {
        1.0
    };
    y.copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the error function to 15 digits (Abramowitz and Stegun 7.1; mpmath).
    #[test]
    fn erf_equals_tabulated_values() {
        for (x, want) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (2.6, 0.999_763_965_583_470_6),
            (3.0, 0.999_977_909_503_001_4),
        ] {
            assert!((erf64(x) - want).abs() < 1e-13, "erf({x}) = {}", erf64(x));
            assert_eq!(erf64(-x), -erf64(x));
        }
    }
}
