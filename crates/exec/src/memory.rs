//! Buffers of float values, used again when freed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Freed buffers by length, and how much is in use.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    free: Mutex<BTreeMap<usize, Vec<Vec<f32>>>>,
    used_bytes: AtomicUsize,
    peak_bytes: AtomicUsize,
    allocated_bytes: AtomicUsize,
}

impl Pool {
    /// A buffer of `len` values, which are whatever an earlier user left: the taker writes all of them.
    pub(crate) fn take(self: &Arc<Pool>, len: usize) -> FloatBuf {
        let found = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.get_mut(&len).and_then(Vec::pop)
        };
        let used = self.used_bytes.fetch_add(len * 4, Ordering::Relaxed) + len * 4;
        self.peak_bytes.fetch_max(used, Ordering::Relaxed);
        let values = found.unwrap_or_else(|| {
            self.allocated_bytes.fetch_add(len * 4, Ordering::Relaxed);
            vec![0.0; len]
        });
        FloatBuf { values, pool: Some(Arc::clone(self)) }
    }

    /// What was allocated so far; nothing is given back before the pool itself goes.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed) as u64
    }

    /// The most that was in use at a time.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak_bytes.load(Ordering::Relaxed) as u64
    }
}

/// Float values that return to their pool when dropped.
#[derive(Debug, Default)]
pub(crate) struct FloatBuf {
    values: Vec<f32>,
    pool: Option<Arc<Pool>>,
}

impl FloatBuf {
    /// Values outside any pool: constants.
    pub(crate) fn owned(values: Vec<f32>) -> FloatBuf {
        FloatBuf { values, pool: None }
    }
}

impl std::ops::Deref for FloatBuf {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl std::ops::DerefMut for FloatBuf {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl Drop for FloatBuf {
    fn drop(&mut self) {
        if let Some(pool) = self.pool.take() {
            let values = std::mem::take(&mut self.values);
            pool.used_bytes.fetch_sub(values.len() * 4, Ordering::Relaxed);
            let mut free = pool.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.entry(values.len()).or_default().push(values);
        }
    }
}
