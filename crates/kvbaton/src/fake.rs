//! An engine for tests that behaves as Core ML is known to.
//!
//! It is the engine that runs Core ML on a Mac, with the fake runtime in Core ML's place: see
//! [`kvbaton_runtime::fake`].

use std::path::Path;
use std::sync::Arc;

use kvbaton_layout::{CacheSpec, Layout, ModelSpec, presets};
use kvbaton_runtime::Session;
use kvbaton_runtime::fake::{FakeRuntime, Tally, functions};

use crate::{Error, ErrorKind, FunctionInfo, Prefill, Prefilled, RuntimePrefill};

pub use kvbaton_runtime::fake::{Habits, element};

/// The engine.
pub struct FakePrefill {
    engine: RuntimePrefill<FakeRuntime>,
    tally: Arc<Tally>,
}

impl FakePrefill {
    /// An engine whose cache is stacked as `kvbaton export` stacks it, with one function a length.
    ///
    /// # Errors
    ///
    /// When the layers are not all of one shape, or there is no function.
    pub fn new(cache: CacheSpec, lengths: &[usize], habits: Habits) -> Result<FakePrefill, Error> {
        let uniform = cache.layers.iter().all(|l| l.attention().is_some() && *l == cache.layers[0]);
        if !uniform || cache.layers.is_empty() {
            return Err(Error::new(ErrorKind::Usage, "the fake engine stacks layers of one shape"));
        }
        let tally = Arc::new(Tally::default());
        let counted = tally.clone();
        let session = Session::new(move || FakeRuntime::new(habits.clone(), counted.clone()));
        let described = functions(&cache, lengths);
        let layout = presets::get("kvbaton-stacked")?;
        let engine = RuntimePrefill::of(session, Path::new("fake"), layout, cache, described)?;
        Ok(FakePrefill { engine, tally })
    }

    /// What the runtime counted: calls, arrays and locks that exist, broken rules.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// The engine itself.
    pub fn engine_mut(&mut self) -> &mut RuntimePrefill<FakeRuntime> {
        &mut self.engine
    }
}

impl Prefill for FakePrefill {
    fn engine(&self) -> &'static str {
        self.engine.engine()
    }

    fn functions(&self) -> &[FunctionInfo] {
        self.engine.functions()
    }

    fn model(&self) -> Option<&ModelSpec> {
        self.engine.model()
    }

    fn layout(&self) -> &Layout {
        self.engine.layout()
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        self.engine.prepare(tokens)
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        self.engine.prefill(tokens)
    }
}

#[cfg(test)]
mod tests;
