//! Compiled models, and who keeps them.
//!
//! Core ML compiles a package into a temporary folder, and forgets it. The copy that is kept is found by a digest over
//! every file of the package and the system's version and build, so that a changed package is compiled again, and every
//! package after an update of the system, and a renamed one is not. An entry appears whole or not at all: it is moved into
//! place under a name that only complete ones have. It is marked as in use by a lock on a file beside the model, which goes
//! with the process that has it: so entries that nobody will ask for again can be removed, and no other.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use crate::{RuntimeError, System};

/// A folder of compiled models.
#[derive(Clone, Debug)]
pub struct CompileCache {
    root: PathBuf,
}

/// A compiled model. While a handle on it lives, nobody removes it.
#[derive(Clone, Debug)]
pub struct Compiled {
    path: PathBuf,
    _keeper: Option<Arc<Keeper>>,
}

/// What keeps a compiled model.
#[derive(Debug)]
#[expect(dead_code, reason = "each is held for what happens when it goes")]
enum Keeper {
    /// It goes with its last handle.
    Temporary(Temporary),
    /// The mark of an entry that is in use.
    Mark(File),
}

/// A folder that goes with this value.
#[derive(Debug)]
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        // What cannot be removed is the system's to clear away: its temporary folder is where it lies.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Compiled {
    /// A model that somebody else compiled, and keeps.
    pub fn given(path: &Path) -> Compiled {
        Compiled { path: path.to_owned(), _keeper: None }
    }

    /// A model in a temporary folder, which is removed with the last handle.
    pub fn temporary(path: PathBuf) -> Compiled {
        Compiled { path: path.clone(), _keeper: Some(Arc::new(Keeper::Temporary(Temporary(path)))) }
    }

    fn marked(path: PathBuf, mark: File) -> Compiled {
        Compiled { path, _keeper: Some(Arc::new(Keeper::Mark(mark))) }
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The model in an entry.
const MODEL: &str = "model.mlmodelc";

/// The file in an entry that whoever uses it has locked, and that was last modified when it was last used.
const MARK: &str = "in-use";

impl CompileCache {
    /// The most entries of one system that are kept.
    pub const MOST_ENTRIES: usize = 64;

    /// The cache in `root`, which is made when it is needed.
    pub fn new(root: PathBuf) -> CompileCache {
        CompileCache { root }
    }

    /// The compiled copy of `package`, made by `compile` when there is none. `compile` returns a temporary folder
    /// that is moved away. A new entry takes the place of those of other versions and builds of the system, and of those
    /// beyond [`CompileCache::MOST_ENTRIES`] that were used longest ago; one in use, by whichever process, stays.
    ///
    /// # Errors
    ///
    /// When the package cannot be read or compiled, or the copy cannot be kept.
    pub fn compiled(
        &self,
        package: &Path,
        system: &System,
        compile: impl FnOnce(&Path) -> Result<PathBuf, RuntimeError>,
    ) -> Result<Compiled, RuntimeError> {
        let own = tag(system);
        let entry = self.root.join(format!("{own}-{}", digest(package, system)?));
        if let Some(known) = used(&entry) {
            return Ok(known);
        }
        fs::create_dir_all(&self.root).map_err(at(&self.root))?;
        let fresh = Temporary(compile(package)?);
        let kept = self.keep(&fresh.0, &entry)?;
        self.prune(&own);
        Ok(kept)
    }

    /// Moves `fresh` to `entry`; across file systems it is copied.
    fn keep(&self, fresh: &Path, entry: &Path) -> Result<Compiled, RuntimeError> {
        let aside = self.aside(".compiling-").map_err(at(&self.root))?;
        let model = aside.path().join(MODEL);
        if fs::rename(fresh, &model).is_err() {
            copy_folder(fresh, &model).map_err(at(fresh))?;
        }
        let mark = File::create(aside.path().join(MARK)).map_err(at(aside.path()))?;
        // Before the entry can be found, so that nobody removes it in between.
        take(&mark);
        match fs::rename(aside.path(), entry) {
            Ok(()) => Ok(Compiled::marked(entry.join(MODEL), mark)),
            // Another process was faster: its copy is of the same package.
            Err(e) => used(entry).ok_or_else(|| at(entry)(e)),
        }
    }

    /// Removes entries of systems other than `own`, and of its own those that were used longest ago.
    fn prune(&self, own: &str) {
        let Ok(found) = fs::read_dir(&self.root) else { return };
        let mut ours = Vec::new();
        for path in found.flatten().map(|e| e.path()) {
            match system_of(&path) {
                Some(system) if system == own => ours.push((last_used(&path), path)),
                Some(_) => self.remove(&path),
                None => {}
            }
        }
        ours.sort();
        let surplus = ours.len().saturating_sub(CompileCache::MOST_ENTRIES);
        ours[..surplus].iter().for_each(|(_, path)| self.remove(path));
    }

    /// Removes an entry, unless it is in use. What cannot be removed stays: it costs space, no more.
    fn remove(&self, entry: &Path) {
        let Ok(mark) = File::open(entry.join(MARK)) else { return };
        if mark.try_lock().is_err() {
            return;
        }
        // Elsewhere first, so that nobody finds half of it.
        if let Ok(aside) = self.aside(".removing-") {
            let _ = fs::rename(entry, aside.path().join("entry"));
        }
        drop(mark);
    }

    fn aside(&self, prefix: &str) -> io::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix(prefix).tempdir_in(&self.root)
    }
}

