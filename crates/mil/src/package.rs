//! An opened package.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvbaton_memory::Bytes;
use prost::Message;

use crate::container::Source;
use crate::description::Description;
use crate::error::MilError;
use crate::lower::{self, Weights};
use crate::program::{BlobRef, Constant, ConstantData, Function, Program};
use crate::spec;

/// The first specification version with ML Programs (macOS 12).
const OLDEST_VERSION: i32 = 6;
/// The last specification version known (macOS 26).
const NEWEST_VERSION: i32 = 10;
/// Programs keep tensors in weight files: a function of 30 layers takes half a megabyte here. The limit also
/// bounds what a hostile file makes the decoder allocate, about a hundred bytes for each of its own.
const MODEL_LIMIT_BYTES: usize = 64 << 20;

/// A `.mlpackage`: its weights mapped, its program typed, every reference checked.
pub struct Package {
    path: PathBuf,
    specification_version: i32,
    description: Description,
    metadata: BTreeMap<String, String>,
    program: Program,
    weights: Vec<Bytes>,
}

impl Package {
    /// Opens the package folder at `path`.
    ///
    /// Weight files are mapped, not read. A weight file that no constant refers to is not opened.
    ///
    /// # Errors
    ///
    /// When `path` is no package, a file is missing, broken or outside the package, or the program is malformed;
    /// the message names the file, or the function, operation and output.
    pub fn open(path: &Path) -> Result<Package, MilError> {
        let (source, model_name, model) = Source::open(path)?;
        Self::read(path, &model_name, &model, source)
    }

    /// Reads a package whose files are in memory: the model file, and the weight files by the name that the
    /// program uses (`@model_path/weights/weight.bin`). Its [`path`](Package::path) is empty.
    ///
    /// # Errors
    ///
    /// As [`Package::open`].
    pub fn from_memory(model: &[u8], weights: BTreeMap<String, Bytes>) -> Result<Package, MilError> {
        Self::read(Path::new(""), "model.mlmodel", model, Source::Memory(weights))
    }

    fn read(path: &Path, model_name: &str, model: &[u8], source: Source) -> Result<Package, MilError> {
        let file = || model_name.to_owned();
        if model.len() > MODEL_LIMIT_BYTES {
            let (len_bytes, limit_bytes) = (model.len(), MODEL_LIMIT_BYTES);
            return Err(MilError::ModelTooLarge { file: file(), len_bytes, limit_bytes });
        }
        let model = spec::Model::decode(model).map_err(|source| MilError::Wire { file: file(), source })?;
        let specification_version = model.specification_version;
        let program = model.ml_program.ok_or_else(|| MilError::NotAnMlProgram { file: file() })?;
        if !(OLDEST_VERSION..=NEWEST_VERSION).contains(&specification_version) {
            return Err(MilError::SpecificationVersion {
                found: specification_version,
                oldest: OLDEST_VERSION,
                newest: NEWEST_VERSION,
            });
        }
        let mut described = model.description.unwrap_or_default();
        let metadata =
            described.metadata.as_mut().map(|m| std::mem::take(&mut m.user_defined)).unwrap_or_default();

        let mut weights = Weights::new(source);
        let mut program = lower::program(program, &described.default_function_name, &mut weights)?;
        let description = Description::from_wire(described, &program.default_function)?;
        description.reconcile(&mut program)?;
        Ok(Package {
            path: path.to_owned(),
            specification_version,
            description,
            metadata,
            program,
            weights: weights.into_files(),
        })
    }

    /// The folder it was opened from, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The program: every function, its names resolved.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The function `name`, or the default one.
    ///
    /// # Errors
    ///
    /// When there is no such function; the message lists those there are.
    pub fn function(&self, name: Option<&str>) -> Result<&Function, MilError> {
        let name = name.unwrap_or(&self.program.default_function);
        self.program.functions.get(name).ok_or_else(|| MilError::NoSuchFunction {
            name: name.to_owned(),
            known: self.program.functions.keys().cloned().collect(),
        })
    }

    /// Core ML's specification version: 7 needs macOS 13, 8 macOS 14, 9 macOS 15, 10 macOS 26.
    pub fn specification_version(&self) -> i32 {
        self.specification_version
    }

    /// User-defined metadata of the model.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// What the package says about itself and its features.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// The bytes of a weight blob of this package.
    ///
    /// # Panics
    ///
    /// When `blob` belongs to another package and lies outside this one's files.
    pub fn blob_bytes(&self, blob: BlobRef) -> &[u8] {
        &self.weights[blob.file][blob.offset_bytes..][..blob.len_bytes]
    }

    /// The elements of `constant`, little endian and packed; `None` for strings.
    pub fn constant_bytes<'a>(&'a self, constant: &'a Constant) -> Option<&'a [u8]> {
        match &constant.data {
            ConstantData::Inline(bytes) => Some(bytes),
            ConstantData::Blob(blob) => Some(self.blob_bytes(*blob)),
            ConstantData::Strings(_) => None,
        }
    }

    /// Bytes of the weight files that the program refers to.
    pub fn weights_bytes(&self) -> u64 {
        self.weights.iter().map(|file| file.len() as u64).sum()
    }
}

impl std::fmt::Debug for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Package")
            .field("path", &self.path)
            .field("specification_version", &self.specification_version)
            .field("functions", &self.program.functions.keys())
            .field("weights", &self.weights)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
