//! The packages that `selftest` carries, so that it needs no file and no network.

use std::path::{Path, PathBuf};

use kvbaton_layout::{CacheSpec, ModelSpec, RopeScaling, RopeSpec, presets};

use crate::{Error, ErrorKind, Stated};

/// A package's files: path inside it, contents.
type Files = &'static [(&'static str, &'static [u8])];

macro_rules! package {
    ($folder:literal, $($file:literal),+) => {
        &[$(($file, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/", $folder, "/", $file)))),+]
    };
}

const DOUBLE: Files =
    package!("testdata/double.mlpackage", "Manifest.json", "Data/com.apple.CoreML/model.mlmodel");
const SUM: Files = package!("testdata/sum.mlpackage", "Manifest.json", "Data/com.apple.CoreML/model.mlmodel");
const PREFILL: Files = package!(
    "../mil/testdata/two_functions.mlpackage",
    "Manifest.json",
    "Data/com.apple.CoreML/model.mlmodel",
    "Data/com.apple.CoreML/weights/weight.bin"
);

/// The packages, unpacked into a temporary folder that goes with this value.
pub(super) struct Packages {
    _folder: tempfile::TempDir,
    /// Doubles arrays with rows of 64, 100 and 200 elements.
    pub(super) double: PathBuf,
    /// Adds an array to a state.
    pub(super) sum: PathBuf,
    /// A prefill in miniature, of 8 and of 16 tokens; see [`miniature`].
    pub(super) prefill: PathBuf,
}

/// What the prefill in miniature does not say of itself.
pub(super) fn miniature() -> Result<Stated, Error> {
    let dim = 32;
    let rope =
        RopeSpec { kind: "half-split".to_owned(), theta: 10_000.0, dims: dim, scaling: RopeScaling::Default };
    let model = ModelSpec {
        architecture: "llama".to_owned(),
        vocab_size: 48,
        dtype: Some("float16".to_owned()),
        rope,
        cache: CacheSpec::full(2, 2, dim),
        weights_digest: None,
    };
    Ok(Stated { layout: Some(presets::get("kvbaton-stacked")?), model: Some(model) })
}

impl Packages {
    pub(super) fn unpack() -> Result<Packages, Error> {
        let folder = tempfile::tempdir().map_err(|e| io(Path::new("the temporary folder"), &e))?;
        let write = |name: &str, files: Files| {
            let package = folder.path().join(name);
            for (file, bytes) in files {
                let path = package.join(file);
                let parent = path.parent().unwrap_or(&package);
                std::fs::create_dir_all(parent).map_err(|e| io(parent, &e))?;
                std::fs::write(&path, bytes).map_err(|e| io(&path, &e))?;
            }
            Ok::<_, Error>(package)
        };
        let double = write("double.mlpackage", DOUBLE)?;
        let sum = write("sum.mlpackage", SUM)?;
        let prefill = write("prefill.mlpackage", PREFILL)?;
        Ok(Packages { _folder: folder, double, sum, prefill })
    }
}

fn io(path: &Path, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write `{}`: {error}", path.display()))
}
