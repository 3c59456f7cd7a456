//! The packages that `selftest` carries, so that it needs no file and no network.

use std::path::{Path, PathBuf};

use kvbaton_runtime::{CompileCache, Compiled, Runtime, RuntimeError, Session};

use crate::{Error, ErrorKind};

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
const SIDES: Files =
    package!("testdata/sides.mlpackage", "Manifest.json", "Data/com.apple.CoreML/model.mlmodel");
const PREFILL: Files = package!(
    "testdata/prefill.mlpackage",
    "Manifest.json",
    "Data/com.apple.CoreML/model.mlmodel",
    "Data/com.apple.CoreML/weights/weight.bin"
);
const DECODE: Files = package!(
    "testdata/decode.mlpackage",
    "Manifest.json",
    "Data/com.apple.CoreML/model.mlmodel",
    "Data/com.apple.CoreML/weights/weight.bin"
);

/// The parts of a chain; its own file lies beside them.
const PARTS: [(&str, Files); 2] = [
    (
        "chain/part_0.mlpackage",
        package!(
            "testdata/chain/part_0.mlpackage",
            "Manifest.json",
            "Data/com.apple.CoreML/model.mlmodel",
            "Data/com.apple.CoreML/weights/weight.bin"
        ),
    ),
    (
        "chain/part_1.mlpackage",
        package!(
            "testdata/chain/part_1.mlpackage",
            "Manifest.json",
            "Data/com.apple.CoreML/model.mlmodel",
            "Data/com.apple.CoreML/weights/weight.bin"
        ),
    ),
];
const CHAIN: Files = package!("testdata/chain", "chain.toml");

/// The packages, unpacked into a temporary folder that goes with this value, and all that is compiled of them.
pub(super) struct Packages {
    _folder: tempfile::TempDir,
    compiled: CompileCache,
    /// Doubles arrays with rows of 64, 100 and 200 elements.
    pub(super) double: Miniature,
    /// Adds an array to a state.
    pub(super) sum: Miniature,
    /// Adds an array to a state, in functions `rows_of_64`, `rows_of_96` and `rows_of_100`.
    pub(super) sides: Miniature,
    /// A prefill in miniature, of 8 and of 16 tokens.
    pub(super) prefill: PathBuf,
    /// The same model decoding, its cache of 32 rows in states.
    pub(super) decode: PathBuf,
    /// The same model split in two, for prompts of up to 32 tokens in chunks of 8: the folder of a chain.
    pub(super) chain: PathBuf,
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
        let compiled = CompileCache::new(folder.path().join("compiled"));
        let miniature = |path: PathBuf| Miniature { path, compiled: compiled.clone() };
        let double = miniature(write("double.mlpackage", DOUBLE)?);
        let sum = miniature(write("sum.mlpackage", SUM)?);
        let sides = miniature(write("sides.mlpackage", SIDES)?);
        let prefill = write("prefill.mlpackage", PREFILL)?;
        let decode = write("decode.mlpackage", DECODE)?;
        for (name, files) in PARTS {
            write(name, files)?;
        }
        let chain = write("chain", CHAIN)?;
        Ok(Packages { _folder: folder, compiled, double, sum, sides, prefill, decode, chain })
    }

    /// A session for these packages: what it compiles goes with them.
    pub(super) fn session<R: Runtime>(&self, session: Session<R>) -> Session<R> {
        session.with_cache(self.compiled.clone())
    }
}

/// A package that probes load by themselves, without a session around the runtime.
#[derive(Clone)]
pub(super) struct Miniature {
    path: PathBuf,
    compiled: CompileCache,
}

impl Miniature {
    /// Its compiled form, which stays at least as long as the handle.
    pub(super) fn compiled<R: Runtime>(&self, r: &mut R) -> Result<Compiled, RuntimeError> {
        let system = r.system();
        self.compiled.compiled(&self.path, &system, |package| r.compile(package))
    }
}

fn io(path: &Path, error: &std::io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("cannot write `{}`: {error}", path.display()))
}
