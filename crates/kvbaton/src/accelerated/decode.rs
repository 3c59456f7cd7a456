//! Decoding on a runtime: Core ML, or a fake of it.

use std::path::Path;

use kvbaton_layout::{LiveRows, TensorInfo};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::program::TensorType;
use kvbaton_runtime::{
    ArrayInfo, CompiledFeature, CompiledFunction, Counts, Loaded, Runtime, Session, StateId, Units,
};

use super::{described, floats, packed, tensor_type};
use crate::cpu::agree;
use crate::decode::DecodeFacts;
use crate::functions::{Facts, decode_function};
use crate::handoff::{hand_off_one, planned};
use crate::inputs::Wanted as Input;
use crate::{
    CacheView, Decode, Error, ErrorKind, Filled, HandoffReport, Logits, Stated, Tensor, Threads, Wanted,
};

/// A decode package behind a runtime's session. Its states stay on the session's thread: what goes into them is copied
/// there by their handlers, and what comes out is a copy.
pub struct RuntimeDecode<R: Runtime> {
    session: Session<R>,
    facts: DecodeFacts,
    function: CompiledFunction,
    /// The states that hold the cache, as the program declares them.
    tensors: Vec<TensorInfo>,
    loaded: Loaded,
    state: StateId,
    seen: usize,
}

impl<R: Runtime> RuntimeDecode<R> {
    /// Opens a package, or a compiled model, that says of itself what its states are, and loads it. `units` are the
    /// compute units that somebody asked for.
    ///
    /// # Errors
    ///
    /// When it cannot be read or loaded, states neither its layout nor its model, does not decode, or the system is too
    /// old for states.
    pub fn open(
        mut session: Session<R>,
        path: &Path,
        units: Option<Units>,
    ) -> Result<RuntimeDecode<R>, Error> {
        let (mut functions, metadata) = described(path)?;
        let (layout, model) = agree(path, &metadata, Stated::default())?;
        let token_shapes = functions.keys().map(|name| (name.clone(), None)).collect();
        let facts = Facts { path, metadata: &metadata, token_shapes };
        let states = |name: &str| -> Vec<(String, Vec<usize>)> {
            let found = functions.get(name).into_iter().flat_map(|f| &f.states);
            found.map(|s| (s.name.clone(), s.shape.clone())).collect()
        };
        let (name, capacity) = decode_function(&facts, &layout, &model.cache, states)?;
        let function = functions.remove(&name).expect("a function with states was found under this name");
        let kept = layout.tensor_names(&model.cache)?;
        let tensors = function
            .states
            .iter()
            .filter(|s| kept.contains(&s.name))
            .map(state_tensor)
            .collect::<Result<Vec<_>, _>>()?;
        let loaded = session.load(path, function.name.as_deref(), units)?;
        let state = session.new_state(function.name.as_deref())?;
        let facts = DecodeFacts { model, layout, capacity };
        Ok(RuntimeDecode { session, facts, function, tensors, loaded, state, seen: 0 })
    }

    /// Where all buffers are.
    pub fn counts(&self) -> Counts {
        self.session.counts()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|t| t.name.clone()).collect()
    }

    /// Writes the rows of `view` into the states, one tensor after the other.
    fn fill(&mut self, view: &CacheView, seen: usize, threads: usize) -> Result<Vec<Filled>, Error> {
        let DecodeFacts { layout, model, .. } = self.facts.clone();
        let (cache, live) = (model.cache, LiveRows::seen(seen));
        let (view, infos) = (view.clone(), self.tensors.clone());
        // Whatever the plan refuses, it refuses before the state is touched.
        let wanted = Wanted { layout: &layout, cache: &cache, live: &live, rows: None, whole: &[] };
        planned(&view, &wanted, &infos, None)?;
        let threads = Threads::new(threads);
        let write = move |index: usize, reported: &ArrayInfo, bytes: &mut [u8]| {
            let mut infos = infos.clone();
            infos[index] = shown(&infos[index], reported)?;
            let wanted = Wanted { layout: &layout, cache: &cache, live: &live, rows: None, whole: &[] };
            hand_off_one(&view, &wanted, &infos, index, bytes, &threads)
        };
        self.session.write_state(self.state, &self.names(), write)
    }
}

