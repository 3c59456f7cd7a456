//! A package, or a compiled model, behind a runtime's session: what prefill, decoding and the packages of a chain share.

use std::collections::BTreeMap;
use std::path::Path;

use kvbaton_exec::Array;
use kvbaton_layout::TensorInfo;
use kvbaton_memory::Bytes;
use kvbaton_runtime::{
    ArrayInfo, CompiledFunction, Element, Loaded, Memory, Output, Runtime, RuntimeError, Session, StateId,
    Units,
};

use crate::described::Described;
use crate::tensors::{data_type_of, element_of};
use crate::{Error, ErrorKind, Logits, Tensor};

/// A package and the session that runs it. Its functions are loaded when they are needed.
pub(crate) struct RuntimePackage<R: Runtime> {
    pub(crate) session: Session<R>,
    pub(crate) described: Described,
    /// The compute units that somebody asked for.
    units: Option<Units>,
    loaded: BTreeMap<String, Loaded>,
}

impl<R: Runtime> RuntimePackage<R> {
    /// Reads what the package at `path` says of itself; nothing is loaded yet.
    pub(crate) fn open(
        session: Session<R>,
        path: &Path,
        units: Option<Units>,
    ) -> Result<RuntimePackage<R>, Error> {
        Ok(RuntimePackage { session, described: Described::read(path)?, units, loaded: BTreeMap::new() })
    }

    /// What was loaded, by function.
    pub(crate) fn loaded(&self) -> &BTreeMap<String, Loaded> {
        &self.loaded
    }

    /// A function as the package declares it.
    pub(crate) fn function(&self, name: &str) -> Result<&CompiledFunction, Error> {
        self.described.function(Some(name)).map(|(_, function)| function)
    }

    /// Loads a function, unless it is.
    pub(crate) fn load(&mut self, function: &str) -> Result<&Loaded, Error> {
        if !self.loaded.contains_key(function) {
            let named = self.function(function)?.name.clone();
            let path = self.described.path.clone();
            let loaded = self.session.load(&path, named.as_deref(), self.units);
            self.loaded.insert(function.to_owned(), loaded.map_err(|e| self.placed(function, e))?);
        }
        Ok(&self.loaded[function])
    }

    /// A zeroed state of a function, which is loaded for it.
    pub(crate) fn new_state(&mut self, function: &str) -> Result<StateId, Error> {
        self.load(function)?;
        let named = self.function(function)?.name.clone();
        self.session.new_state(named.as_deref()).map_err(|e| self.placed(function, e))
    }

    /// Runs a function, which is loaded for it, on `state` where it has one, and lends its outputs.
    pub(crate) fn run(
        &mut self,
        function: &str,
        inputs: Vec<(String, Array)>,
        state: Option<StateId>,
    ) -> Result<Vec<Output>, Error> {
        self.load(function)?;
        let inputs = inputs.into_iter().map(packed).collect::<Result<_, _>>()?;
        let CompiledFunction { name, outputs, .. } = self.described.function(Some(function))?.1;
        let done = match state {
            None => self.session.predict(name.as_deref(), inputs, outputs),
            Some(state) => self.session.step(name.as_deref(), state, inputs, outputs),
        };
        done.map_err(|e| self.placed(function, e))
    }

    /// Packed copies of all states that a function has.
    pub(crate) fn read_states(&mut self, function: &str, state: StateId) -> Result<Vec<Tensor>, Error> {
        let names: Vec<String> = self.function(function)?.states.iter().map(|s| s.name.clone()).collect();
        let copies = self.session.read_state(state, &names).map_err(|e| self.placed(function, e))?;
        let tensors = names.into_iter().zip(copies);
        Ok(tensors.filter_map(|(name, (info, bytes))| tensor(name, info, Bytes::new(bytes))).collect())
    }

    /// A runtime's failure, with its place.
    fn placed(&self, function: &str, error: RuntimeError) -> Error {
        Error::from(error).of_function(function, &self.described.path)
    }
}

/// An array as a session's input.
fn packed((name, array): (String, Array)) -> Result<(String, ArrayInfo, Bytes), Error> {
    let element = element_of(array.dtype()).ok_or_else(|| {
        Error::new(ErrorKind::Program, format!("the input `{name}` has elements of type {}", array.dtype()))
    })?;
    Ok((name, ArrayInfo::packed(element, array.shape()), array.bytes().clone()))
}

/// An output's elements, packed, in memory of their own: its buffer is free again.
pub(crate) fn copied(output: Output) -> Result<(String, Array), Error> {
    let Output { name, info, bytes, .. } = output;
    let packed = Bytes::new(info.gather(&bytes));
    Ok((name, Array::new(data_type_of(info.element), info.shape, packed)?))
}

/// An output as a cache tensor, if its type is one that caches have; what is worth knowing of it goes to `notes`.
pub(crate) fn lent(output: Output, notes: &mut Vec<String>) -> Option<Tensor> {
    let Output { name, info, bytes, memory, because } = output;
    if memory != Memory::Surface {
        let because = because.unwrap_or_default();
        notes.push(format!("`{name}` is not in a surface, the engine copies it: {because}"));
    }
    tensor(name, info, bytes)
}

fn tensor(name: String, info: ArrayInfo, bytes: Bytes) -> Option<Tensor> {
    let info = TensorInfo {
        name,
        dtype: info.element.dtype()?,
        shape: info.shape,
        strides_bytes: info.strides_bytes,
        len_bytes: info.len_bytes,
    };
    Some(Tensor { info, bytes })
}

/// An output of logits.
pub(crate) fn logits(output: &Output) -> Result<Logits, Error> {
    let packed = output.info.gather(&output.bytes);
    let values = match output.info.element {
        Element::Float16 => {
            packed.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()
        }
        Element::Float32 => packed.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        other => {
            let message = format!("the logits `{}` have elements of type {other:?}", output.name);
            return Err(Error::new(ErrorKind::Layout, message));
        }
    };
    Ok(Logits { values })
}
