//! Files that a verb writes besides stdout.

use std::io::Write;
use std::path::{Path, PathBuf};

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
    let target = match target_of(path) {
        Ok(target) => target,
        Err(e) => return usage(format!("`{}` is a link that leads nowhere: {e}", path.display())),
    };
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
    let failed =
        |e: std::io::Error| Error::new(ErrorKind::Io, format!("cannot write `{}`: {e}", path.display()));
    let path = &target_of(path).map_err(failed)?;
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

/// Where a link leads, which may be to a file that is not there yet; any other path is its own.
fn target_of(path: &Path) -> std::io::Result<PathBuf> {
    match path.canonicalize() {
        Err(error) if path.is_symlink() => {
            let target = folder_of(path).join(std::fs::read_link(path)?);
            // A link to another that leads nowhere, or round in a circle.
            if target.is_symlink() { Err(error) } else { Ok(target) }
        }
        found => Ok(found.unwrap_or_else(|_| path.to_owned())),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_stay_links() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("there"), "old").unwrap();
        symlink("there", at("link")).unwrap();
        symlink("absent", at("dangling")).unwrap();
        for (link, target) in [("link", "there"), ("dangling", "absent")] {
            check_writable(&at(link)).unwrap();
            write_whole(&at(link), "new").unwrap();
            assert!(at(link).is_symlink());
            assert_eq!(std::fs::read_to_string(at(target)).unwrap(), "new");
        }
        symlink("circle", at("circle")).unwrap();
        assert_eq!(check_writable(&at("circle")).unwrap_err().kind(), ErrorKind::Usage);
        assert_eq!(write_whole(&at("circle"), "new").unwrap_err().kind(), ErrorKind::Io);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 5);
    }
}
