//! The folder: `Manifest.json`, the model file and the weight files, none of which may lie outside.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use kvbaton_memory::{Bytes, Mapped};
use serde::Deserialize;

use crate::error::MilError;

/// A manifest is a few hundred bytes.
const MANIFEST_LIMIT_BYTES: u64 = 1 << 20;
/// What a program puts before a weight file's path.
const MODEL_PATH_PREFIX: &str = "@model_path/";

/// `Manifest.json` of a package: where the model file is.
#[derive(Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The model file, relative to the package's `Data` folder; only plain components.
    pub model: PathBuf,
}

#[derive(Deserialize)]
struct RawManifest {
    #[serde(rename = "fileFormatVersion")]
    version: String,
    #[serde(rename = "rootModelIdentifier")]
    root: String,
    #[serde(rename = "itemInfoEntries")]
    items: BTreeMap<String, RawItem>,
}

#[derive(Deserialize)]
struct RawItem {
    path: String,
}

impl Manifest {
    /// Reads the text of a `Manifest.json`.
    ///
    /// # Errors
    ///
    /// When it is not such a manifest, has another format version than 1, or names a model outside the package.
    pub fn parse(text: &[u8]) -> Result<Manifest, MilError> {
        let manifest = |reason: String| MilError::Manifest { reason };
        let raw: RawManifest = serde_json::from_slice(text).map_err(|e| manifest(e.to_string()))?;
        if raw.version.split('.').next() != Some("1") {
            return Err(manifest(format!("format version `{}` is not 1", raw.version)));
        }
        let item = raw.items.get(&raw.root).ok_or_else(|| {
            manifest(format!("the root model `{}` is not among its {} items", raw.root, raw.items.len()))
        })?;
        Ok(Manifest { model: plain_path("the manifest's model path", &item.path)? })
    }
}

/// `path` when it is relative and goes only downwards.
fn plain_path(what: &'static str, path: &str) -> Result<PathBuf, MilError> {
    let refuse = |reason| Err(MilError::PathLeavesPackage { what, path: path.to_owned(), reason });
    if path.is_empty() {
        return refuse("it is empty");
    }
    for component in Path::new(path).components() {
        match component {
            Component::Normal(_) | Component::CurDir => {}
            Component::ParentDir => return refuse("it has a `..`"),
            Component::RootDir | Component::Prefix(_) => return refuse("it is absolute"),
        }
    }
    Ok(PathBuf::from(path))
}

/// Where weight files come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A package on disk. Both paths are canonical.
    Folder { root: PathBuf, model_folder: PathBuf },
    /// Files in memory, by the name that programs use.
    Memory(BTreeMap<String, Bytes>),
}

impl Source {
    /// Opens the package folder at `path`: the source of its weights, the model file's name and its bytes.
    pub(crate) fn open(path: &Path) -> Result<(Source, String, Mapped), MilError> {
        let not = |reason| MilError::NotAPackage { path: path.to_owned(), reason };
        if !path.is_dir() {
            return Err(not(if path.exists() { "it is not a folder" } else { "it does not exist" }));
        }
        let root = path.canonicalize().map_err(|source| MilError::Io { path: path.to_owned(), source })?;
        let manifest_path = root.join("Manifest.json");
        if !manifest_path.exists() {
            return Err(not("it has no Manifest.json"));
        }
        let manifest_path = inside(&root, "the manifest", "Manifest.json", &manifest_path)?;
        let io = |source| MilError::Io { path: manifest_path.clone(), source };
        if fs::metadata(&manifest_path).map_err(io)?.len() > MANIFEST_LIMIT_BYTES {
            return Err(MilError::Manifest {
                reason: format!("it has more than {MANIFEST_LIMIT_BYTES} bytes"),
            });
        }
        let manifest = Manifest::parse(&fs::read(&manifest_path).map_err(io)?)?;

        let name = manifest.model.display().to_string();
        let model = root.join("Data").join(&manifest.model);
        let model = inside(&root, "the manifest's model path", &name, &model)?;
        let model_folder = model.parent().expect("a file inside a folder has a parent").to_owned();
        let bytes = Mapped::open(&model).map_err(|source| MilError::Map { source })?;
        Ok((Source::Folder { root, model_folder }, name, bytes))
    }

    /// The weight file that a program calls `name`; `None` when there is none.
    pub(crate) fn weights(&self, name: &str) -> Result<Option<Bytes>, MilError> {
        const WHAT: &str = "weight file";
        let (root, model_folder) = match self {
            Source::Memory(files) => return Ok(files.get(name).cloned()),
            Source::Folder { root, model_folder } => (root, model_folder),
        };
        let Some(relative) = name.strip_prefix(MODEL_PATH_PREFIX) else {
            let reason = "it does not start with `@model_path/`";
            return Err(MilError::PathLeavesPackage { what: WHAT, path: name.to_owned(), reason });
        };
        let path = model_folder.join(plain_path(WHAT, relative)?);
        if !path.exists() {
            return Ok(None);
        }
        let path = inside(root, WHAT, name, &path)?;
        Ok(Some(Bytes::new(Mapped::open(&path).map_err(|source| MilError::Map { source })?)))
    }
}

/// `path` with every link followed, which must still be in `root`.
fn inside(root: &Path, what: &'static str, written: &str, path: &Path) -> Result<PathBuf, MilError> {
    let real = path.canonicalize().map_err(|source| MilError::Io { path: path.to_owned(), source })?;
    if real.starts_with(root) {
        return Ok(real);
    }
    let reason = "a symbolic link leads out";
    Err(MilError::PathLeavesPackage { what, path: written.to_owned(), reason })
}
