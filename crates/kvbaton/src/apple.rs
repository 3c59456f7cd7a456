//! Core ML of this Mac, behind a session.

use std::path::PathBuf;

use kvbaton_coreml::CoreMl;
use kvbaton_runtime::{CompileCache, Session};

/// A session with this Mac's Core ML. Compiled models are kept in the user's cache folder.
pub(crate) fn session() -> Session<CoreMl> {
    let session = Session::new(CoreMl::new);
    let Some(home) = std::env::var_os("HOME") else { return session };
    let caches = PathBuf::from(home).join("Library/Caches/kvbaton/compiled");
    session.with_cache(CompileCache::new(caches))
}
