//! Core ML: the calls, and nothing else.
//!
//! Everything that can be decided without a Mac is decided elsewhere: `kvbaton-runtime` chooses memory, keeps custody
//! of buffers, limits time and checks versions, and runs on every machine against a fake of this crate. What is here
//! cannot run anywhere but on macOS, so it branches as little as it can. Objects of Core ML stay on the thread that
//! made them; only locked bytes leave it. Every call that creates objects sits in an autorelease pool.

#![cfg(target_os = "macos")]

mod arrays;
mod model;
mod plan;
mod predict;
mod state;
mod storage;

use std::path::{Path, PathBuf};

use kvbaton_memory::{Bytes, WritableBytes};
use kvbaton_runtime::{
    ArrayInfo, Call, Element, LoadConfig, Memory, Operation, Runtime, RuntimeError, SurfaceLimits, System,
};
use objc2::rc::{Retained, autoreleasepool};
use objc2_core_ml::{MLModel, MLState};
use objc2_foundation::{NSError, NSProcessInfo};

pub use arrays::Array;

/// Core ML of this system.
pub struct CoreMl(());

impl CoreMl {
    /// Core ML, called from this thread on.
    pub fn new() -> CoreMl {
        CoreMl(())
    }
}

impl Default for CoreMl {
    fn default() -> CoreMl {
        CoreMl::new()
    }
}

/// A failed call in the system's words.
fn failed(call: Call) -> impl FnOnce(Retained<NSError>) -> RuntimeError {
    move |error| RuntimeError::failed(call, error.localizedDescription().to_string())
}

impl Runtime for CoreMl {
    const NAME: &'static str = "coreml";

    type Model = Retained<MLModel>;
    type Array = Array;
    type State = Retained<MLState>;

    fn system(&self) -> System {
        let version = NSProcessInfo::processInfo().operatingSystemVersion();
        let part = |n: isize| u32::try_from(n).unwrap_or(0);
        let version = (part(version.majorVersion), part(version.minorVersion));
        System { name: "macos".to_owned(), version }
    }

    fn surface_limits(&self) -> SurfaceLimits {
        storage::surface_limits()
    }

    fn compile(&mut self, package: &Path) -> Result<PathBuf, RuntimeError> {
        autoreleasepool(|_| model::compile(package))
    }

    fn load(&mut self, compiled: &Path, config: &LoadConfig) -> Result<Self::Model, RuntimeError> {
        autoreleasepool(|_| model::load(compiled, config))
    }

    fn plan(&mut self, compiled: &Path, config: &LoadConfig) -> Result<Vec<Operation>, RuntimeError> {
        autoreleasepool(|_| plan::plan(compiled, config))
    }

    fn input(&mut self, info: &ArrayInfo, bytes: &[u8]) -> Result<Array, RuntimeError> {
        autoreleasepool(|_| arrays::input(info, bytes))
    }

    fn backing(&mut self, element: Element, shape: &[usize], memory: Memory) -> Result<Array, RuntimeError> {
        autoreleasepool(|_| match memory {
            Memory::Surface => storage::surface(shape),
            Memory::Heap | Memory::Own => storage::heap(element, shape),
        })
    }

    fn backing_on(
        &mut self,
        element: Element,
        shape: &[usize],
        memory: WritableBytes,
    ) -> Result<Array, RuntimeError> {
        autoreleasepool(|_| storage::foreign(element, shape, memory))
    }

    fn predict(
        &mut self,
        model: &mut Self::Model,
        inputs: &[(String, Array)],
        backings: &[(String, Array)],
        state: Option<&mut Self::State>,
    ) -> Result<Vec<(String, Array)>, RuntimeError> {
        autoreleasepool(|_| predict::predict(model, inputs, backings, state.map(|s| &**s)))
    }

    fn is_same(&self, left: &Array, right: &Array) -> bool {
        left.is_same(right)
    }

    fn describe(&mut self, array: &Array) -> Result<ArrayInfo, RuntimeError> {
        autoreleasepool(|_| array.describe())
    }

    fn lock(&mut self, array: &Array, info: &ArrayInfo) -> Result<Bytes, RuntimeError> {
        autoreleasepool(|_| storage::lock(array, info))
    }

    fn new_state(&mut self, model: &mut Self::Model) -> Result<Self::State, RuntimeError> {
        // SAFETY: callers ask only a system that has the call; it takes no arguments.
        Ok(autoreleasepool(|_| unsafe { model.newState() }))
    }

    fn read_state(
        &mut self,
        state: &mut Self::State,
        name: &str,
        read: &mut dyn FnMut(&ArrayInfo, &[u8]),
    ) -> Result<(), RuntimeError> {
        autoreleasepool(|_| state::read(state, name, read))
    }

    fn write_state(
        &mut self,
        state: &mut Self::State,
        name: &str,
        write: &mut dyn FnMut(&ArrayInfo, &mut [u8]),
    ) -> Result<(), RuntimeError> {
        autoreleasepool(|_| state::write(state, name, write))
    }
}