/// The model of an entry that is there, marked as in use.
fn used(entry: &Path) -> Option<Compiled> {
    let mark = File::open(entry.join(MARK)).ok()?;
    take(&mark);
    let model = entry.join(MODEL);
    // Whoever removes an entry has its mark; once that is to be had, the entry is gone.
    model.is_dir().then(|| Compiled::marked(model, mark))
}

/// Marks an entry as in use, together with whoever else uses it, and as used now. On a file system without locks nothing
/// is locked, and nothing removed.
fn take(mark: &File) {
    let _ = mark.lock_shared();
    let _ = mark.set_modified(SystemTime::now());
}

/// The system that an entry belongs to, by its name; `None` of what is no entry.
fn system_of(entry: &Path) -> Option<&str> {
    let hex = |text: &str, digits: usize| text.len() == digits && text.chars().all(|c| c.is_ascii_hexdigit());
    let (system, digest) = entry.file_name()?.to_str()?.split_once('-')?;
    (hex(system, TAG_DIGITS) && hex(digest, DIGEST_DIGITS)).then_some(system)
}

fn last_used(entry: &Path) -> Option<SystemTime> {
    fs::metadata(entry.join(MARK)).and_then(|m| m.modified()).ok()
}

const TAG_DIGITS: usize = 8;
const DIGEST_DIGITS: usize = 32;

/// What names of a system's entries begin with.
fn tag(system: &System) -> String {
    blake3::hash(words(system).as_bytes()).to_hex()[..TAG_DIGITS].to_owned()
}

fn words(system: &System) -> String {
    let (major, minor) = system.version;
    format!("{} {major}.{minor} {}", system.name, system.build)
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
    hasher.update(words(system).as_bytes());
    for path in files {
        let name = path.strip_prefix(package).unwrap_or(&path).to_string_lossy().into_owned();
        let file = fs::File::open(&path).map_err(at(&path))?;
        let length = file.metadata().map_err(at(&path))?.len();
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&length.to_le_bytes());
        hasher.update_reader(file).map_err(at(&path))?;
    }
    Ok(hasher.finalize().to_hex()[..DIGEST_DIGITS].to_owned())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { list(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// Copies a folder with all that is in it.
pub(crate) fn copy_folder(from: &Path, to: &Path) -> io::Result<()> {
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

        /// The compiled copy's folder; nobody uses it any more.
        fn get(&self, package: &str, version: u32) -> Result<PathBuf, RuntimeError> {
            self.get_on(package, &macos(version, "24A335")).map(|c| c.path().to_owned())
        }

        fn get_on(&self, package: &str, system: &System) -> Result<Compiled, RuntimeError> {
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
        assert_ne!(updated.path(), scene.get("p.mlpackage", 15).unwrap());
        assert_eq!(scene.compiled.get(), 5, "the update's entry took the place of the other build's");
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
    #[test]
    fn entries_of_another_build_go_when_one_is_written_unless_they_are_in_use() {
        let scene = Scene::new();
        let (old, new) = (macos(15, "24A335"), macos(15, "24B83"));
        let held = scene.get_on("p.mlpackage", &old).unwrap();
        fs::write(scene.path("p.mlpackage/Data/w.bin"), [2; 100]).unwrap();
        let free = scene.get_on("p.mlpackage", &old).unwrap().path().to_owned();
        // What is none of the cache's.
        let foreign = scene.path("cache/notes");
        fs::create_dir(&foreign).unwrap();

        let current = scene.get_on("p.mlpackage", &new).unwrap();
        assert!(!free.exists());
        assert!(held.path().is_dir() && current.path().is_dir() && foreign.is_dir());
        // The next one that is written takes the place of what is no longer used.
        let path = held.path().to_owned();
        let clone = held.clone();
        drop(held);
        fs::write(scene.path("p.mlpackage/Data/w.bin"), [3; 100]).unwrap();
        scene.get_on("p.mlpackage", &new).unwrap();
        assert!(path.is_dir(), "a handle is as good as another");
        drop(clone);
        fs::write(scene.path("p.mlpackage/Data/w.bin"), [4; 100]).unwrap();
        scene.get_on("p.mlpackage", &new).unwrap();
        assert!(!path.exists());
        let left = fs::read_dir(scene.path("cache")).unwrap().flatten();
        assert!(
            left.map(|e| e.file_name()).all(|n| !n.to_string_lossy().starts_with('.')),
            "nothing is aside"
        );
    }

    #[test]
    fn of_one_system_those_stay_that_were_used_last() {
        let scene = Scene::new();
        let written = |content: usize| {
            fs::write(scene.path("p.mlpackage/Data/w.bin"), content.to_le_bytes()).unwrap();
            scene.get("p.mlpackage", 15).unwrap()
        };
        let paths: Vec<PathBuf> = (0..CompileCache::MOST_ENTRIES).map(written).collect();
        assert!(paths.iter().all(|p| p.is_dir()));
        // The oldest is used again, so the second oldest makes room.
        assert_eq!(written(0), paths[0]);
        written(CompileCache::MOST_ENTRIES);
        let left: Vec<usize> = (0..paths.len()).filter(|&i| !paths[i].is_dir()).collect();
        assert_eq!(left, [1]);
    }

    #[test]
    fn a_temporary_copy_goes_with_its_last_handle() {
        let scene = Scene::new();
        fs::create_dir(scene.path("t.mlmodelc")).unwrap();
        let first = Compiled::temporary(scene.path("t.mlmodelc"));
        let second = first.clone();
        drop(first);
        assert!(second.path().is_dir());
        drop(second);
        assert!(!scene.path("t.mlmodelc").exists());
        // What was compiled by somebody else is theirs.
        drop(Compiled::given(&scene.path("p.mlpackage")));
        assert!(scene.path("p.mlpackage").is_dir());
    }
}
