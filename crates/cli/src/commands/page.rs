//! Reports as pages.

use std::io::Write;
use std::path::Path;

use kvbaton::{Error, ErrorKind};
use serde::Serialize;

use crate::Host;

/// Writes the page of `document` to `file`, aside and renamed.
pub(crate) fn write_page(
    host: &dyn Host,
    name: &str,
    document: &impl Serialize,
    file: &Path,
) -> Result<(), Error> {
    let io = |e: std::io::Error| Error::new(ErrorKind::Io, format!("cannot write `{}`: {e}", file.display()));
    let document =
        serde_json::to_value(document).map_err(|e| Error::new(ErrorKind::Internal, e.to_string()))?;
    let page = host.page(name, &document)?;
    let folder = file.parent().filter(|f| !f.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut aside = tempfile::NamedTempFile::new_in(folder).map_err(io)?;
    aside.write_all(page.as_bytes()).map_err(io)?;
    aside.persist(file).map(|_| ()).map_err(|e| io(e.error))
}
