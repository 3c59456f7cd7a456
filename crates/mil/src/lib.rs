//! Reads `.mlpackage` files: the folder, Core ML's protobuf, weight blobs and the typed program.
//!
//! Opening a package checks everything a consumer relies on: names resolve to values defined before, constants
//! hold as many elements as their types say, weight blobs lie in their files, and no path leaves the package.
//! Weights are mapped. Running the program is not done here (see `kvbaton-exec` and `kvbaton-coreml`), nor is
//! anything written.

#![forbid(unsafe_code)]

mod blob;
mod container;
mod description;
mod error;
mod lower;
mod package;
pub mod program;
mod spec;

pub use container::Manifest;
pub use description::{ArrayFeature, Description, Feature, FeatureKind, Features, Flexibility, SizeRange};
pub use error::{BlobError, MilError, Place, ProgramError};
pub use package::Package;
