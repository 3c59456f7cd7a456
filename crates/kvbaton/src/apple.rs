//! Core ML of this Mac, behind a session.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kvbaton_coreml::CoreMl;
use kvbaton_runtime::{CompileCache, Patience, Session};

use crate::engine::{EngineOptions, Waiting};
use crate::{Decode, Error, Prefill, RuntimeDecode, RuntimePrefill};

pub(crate) fn open_prefill(path: &Path, options: EngineOptions) -> Result<Box<dyn Prefill>, Error> {
    let session = session(options.timeout, options.waiting);
    Ok(Box::new(RuntimePrefill::open(session, path, options.units, options.stated)?))
}

pub(crate) fn open_decode(path: &Path, options: EngineOptions) -> Result<Box<dyn Decode>, Error> {
    let session = session(options.timeout, options.waiting);
    Ok(Box::new(RuntimeDecode::open(session, path, options.units)?))
}

/// A session with this Mac's Core ML. Compiled models are kept in the user's cache folder.
pub(crate) fn session(load_timeout: Option<Duration>, waiting: Option<Waiting>) -> Session<CoreMl> {
    let mut patience = Patience::default();
    if let Some(load) = load_timeout {
        patience.load = load;
    }
    let mut session = Session::new(CoreMl::new).with_patience(patience);
    if let Some(home) = std::env::var_os("HOME") {
        let caches = PathBuf::from(home).join("Library/Caches/kvbaton/compiled");
        session = session.with_cache(CompileCache::new(caches));
    }
    match waiting {
        Some(waiting) => session.with_waiting(waiting),
        None => session,
    }
}
