//! The decoded program → the typed program: names resolved, types and constants checked.

mod constants;
mod function;
mod types;

use std::collections::{BTreeMap, HashMap};

use kvbaton_memory::Bytes;

use crate::blob;
use crate::container::Source;
use crate::error::{BlobError, MilError, ProgramError};
use crate::program::Program;
use crate::spec;

/// Weight files, opened when a constant first refers to them.
pub(crate) struct Weights {
    source: Source,
    files: Vec<Bytes>,
    by_name: HashMap<String, usize>,
}

impl Weights {
    pub(crate) fn new(source: Source) -> Weights {
        Weights { source, files: Vec::new(), by_name: HashMap::new() }
    }

    /// The files opened, in the order of [`BlobRef::file`].
    pub(crate) fn into_files(self) -> Vec<Bytes> {
        self.files
    }

    /// The index of the file `name`, opened and its header checked.
    fn file(&mut self, name: &str) -> Result<Result<usize, BlobError>, MilError> {
        if let Some(&index) = self.by_name.get(name) {
            return Ok(Ok(index));
        }
        let Some(bytes) = self.source.weights(name)? else { return Ok(Err(BlobError::MissingFile)) };
        if let Err(problem) = blob::check_header(&bytes) {
            return Ok(Err(problem));
        }
        let index = self.files.len();
        self.files.push(bytes);
        self.by_name.insert(name.to_owned(), index);
        Ok(Ok(index))
    }
}

/// The typed form of `wire`.
///
/// `default_function` is what the description names, empty when it names none: then it is `main`, or the only
/// function there is.
pub(crate) fn program(
    wire: spec::Program,
    default_function: &str,
    weights: &mut Weights,
) -> Result<Program, MilError> {
    let nowhere = |problem| MilError::Program { place: Box::default(), problem };
    let known: Vec<String> = wire.functions.keys().cloned().collect();
    let default_function = match (default_function, known.as_slice()) {
        (_, []) => return Err(nowhere(ProgramError::NoFunctions)),
        ("", [only]) => only.clone(),
        ("", _) => "main".to_owned(),
        (named, _) => named.to_owned(),
    };
    if !wire.functions.contains_key(&default_function) {
        return Err(nowhere(ProgramError::NoDefaultFunction { name: default_function, known }));
    }
    let mut functions = BTreeMap::new();
    for (name, wire) in wire.functions {
        let function = function::lower(&name, wire, weights)?;
        functions.insert(name, function);
    }
    Ok(Program { functions, default_function })
}

#[cfg(test)]
mod tests;
