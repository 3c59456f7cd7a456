//! Compiled models, kept by what they were compiled from.
//!
//! Core ML compiles a package into a temporary folder, and forgets it. The copy that is kept is found by a digest over
//! every file of the package and the system's version and build, so that a changed package is compiled again, and every
//! package after an update of the system, and a renamed one is not. An entry appears whole or not at all: it is moved into
//! place under a name that only complete ones have.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{RuntimeError, System};

/// A folder of compiled models.
#[derive(Clone, Debug)]
pub struct CompileCache {
    root: PathBuf,
}

impl CompileCache {
    /// The cache in `root`, which is made when it is needed.
    pub fn new(root: PathBuf) -> CompileCache {
        CompileCache { root }
    }

    /// The compiled copy of `package`, made by `compile` when there is none. `compile` returns a temporary folder
    /// that is moved away.
    ///
    /// # Errors
    ///
    /// When the package cannot be read or compiled, or the copy cannot be kept.
    pub fn compiled(
        &self,
        package: &Path,
        system: &System,
        compile: impl FnOnce(&Path) -> Result<PathBuf, RuntimeError>,
    ) -> Result<PathBuf, RuntimeError> {
        let entry = self.root.join(format!("{}.mlmodelc", digest(package, system)?));
        if entry.is_dir() {
            return Ok(entry);
        }
        fs::create_dir_all(&self.root).map_err(at(&self.root))?;
        let fresh = compile(package)?;
        let kept = self.keep(&fresh, &entry);
        // Gone when the move succeeded; else a copy was made, or nothing of it is wanted.
        let _ = fs::remove_dir_all(&fresh);
        kept.map(|()| entry)
    }

    /// Moves `fresh` to `entry`; across file systems by a copy beside it.
    fn keep(&self, fresh: &Path, entry: &Path) -> Result<(), RuntimeError> {
        if fs::rename(fresh, entry).is_ok() || entry.is_dir() {
            return Ok(());
        }
        let aside =
            tempfile::Builder::new().prefix(".compiling-").tempdir_in(&self.root).map_err(at(&self.root))?;
        let copy = aside.path().join("model.mlmodelc");
        copy_folder(fresh, &copy).map_err(at(fresh))?;
        match fs::rename(&copy, entry) {
            Ok(()) => Ok(()),
            // Another process was faster: its copy is of the same package.
            Err(_) if entry.is_dir() => Ok(()),
            Err(e) => Err(at(entry)(e)),
        }
    }
}

/// BLAKE3 over the system and every file of the package, by name.
fn digest(package: &Path, system: &System) -> Result<String, RuntimeError> {
    let mut files = Vec::new();
    list(package, &mut files).map_err(at(package))?;
    if files.is_empty() {
        return Err(at(package)(io::Error::other("the package holds no files")));
    }
    files.sort();
    let mut hasher = blake3::Hasher::new();
    let (major, minor) = system.version;
    hasher.update(format!("{} {major}.{minor} {}", system.name, system.build).as_bytes());
    for path in files {
        let name = path.strip_prefix(package).unwrap_or(&path).to_string_lossy().into_owned();
        let file = fs::File::open(&path).map_err(at(&path))?;
        let length = file.metadata().map_err(at(&path))?.len();
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&length.to_le_bytes());
        hasher.update_reader(file).map_err(at(&path))?;
    }
    Ok(hasher.finalize().to_hex()[..32].to_owned())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { list(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> RuntimeError + use<> {
    let path = path.to_owned();
    move |source| RuntimeError::File { path, source }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::Call;

    struct Scene {
        folder: tempfile::TempDir,
        compiled: Cell<usize>,
    }

    fn macos(version: u32, build: &str) -> System {
        let build = format!("Version {version}.0 (Build {build})");
        System { name: "macos".to_owned(), version: (version, 0), build }
    }

    impl Scene {
        fn new() -> Scene {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("p.mlpackage/Data")).unwrap();
            fs::write(folder.path().join("p.mlpackage/Manifest.json"), "{}").unwrap();
            fs::write(folder.path().join("p.mlpackage/Data/w.bin"), [1; 100]).unwrap();
            Scene { folder, compiled: Cell::new(0) }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn get(&self, package: &str, version: u32) -> Result<PathBuf, RuntimeError> {
            self.get_on(package, &macos(version, "24A335"))
        }

        fn get_on(&self, package: &str, system: &System) -> Result<PathBuf, RuntimeError> {
            CompileCache::new(self.path("cache")).compiled(&self.path(package), system, |_| {
                self.compiled.set(self.compiled.get() + 1);
                let out = self.path(&format!("tmp-{}.mlmodelc", self.compiled.get()));
                fs::create_dir_all(out.join("weights")).unwrap();
                fs::write(out.join("weights/w.bin"), "compiled").unwrap();
                Ok(out)
            })
        }
    }

    #[test]
    fn a_package_is_compiled_once_under_any_name() {
        let scene = Scene::new();
        let first = scene.get("p.mlpackage", 15).unwrap();
        assert_eq!(fs::read_to_string(first.join("weights/w.bin")).unwrap(), "compiled");
        fs::rename(scene.path("p.mlpackage"), scene.path("q.mlpackage")).unwrap();
        assert_eq!(scene.get("q.mlpackage", 15).unwrap(), first);
        assert_eq!(scene.compiled.get(), 1);
        assert!(!scene.path("tmp-1.mlmodelc").exists(), "the temporary folder is gone");
    }

    #[test]
    fn a_changed_package_or_system_compiles_again() {
        let scene = Scene::new();
        let first = scene.get("p.mlpackage", 15).unwrap();
        assert_ne!(scene.get("p.mlpackage", 26).unwrap(), first);
        fs::write(scene.path("p.mlpackage/Data/w.bin"), [2; 100]).unwrap();
        assert_ne!(scene.get("p.mlpackage", 15).unwrap(), first);
        assert_eq!(scene.compiled.get(), 3);
        // An update of the system that leaves its version as it is.
        let updated = scene.get_on("p.mlpackage", &macos(15, "24B83")).unwrap();
        assert_ne!(updated, scene.get("p.mlpackage", 15).unwrap());
        assert_eq!(scene.compiled.get(), 4);
    }

    #[test]
    fn a_failed_compilation_leaves_nothing() {
        let scene = Scene::new();
        let system = macos(15, "24A335");
        let cache = CompileCache::new(scene.path("cache"));
        let failed = cache.compiled(&scene.path("p.mlpackage"), &system, |_| {
            Err(RuntimeError::failed(Call::Compile, "no\n  such op"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "compiling the package failed: no such op");
        assert_eq!(fs::read_dir(scene.path("cache")).unwrap().count(), 0);
        assert!(scene.get("p.mlpackage", 15).is_ok());
    }

    #[test]
    fn a_package_that_is_not_there_is_named() {
        let scene = Scene::new();
        assert!(scene.get("none.mlpackage", 15).unwrap_err().to_string().contains("none.mlpackage"));
        fs::create_dir(scene.path("empty.mlpackage")).unwrap();
        assert!(scene.get("empty.mlpackage", 15).unwrap_err().to_string().contains("holds no files"));
    }
}
