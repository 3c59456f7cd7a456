//! Compressed weights: what `constexpr_*` operations describe, evaluated piece by piece.
//!
//! A weight is a tree of recipes over constants that stay in the mapped file. Any run of its elements, in row-major
//! order, can be computed by itself: a whole weight at load (on all threads, into fp16), or a few rows of it each time
//! they are used.

mod grid;
mod mask;
mod recipe;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use half::f16;
use kvbaton_kernels::rows::{self, Isa, Source, Unary};
use kvbaton_mil::program::DataType;
use rayon::prelude::*;

use crate::memory::FloatBuf;
use crate::tensor::Data;

pub(crate) use grid::Grid;
pub(crate) use mask::Mask;
pub(crate) use recipe::{Lookup, Numbers, Recipe, Shift, Stored};

/// Elements that are computed at a time: together with codes and parameters they stay in the first-level cache.
pub(crate) const PIECE: usize = 2048;

/// Whether decompressed weights are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WeightStorage {
    /// Decompressed to fp16 at load, and kept.
    #[default]
    Resident,
    /// Decompressed each time they are used: a few rows at a time for `linear` and `gather`, one whole weight at a
    /// time for other operations. The results are the same bits.
    Streamed,
}

impl WeightStorage {
    /// Both.
    pub const ALL: [WeightStorage; 2] = [WeightStorage::Resident, WeightStorage::Streamed];

    /// The name on the command line: `resident`, `streamed`.
    pub fn name(self) -> &'static str {
        match self {
            WeightStorage::Resident => "resident",
            WeightStorage::Streamed => "streamed",
        }
    }

    /// The one called `name`.
    pub fn from_name(name: &str) -> Option<WeightStorage> {
        WeightStorage::ALL.into_iter().find(|w| w.name() == name)
    }
}

/// A compressed weight of `count` float values.
#[derive(Debug)]
pub(crate) struct Compressed {
    recipe: Recipe,
    /// fp16 or fp32.
    dtype: DataType,
    count: usize,
    /// What it was made from; `None` where that has no short name.
    key: Option<WeightKey>,
}

impl Compressed {
    pub(crate) fn new(recipe: Recipe, dtype: DataType, count: usize, key: Option<WeightKey>) -> Compressed {
        Compressed { recipe, dtype, count, key }
    }

    /// Bytes of its values when they are kept.
    pub(crate) fn resident_bytes(&self) -> usize {
        self.count * if self.dtype == DataType::Float16 { 2 } else { 4 }
    }

    /// Its values, to be kept; shared with whoever keeps the same ones.
    pub(crate) fn kept(&self, isa: Isa, cache: &WeightCache) -> Data {
        if self.dtype != DataType::Float16 {
            let mut values = vec![0.0; self.count];
            self.copy_to(isa, 0, &mut values);
            return Data::Float(Arc::new(FloatBuf::owned(values)));
        }
        let make = || self.to_halves(isa);
        Data::Half(match &self.key {
            Some(key) => cache.get_or(key.clone(), make),
            None => Arc::new(make()),
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// All values of an fp16 weight, with the threads of the current rayon pool.
    pub(crate) fn to_halves(&self, isa: Isa) -> Vec<f16> {
        let mut out = vec![f16::ZERO; self.count];
        out.par_chunks_mut(PIECE).enumerate().for_each(|(c, out)| {
            let mut values = [0.0; PIECE];
            let values = &mut values[..out.len()];
            self.recipe.floats(isa, c * PIECE, values);
            rows::narrow(isa, values, out);
        });
        out
    }

    /// Values `start..start + out.len()`, rounded to fp16 where that is their type, with the threads of the current
    /// rayon pool.
    pub(crate) fn copy_to(&self, isa: Isa, start: usize, out: &mut [f32]) {
        assert!(start + out.len() <= self.count, "a run inside the weight");
        let half = self.dtype == DataType::Float16;
        out.par_chunks_mut(PIECE).enumerate().for_each(|(c, out)| {
            self.recipe.floats(isa, start + c * PIECE, out);
            if half {
                rows::unary(isa, &Unary::Identity, Source::Destination, out, true);
            }
        });
    }
}

/// What a decompressed weight was made from: the places or the bytes of its parts.
pub(crate) type WeightKey = Vec<u8>;

/// Decompressed weights that several functions of a package share, as long as one of them is loaded.
#[derive(Debug, Default)]
pub struct WeightCache(Mutex<HashMap<WeightKey, Weak<Vec<f16>>>>);

impl WeightCache {
    /// Weights that somebody holds.
    pub fn kept(&self) -> usize {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.values().filter(|w| w.strong_count() > 0).count()
    }

    /// The weight of this key, made now if nobody holds it.
    pub(crate) fn get_or(&self, key: WeightKey, make: impl FnOnce() -> Vec<f16>) -> Arc<Vec<f16>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = known.get(&key).and_then(Weak::upgrade) {
            return held;
        }
        let made = Arc::new(make());
        known.insert(key, Arc::downgrade(&made));
        made
    }
}
