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
mod inspect;
mod interface;
mod lower;
mod neural_engine;
mod package;
pub mod program;
mod spec;
#[cfg(test)]
mod testing;

pub use container::Manifest;
pub use description::{ArrayFeature, Description, Feature, FeatureKind, Features, Flexibility, SizeRange};
pub use error::{BlobError, MilError, Place, ProgramError};
pub use inspect::{
    FeatureInspection, FunctionInspection, Inspection, Requires, WeightsInspection, WeightsOfType, inspect,
};
pub use interface::{
    CacheArray, CacheInterface, CapacityGuess, Declared, Discovered, FUNCTIONS_KEY, LAYOUT_KEY, MODEL_KEY,
    PAST_KEY, Part, Port,
};
pub use neural_engine::Warning;
pub use package::Package;
