//! The identity of a model folder's weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use kvbaton_memory::Mapped;
use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind};

/// BLAKE3 over (name, dtype, shape, bytes) of every tensor of a model folder, sorted by name: the same for one
/// file and for shards of it. Written `blake3:` and 64 hexadecimal digits.
///
/// Each field is preceded by its length as eight little-endian bytes; a shape is its dimensions in that form.
///
/// # Errors
///
/// When the folder has no `model*.safetensors`, or one cannot be read.
pub fn weights_digest(folder: &Path) -> Result<String, Error> {
    let mut maps = Vec::new();
    for path in weight_files(folder)? {
        let map = Mapped::open(&path).map_err(|e| model_error(format!("{e}: {}", e.source)))?;
        maps.push((path, map));
    }
    let mut tensors = BTreeMap::new();
    for (path, map) in &maps {
        let file = SafeTensors::deserialize(map)
            .map_err(|e| model_error(format!("`{}` is no safetensors file: {e}", path.display())))?;
        for (name, tensor) in file.tensors() {
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(model_error(format!(
                    "tensor `{name}` is in two files of `{}`",
                    folder.display()
                )));
            }
        }
    }
    let mut hasher = blake3::Hasher::new();
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    for (name, tensor) in &tensors {
        field(name.as_bytes());
        field(tensor.dtype().to_string().as_bytes());
        let shape: Vec<u8> = tensor.shape().iter().flat_map(|&n| (n as u64).to_le_bytes()).collect();
        field(&shape);
        field(tensor.data());
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

/// BLAKE3 over (path, bytes) of every file of a folder, sorted by path: which package exactly it was. Written as
/// [`weights_digest`] is.
///
/// # Errors
///
/// When a file cannot be read.
pub fn files_digest(folder: &Path) -> Result<String, Error> {
    let unreadable =
        |path: &Path, e| Error::new(ErrorKind::Package, format!("cannot read `{}`: {e}", path.display()));
    let (mut open, mut files) = (vec![folder.to_owned()], Vec::new());
    while let Some(next) = open.pop() {
        for entry in std::fs::read_dir(&next).map_err(|e| unreadable(&next, e))? {
            let path = entry.map_err(|e| unreadable(&next, e))?.path();
            if path.is_dir() { open.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let mut hasher = blake3::Hasher::new();
    for path in files {
        let name = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy().into_owned();
        let mut file = std::fs::File::open(&path).map_err(|e| unreadable(&path, e))?;
        let length = file.metadata().map_err(|e| unreadable(&path, e))?.len();
        for field in [(name.len() as u64).to_le_bytes().as_slice(), name.as_bytes(), &length.to_le_bytes()] {
            hasher.update(field);
        }
        std::io::copy(&mut file, &mut hasher).map_err(|e| unreadable(&path, e))?;
    }
    Ok(format!("blake3:{}", hasher.finalize().to_hex()))
}

/// The files that mlx-lm would load, sorted.
pub(crate) fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = std::fs::read_dir(folder)
        .map_err(|e| model_error(format!("cannot read the folder `{}`: {e}", folder.display())))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            let name = p.file_name().and_then(|n| n.to_str()).unwrap_or("");
            name.starts_with("model") && name.ends_with(".safetensors")
        })
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(model_error(format!("`{}` has no model*.safetensors", folder.display())));
    }
    Ok(files)
}

fn model_error(message: String) -> Error {
    Error::new(ErrorKind::Model, message)
}

/// Digests kept in the user's cache folder, by path, size and time of every weight file.
#[derive(Debug)]
pub struct DigestCache {
    file: Option<PathBuf>,
}

#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    files: Vec<(String, u64, u128)>,
    digest: String,
}

impl DigestCache {
    /// The user's own: `$XDG_CACHE_HOME/kvbaton`, `~/Library/Caches/kvbaton` on macOS, else `~/.cache/kvbaton`.
    /// Without a home folder nothing is kept.
    pub fn of_user() -> DigestCache {
        let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let home = variable("HOME")
            .map(|h| if cfg!(target_os = "macos") { h.join("Library/Caches") } else { h.join(".cache") });
        let folder = variable("XDG_CACHE_HOME").or(home);
        DigestCache { file: folder.map(|f| f.join("kvbaton/digests.json")) }
    }

    /// One that is kept in `folder`.
    pub fn in_folder(folder: &Path) -> DigestCache {
        DigestCache { file: Some(folder.join("digests.json")) }
    }

    /// [`weights_digest`], computed once for unchanged files.
    ///
    /// # Errors
    ///
    /// As [`weights_digest`]. A cache that cannot be read or written is passed over.
    pub fn weights_digest(&self, folder: &Path) -> Result<String, Error> {
        let files = stamps(folder)?;
        let key = folder.canonicalize().unwrap_or_else(|_| folder.to_owned()).display().to_string();
        let mut known = self.read();
        if let Some(entry) = known.get(&key).filter(|e| e.files == files) {
            return Ok(entry.digest.clone());
        }
        let digest = weights_digest(folder)?;
        known.insert(key, Entry { files, digest: digest.clone() });
        self.write(&known);
        Ok(digest)
    }

    fn read(&self) -> BTreeMap<String, Entry> {
        let text = self.file.as_ref().and_then(|f| std::fs::read(f).ok()).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    }

    /// Aside and renamed, so that a reader never sees half a file. A cache that cannot be written costs time only.
    fn write(&self, known: &BTreeMap<String, Entry>) {
        let Some(folder) = self.file.as_ref().and_then(|f| f.parent()) else { return };
        let _ = std::fs::create_dir_all(folder);
        let Ok(mut aside) = tempfile::NamedTempFile::new_in(folder) else { return };
        if serde_json::to_writer(&mut aside, known).is_ok()
            && let Some(file) = &self.file
        {
            let _ = aside.persist(file);
        }
    }
}

/// Name, length and modification time in nanoseconds of every weight file.
fn stamps(folder: &Path) -> Result<Vec<(String, u64, u128)>, Error> {
    weight_files(folder)?
        .into_iter()
        .map(|path| {
            let unreadable = |e| model_error(format!("cannot read `{}`: {e}", path.display()));
            let facts = path.metadata().map_err(unreadable)?;
            let time = facts.modified().map_err(unreadable)?;
            let nanoseconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
            let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            Ok((name, facts.len(), nanoseconds))
        })
        .collect()
}
