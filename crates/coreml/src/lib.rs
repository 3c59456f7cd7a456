//! Core ML: the calls, and nothing else.
//!
//! Everything that can be decided without a Mac is decided elsewhere: `kvbaton-runtime` chooses memory, keeps custody
//! of buffers, limits time and checks versions, and runs on every machine against a fake of this crate. What is here
//! cannot run anywhere but on macOS, so it branches as little as it can. Objects of Core ML stay on the thread that
//! made them; only locked bytes leave it. Every call sits in an autorelease pool, and so does all that a job drops;
//! an exception that a call throws is an error.

#![cfg(target_os = "macos")]

mod arrays;
mod model;
mod plan;
mod predict;
mod state;
mod storage;

use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};

use kvbaton_memory::{Bytes, WritableBytes};
use kvbaton_runtime::{
    ArrayInfo, Call, Element, LoadConfig, Memory, Operation, Runtime, RuntimeError, SurfaceLimits, System,
};
use objc2::exception::catch;
use objc2::rc::{Retained, autoreleasepool};
use objc2_core_ml::{MLModel, MLState};
use objc2_foundation::{NSError, NSProcessInfo, NSUnderlyingErrorKey};

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

/// One call: what it left to be released is released, and an exception, which Rust cannot unwind, is an error.
fn guarded<T>(call: Call, work: impl FnOnce() -> Result<T, RuntimeError>) -> Result<T, RuntimeError> {
    autoreleasepool(|_| {
        catch(AssertUnwindSafe(work)).unwrap_or_else(|exception| {
            let reason = exception.map_or_else(String::new, |e| e.to_string());
            Err(RuntimeError::failed(call, format!("it threw an exception: {reason}")))
        })
    })
}

/// A failed call in the system's words.
fn failed(call: Call) -> impl FnOnce(Retained<NSError>) -> RuntimeError {
    move |error| RuntimeError::failed(call, words(&error))
}

/// What an error says, with its code, and the error behind it: Core ML's own sentence is often the same for all.
fn words(error: &NSError) -> String {
    let own = format!("{} ({} {})", error.localizedDescription(), error.domain(), error.code());
    // SAFETY: a constant of the framework.
    let behind = error.userInfo().objectForKey(unsafe { NSUnderlyingErrorKey });
    match behind.and_then(|object| object.downcast::<NSError>().ok()) {
        Some(error) => format!("{own}: {}", error.localizedDescription()),
        None => own,
    }
}

impl Runtime for CoreMl {
    const NAME: &'static str = "coreml";

    type Model = Retained<MLModel>;
    type Array = Array;
    type State = Retained<MLState>;

    fn around(job: impl FnOnce()) {
        autoreleasepool(|_| job());
    }

    fn system(&self) -> System {
        autoreleasepool(|_| {
            let process = NSProcessInfo::processInfo();
            let version = process.operatingSystemVersion();
            let part = |n: isize| u32::try_from(n).unwrap_or(0);
            System {
                name: "macos".to_owned(),
                version: (part(version.majorVersion), part(version.minorVersion)),
                build: process.operatingSystemVersionString().to_string(),
            }
        })
    }

    fn surface_limits(&self) -> SurfaceLimits {
        storage::surface_limits()
    }

    fn compile(&mut self, package: &Path) -> Result<PathBuf, RuntimeError> {
        guarded(Call::Compile, || model::compile(package))
    }

    fn load(&mut self, compiled: &Path, config: &LoadConfig) -> Result<Self::Model, RuntimeError> {
        guarded(Call::Load, || model::load(compiled, config))
    }

    fn plan(&mut self, compiled: &Path, config: &LoadConfig) -> Result<Vec<Operation>, RuntimeError> {
        guarded(Call::Plan, || plan::plan(compiled, config))
    }

    fn input(&mut self, info: &ArrayInfo, bytes: &[u8]) -> Result<Array, RuntimeError> {
        guarded(Call::Input, || arrays::input(info, bytes))
    }

    fn backing(&mut self, element: Element, shape: &[usize], memory: Memory) -> Result<Array, RuntimeError> {
        guarded(Call::Backing, || match memory {
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
        guarded(Call::Backing, || storage::foreign(element, shape, memory))
    }

    fn predict(
        &mut self,
        model: &mut Self::Model,
        inputs: &[(String, Array)],
        backings: &[(String, Array)],
        state: Option<&mut Self::State>,
    ) -> Result<Vec<(String, Array)>, RuntimeError> {
        guarded(Call::Predict, || predict::predict(model, inputs, backings, state.map(|s| &**s)))
    }

    fn is_same(&self, left: &Array, right: &Array) -> bool {
        autoreleasepool(|_| left.is_same(right))
    }

    fn describe(&mut self, array: &Array) -> Result<ArrayInfo, RuntimeError> {
        guarded(Call::Describe, || array.describe())
    }

    fn lock(&mut self, array: &Array, info: &ArrayInfo) -> Result<Bytes, RuntimeError> {
        guarded(Call::Lock, || storage::lock(array, info))
    }

    fn new_state(&mut self, model: &mut Self::Model) -> Result<Self::State, RuntimeError> {
        // SAFETY: callers ask only a system that has the call; it takes no arguments.
        guarded(Call::NewState, || Ok(unsafe { model.newState() }))
    }

    fn read_state(
        &mut self,
        state: &mut Self::State,
        name: &str,
        read: &mut dyn FnMut(&ArrayInfo, &[u8]),
    ) -> Result<(), RuntimeError> {
        guarded(Call::ReadState, || state::read(state, name, read))
    }

    fn write_state(
        &mut self,
        state: &mut Self::State,
        name: &str,
        write: &mut dyn FnMut(&ArrayInfo, &mut [u8]),
    ) -> Result<(), RuntimeError> {
        guarded(Call::WriteState, || state::write(state, name, write))
    }
}
