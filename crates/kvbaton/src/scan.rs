//! Values that a cache should not hold, and where they are.

use half::{bf16, f16};
use kvbaton_layout::{DType, Part};
use serde::Serialize;

use crate::{CacheView, Error};

/// What kind of value was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Unusual {
    /// Not a number.
    Nan,
    /// Infinite.
    Infinity,
    /// Finite, and infinite in the type that was asked about.
    Overflow,
}

/// An unusual value and its place.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// What it is.
    pub kind: Unusual,
    /// What it is part of.
    pub tensor: Part,
    /// Layer.
    pub layer: usize,
    /// Head.
    pub head: usize,
    /// Position of the token; of a state, its row.
    pub row: i64,
    /// Lane.
    pub lane: usize,
    /// The value; null in JSON where it is no number.
    pub value: f32,
}

/// What a scan found.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Scan {
    /// Values that are not a number.
    pub nan: u64,
    /// Infinite values.
    pub infinity: u64,
    /// Finite values that the type asked about cannot hold.
    pub overflow: u64,
    /// The largest finite magnitude.
    pub largest: f32,
    /// The first findings, in the order of layer, part, head, row and lane.
    pub places: Vec<Finding>,
}

impl CacheView {
    /// Looks at every live value: which are not finite, and which would overflow in `dtype`. The first `limit` are
    /// named.
    ///
    /// # Errors
    ///
    /// When the view's memory does not fit its layout.
    pub fn scan(&self, dtype: DType, limit: usize) -> Result<Scan, Error> {
        let mut scan = Scan::default();
        for (layer, spec) in self.cache().layers.iter().enumerate() {
            let parts = match spec.attention() {
                Some(_) => [Part::Key, Part::Value],
                None => [Part::Conv, Part::State],
            };
            for part in parts {
                let runs = self.rows(layer, part)?;
                if runs.is_empty() {
                    continue;
                }
                let rows: Vec<i64> = runs.into_iter().flatten().collect();
                let (bytes, stored, [_, count, lanes], _) = self.canonical(layer, part)?;
                for (i, value) in values(&bytes, stored).enumerate() {
                    if let Some(kind) = scan.count(value, dtype)
                        && scan.places.len() < limit
                    {
                        let (head, row) = (i / lanes / count, rows[i / lanes % count]);
                        let (tensor, lane) = (part, i % lanes);
                        scan.places.push(Finding { kind, tensor, layer, head, row, lane, value });
                    }
                }
            }
        }
        Ok(scan)
    }
}

impl Scan {
    fn count(&mut self, value: f32, dtype: DType) -> Option<Unusual> {
        if value.is_nan() {
            self.nan += 1;
            return Some(Unusual::Nan);
        }
        if value.is_infinite() {
            self.infinity += 1;
            return Some(Unusual::Infinity);
        }
        self.largest = self.largest.max(value.abs());
        let narrow = match dtype {
            DType::Float16 => f16::from_f32(value).is_infinite(),
            DType::BFloat16 => bf16::from_f32(value).is_infinite(),
            _ => false,
        };
        self.overflow += u64::from(narrow);
        narrow.then_some(Unusual::Overflow)
    }
}

/// Elements as float32.
fn values(bytes: &[u8], dtype: DType) -> Box<dyn Iterator<Item = f32> + '_> {
    let halves = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        DType::Float16 => Box::new(halves().map(|b| f16::from_ne_bytes(*b).to_f32())),
        DType::BFloat16 => Box::new(halves().map(|b| bf16::from_ne_bytes(*b).to_f32())),
        _ => Box::new(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b))),
    }
}
