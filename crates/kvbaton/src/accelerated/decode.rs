//! Decoding on a runtime: Core ML, or a fake of it.

use std::path::Path;

use kvbaton_layout::{LiveRows, TensorInfo};
use kvbaton_memory::Bytes;
use kvbaton_runtime::{ArrayInfo, Counts, Loaded, Runtime, Session, StateId, Units};

use super::{RuntimePackage, logits};
use crate::cpu::agree;
use crate::decode::DecodeFacts;
use crate::described::cache_tensor;
use crate::functions::{Facts, decode_function};
use crate::handoff::{hand_off_one, planned};
use crate::inputs::Wanted as Input;
use crate::{
    CacheView, Decode, Error, ErrorKind, Filled, HandoffReport, Logits, Stated, Tensor, Threads, Wanted,
};

/// A decode package behind a runtime's session. Its states stay on the session's thread: what goes into them is copied
/// there by their handlers, and what comes out is a copy.
pub struct RuntimeDecode<R: Runtime> {
    package: RuntimePackage<R>,
    facts: DecodeFacts,
    function: String,
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
    pub fn open(session: Session<R>, path: &Path, units: Option<Units>) -> Result<RuntimeDecode<R>, Error> {
        let mut package = RuntimePackage::open(session, path, units)?;
        let (functions, metadata) = (&package.described.functions, &package.described.metadata);
        let (layout, model) = agree(path, metadata, Stated::default())?;
        let token_shapes = functions.keys().map(|name| (name.clone(), None)).collect();
        let facts = Facts { path, metadata, token_shapes };
        let states = |name: &str| -> Vec<(String, Vec<usize>)> {
            let found = functions.get(name).into_iter().flat_map(|f| &f.states);
            found.map(|s| (s.name.clone(), s.shape.clone())).collect()
        };
        let (function, capacity) = decode_function(&facts, &layout, &model.cache, states)?;
        let kept = layout.tensor_names(&model.cache)?;
        let tensors = package
            .function(&function)?
            .states
            .iter()
            .filter(|s| kept.contains(&s.name))
            .map(|s| cache_tensor("state", s))
            .collect::<Result<Vec<_>, _>>()?;
        let loaded = package.load(&function)?.clone();
        let state = package.new_state(&function)?;
        let facts = DecodeFacts { model, layout, capacity };
        Ok(RuntimeDecode { package, facts, function, tensors, loaded, state, seen: 0 })
    }

    /// Where all buffers are.
    pub fn counts(&self) -> Counts {
        self.package.session.counts()
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
        self.package.session.write_state(self.state, &self.names(), write)
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
        self.package.session.drop_state(self.state);
        self.state = self.package.new_state(&self.function)?;
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
        let types = self.package.described.inputs(&self.function);
        let wanted: Vec<Input<'_>> = types.iter().map(|(name, ty)| Input { name, ty }).collect();
        let inputs = self.facts.inputs(&wanted, token, self.seen)?;
        let outputs = self.package.run(&self.function, inputs, Some(self.state))?;
        self.seen += 1;
        logits(&self.facts.logits(outputs, |o| &o.name)?)
    }

    fn cache(&mut self) -> Result<CacheView, Error> {
        let copies = self.package.session.read_state(self.state, &self.names())?;
        let tensors = self.tensors.iter().zip(copies).map(|(info, (reported, bytes))| {
            Ok(Tensor { info: shown(info, &reported)?, bytes: Bytes::new(bytes) })
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
