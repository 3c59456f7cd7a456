//! Read-only file mappings.

use std::fs::File;
use std::path::{Path, PathBuf};

/// A file that could not be mapped.
#[derive(Debug, thiserror::Error)]
#[error("cannot map `{}`", path.display())]
pub struct MapError {
    /// The file asked for.
    pub path: PathBuf,
    /// What the system said.
    #[source]
    pub source: std::io::Error,
}

/// A whole file, mapped read-only.
///
/// The file must not be truncated while it is mapped: reading a page that is gone ends the process. Packages
/// and model folders are written aside and renamed, so a mapped file keeps its contents when it is replaced.
#[derive(Debug)]
pub struct Mapped {
    map: Option<memmap2::Mmap>,
}

impl Mapped {
    /// Maps the file at `path`. An empty file is an empty slice.
    ///
    /// # Errors
    ///
    /// When the file cannot be opened, measured or mapped.
    pub fn open(path: &Path) -> Result<Mapped, MapError> {
        let error = |source| MapError { path: path.to_owned(), source };
        let file = File::open(path).map_err(error)?;
        let length = file.metadata().map_err(error)?.len();
        if length == 0 {
            return Ok(Mapped { map: None });
        }
        // SAFETY: the mapping is private to this value and read-only. That the file keeps its length while it
        // is mapped is the documented contract of this type; no reference outlives the mapping.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(error)?;
        Ok(Mapped { map: Some(map) })
    }
}

impl std::ops::Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
