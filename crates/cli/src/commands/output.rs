//! Files that a verb writes besides stdout.

use std::io::Write;
use std::path::Path;

use kvbaton::{Error, ErrorKind};

/// Whether a report can be written there: found out at the end it would cost the whole run.
pub(crate) fn check_writable(path: &Path) -> Result<(), Error> {
    let usage = |message: String| Err(Error::new(ErrorKind::Usage, message));
    if !folder_of(path).is_dir() {
        return usage(format!("`{}` is to be written to a folder that does not exist", path.display()));
    }
    if path.is_dir() {
        return usage(format!("`{}` is a folder", path.display()));
    }
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if (target.is_file() || !target.exists())
        && let Err(e) = tempfile::tempfile_in(folder_of(&target))
    {
        return usage(format!(
            "`{}` is to be written to a folder that cannot be written to: {e}",
            path.display()
        ));
    }
    Ok(())
}

/// Writes a file aside and renames it, so that nobody sees half of it. A link stays one; what is neither a file nor
/// absent, a pipe or a device, is written to and never replaced.
pub(crate) fn write_whole(path: &Path, text: &str) -> Result<(), Error> {
    let target = path.canonicalize();
    let path = target.as_deref().unwrap_or(path);
    let failed =
        |e: std::io::Error| Error::new(ErrorKind::Io, format!("cannot write `{}`: {e}", path.display()));
    if path.exists() && !path.is_file() {
        return std::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut there| there.write_all(text.as_bytes()))
            .map_err(failed);
    }
    let mut builder = tempfile::Builder::new();
    // A report is for others to read, too, as the umask allows; a temporary file would be for its owner alone.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut aside = builder.tempfile_in(folder_of(path)).map_err(failed)?;
    aside.write_all(text.as_bytes()).map_err(failed)?;
    aside.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