impl<R: Runtime> Decode for RuntimeDecode<R> {
    fn engine(&self) -> &'static str {
        R::NAME
    }

    fn facts(&self) -> &DecodeFacts {
        &self.facts
    }

    fn tokens_seen(&self) -> usize {
        self.seen
    }

    fn clear(&mut self) -> Result<(), Error> {
        self.seen = 0;
        self.session.drop_state(self.state);
        self.state = self.session.new_state(self.function.name.as_deref())?;
        Ok(())
    }

    fn receive(&mut self, view: &CacheView, threads: &Threads) -> Result<HandoffReport, Error> {
        self.clear()?;
        let seen = self.facts.check_received(view)?;
        // A runtime's states are zeroed as they are made: rows that nothing fills are zero already.
        let filled = match self.fill(view, seen, threads.count()) {
            Ok(filled) => filled,
            Err(error) => {
                self.clear()?;
                return Err(error);
            }
        };
        self.seen = seen;
        Ok(HandoffReport::of_fill(&Filled::sum(filled), seen))
    }

    fn step(&mut self, token: u32) -> Result<Logits, Error> {
        let types: Vec<(&str, TensorType)> = self
            .function
            .inputs
            .iter()
            .map(|i| (i.name.as_str(), tensor_type(i.element, &i.shape)))
            .collect();
        let wanted: Vec<Input<'_>> = types.iter().map(|(name, ty)| Input { name, ty }).collect();
        let arrays = self.facts.inputs(&wanted, token, self.seen)?;
        let inputs =
            arrays.into_iter().map(|(name, array)| packed(name, &array)).collect::<Result<_, _>>()?;
        let name = self.function.name.as_deref();
        let outputs = self.session.step(name, self.state, inputs, &self.function.outputs)?;
        self.seen += 1;
        Ok(Logits { values: floats(&self.facts.logits(outputs, |o| &o.name)?)? })
    }

    fn cache(&mut self) -> Result<CacheView, Error> {
        let copies = self.session.read_state(self.state, &self.names())?;
        let tensors = self.tensors.iter().zip(copies).map(|(info, (reported, bytes))| {
            let bytes = Bytes::new(Buffer::copy_of(&bytes));
            Ok(Tensor { info: shown(info, &reported)?, bytes })
        });
        let tensors = tensors.collect::<Result<Vec<_>, Error>>()?;
        self.facts.view(tensors, self.seen)
    }

    fn addresses(&self) -> Option<Vec<(usize, usize)>> {
        None
    }

    fn compute_units(&self) -> Option<Units> {
        Some(self.loaded.units)
    }

    fn notes(&self) -> &[String] {
        &self.loaded.notes
    }
}

/// A state as a cache tensor, packed.
fn state_tensor(state: &CompiledFeature) -> Result<TensorInfo, Error> {
    let dtype = state.element.dtype().ok_or_else(|| {
        let message = format!(
            "the state `{}` has elements of type {:?}: it cannot hold a cache",
            state.name, state.element
        );
        Error::new(ErrorKind::Layout, message)
    })?;
    Ok(TensorInfo::contiguous(state.name.clone(), dtype, &state.shape))
}

/// The tensor as the runtime shows it this time, if it is the one that was declared.
fn shown(declared: &TensorInfo, reported: &ArrayInfo) -> Result<TensorInfo, Error> {
    if reported.shape != declared.shape || reported.element.dtype() != Some(declared.dtype) {
        let (have, said) = ((&reported.shape, reported.element), (&declared.shape, declared.dtype));
        let message = format!("the state `{}` is {have:?}, the program declares {said:?}", declared.name);
        return Err(Error::new(ErrorKind::Program, message));
    }
    Ok(TensorInfo {
        strides_bytes: reported.strides_bytes.clone(),
        len_bytes: reported.len_bytes,
        ..declared.clone()
    })
}

#[cfg(test)]
mod tests;
