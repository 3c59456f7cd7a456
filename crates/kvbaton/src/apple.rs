//! Core ML of this Mac, behind a session.

use std::path::PathBuf;
use std::time::Duration;

use kvbaton_coreml::CoreMl;
use kvbaton_runtime::{CompileCache, Patience, Session};

use crate::engine::Waiting;

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
