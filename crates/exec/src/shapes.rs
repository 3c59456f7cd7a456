//! Which shapes an input may have.

use std::fmt;

use kvbaton_mil::program::{Dim, TensorType};
use kvbaton_mil::{ArrayFeature, Flexibility, SizeRange};

/// The shapes of an input, from the package's description and the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shapes {
    /// One of these.
    Enumerated(Vec<Vec<usize>>),
    /// Any within these bounds, one a dimension.
    Ranges(Vec<SizeRange>),
}

impl Shapes {
    /// What `described` and the program's type `ty` allow. Where the description says nothing, dimensions that the
    /// program leaves open may have any size.
    pub(crate) fn of(described: Option<&ArrayFeature>, ty: &TensorType) -> Shapes {
        match described {
            Some(ArrayFeature { flexibility: Flexibility::Enumerated(shapes), shape, .. }) => {
                let mut shapes = shapes.clone();
                if !shape.is_empty() && !shapes.contains(shape) {
                    shapes.insert(0, shape.clone());
                }
                Shapes::Enumerated(shapes)
            }
            Some(ArrayFeature { flexibility: Flexibility::Ranges(ranges), .. }) => {
                Shapes::Ranges(ranges.clone())
            }
            Some(ArrayFeature { flexibility: Flexibility::Fixed, shape, .. })
                if shape.len() == ty.shape.len() =>
            {
                Shapes::Enumerated(vec![shape.clone()])
            }
            _ => Shapes::Ranges(
                ty.shape
                    .iter()
                    .map(|dim| match dim {
                        Dim::Fixed(n) => SizeRange { min: *n, max: Some(*n) },
                        Dim::Unknown => SizeRange { min: 1, max: None },
                    })
                    .collect(),
            ),
        }
    }

    /// Whether `shape` is one of them.
    pub fn allow(&self, shape: &[usize]) -> bool {
        match self {
            Shapes::Enumerated(shapes) => shapes.iter().any(|s| s == shape),
            Shapes::Ranges(ranges) => {
                let within = |(n, r): (&usize, &SizeRange)| *n >= r.min && r.max.is_none_or(|max| *n <= max);
                ranges.len() == shape.len() && shape.iter().zip(ranges).all(within)
            }
        }
    }
}

/// `[1, 8] or [1, 16]`, `[1, 1 to 512]`
impl fmt::Display for Shapes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shapes::Enumerated(shapes) => {
                for (i, shape) in shapes.iter().enumerate() {
                    write!(f, "{}{shape:?}", if i > 0 { " or " } else { "" })?;
                }
                Ok(())
            }
            Shapes::Ranges(ranges) => {
                f.write_str("[")?;
                for (i, SizeRange { min, max }) in ranges.iter().enumerate() {
                    let comma = if i > 0 { ", " } else { "" };
                    match max {
                        Some(max) if max == min => write!(f, "{comma}{min}")?,
                        Some(max) => write!(f, "{comma}{min} to {max}")?,
                        None => write!(f, "{comma}at least {min}")?,
                    }
                }
                f.write_str("]")
            }
        }
    }
}
