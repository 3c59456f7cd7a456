//! The thread's side of a session: models, buffers, and the order in which a prediction goes about them.

use std::collections::BTreeMap;
use std::path::Path;

use kvbaton_memory::{Book, Bytes, Custody, Move, Turn};

use crate::{
    ArrayInfo, Call, CompileCache, Compiled, Element, LoadConfig, Memory, Output, PlanSummary, Runtime,
    RuntimeError, StateId, Units, choose_memory, is_compiled,
};

/// Packed values for an input.
#[derive(Clone, Debug)]
pub(crate) struct InputValues {
    pub(crate) name: String,
    pub(crate) info: ArrayInfo,
    pub(crate) bytes: Bytes,
}

/// An output that is wanted.
#[derive(Clone, Debug)]
pub(crate) struct WantedOutput {
    pub(crate) name: String,
    pub(crate) element: Element,
    pub(crate) shape: Vec<usize>,
}

/// A buffer that is proposed at every prediction of its function.
struct Held<A> {
    array: A,
    custody: Custody,
    memory: Memory,
    because: Option<String>,
}

pub(crate) struct Worker<R: Runtime> {
    pub(crate) runtime: R,
    book: Book,
    models: BTreeMap<String, R::Model>,
    held: BTreeMap<(String, String), Held<R::Array>>,
    /// States that can be trusted. One that a call takes comes back when that call has succeeded.
    states: BTreeMap<StateId, R::State>,
}

impl<R: Runtime> Worker<R> {
    pub(crate) fn new(runtime: R, book: Book) -> Worker<R> {
        Worker { runtime, book, models: BTreeMap::new(), held: BTreeMap::new(), states: BTreeMap::new() }
    }

    /// The compiled form of `path`: itself, the cache's copy, or one that goes with whoever uses it.
    pub(crate) fn compile(
        &mut self,
        path: &Path,
        cache: Option<&CompileCache>,
    ) -> Result<Compiled, RuntimeError> {
        if is_compiled(path) {
            return Ok(Compiled::given(path));
        }
        let system = self.runtime.system();
        system.require("compiling a package", (13, 0))?;
        match cache {
            Some(cache) => cache.compiled(path, &system, |p| self.runtime.compile(p)),
            None => self.runtime.compile(path).map(Compiled::temporary),
        }
    }

    pub(crate) fn load(
        &mut self,
        compiled: &Path,
        function: Option<&str>,
        units: Units,
    ) -> Result<LoadConfig, RuntimeError> {
        let config = LoadConfig::for_system(units, function, &self.runtime.system())?;
        let model = self.runtime.load(compiled, &config)?;
        self.models.insert(config.function.clone().unwrap_or_default(), model);
        Ok(config)
    }

    pub(crate) fn plan(&mut self, compiled: &Path, config: &LoadConfig) -> Result<PlanSummary, RuntimeError> {
        self.runtime.system().require("a compute plan", (14, 4))?;
        Ok(PlanSummary::of(&self.runtime.plan(compiled, config)?))
    }

    /// Makes a state of a loaded function, under the name `id`.
    pub(crate) fn new_state(&mut self, function: &str, id: StateId) -> Result<(), RuntimeError> {
        self.runtime.system().require("a state", (15, 0))?;
        let model = self.models.get_mut(function).ok_or_else(|| not_loaded(function))?;
        let state = self.runtime.new_state(model)?;
        self.states.insert(id, state);
        Ok(())
    }

    pub(crate) fn drop_state(&mut self, id: StateId) {
        self.states.remove(&id);
    }

    /// Lets `write` change the tensors `names` of a state, one after the other. Unless all succeed, the state is gone.
    pub(crate) fn write_state<T, E>(
        &mut self,
        id: StateId,
        names: &[String],
        mut write: impl FnMut(usize, &ArrayInfo, &mut [u8]) -> Result<T, E>,
    ) -> Result<Result<Vec<T>, E>, RuntimeError> {
        let mut state = self.states.remove(&id).ok_or(RuntimeError::StateLost)?;
        let mut done = Vec::with_capacity(names.len());
        for (index, name) in names.iter().enumerate() {
            let mut outcome = None;
            self.runtime.write_state(&mut state, name, &mut |info, bytes| {
                outcome = Some(write(index, info, bytes));
            })?;
            match outcome {
                Some(Ok(one)) => done.push(one),
                Some(Err(error)) => return Ok(Err(error)),
                None => {
                    return Err(RuntimeError::failed(Call::WriteState, format!("`{name}` was not shown")));
                }
            }
        }
        self.states.insert(id, state);
        Ok(Ok(done))
    }

    /// Copies of the tensors `names` of a state, packed.
    pub(crate) fn read_state(
        &mut self,
        id: StateId,
        names: &[String],
    ) -> Result<Vec<(ArrayInfo, Vec<u8>)>, RuntimeError> {
        let state = self.states.get_mut(&id).ok_or(RuntimeError::StateLost)?;
        let mut tensors = Vec::with_capacity(names.len());
        for name in names {
            let mut copy = None;
            self.runtime.read_state(state, name, &mut |info, bytes| {
                copy = Some((ArrayInfo::packed(info.element, &info.shape), info.gather(bytes)));
            })?;
            let missing = || RuntimeError::failed(Call::ReadState, format!("`{name}` was not shown"));
            tensors.push(copy.ok_or_else(missing)?);
        }
        Ok(tensors)
    }

    /// Runs a function, on a state where it has one, and lends its outputs.
    ///
    /// Everything that was proposed is free again when this fails, at whichever call; a state that the failed
    /// prediction had is gone.
    pub(crate) fn predict(
        &mut self,
        function: &str,
        inputs: &[InputValues],
        wanted: &[WantedOutput],
        state: Option<StateId>,
    ) -> Result<Vec<Output>, RuntimeError> {
        if !self.models.contains_key(function) {
            return Err(not_loaded(function));
        }
        if state.is_some_and(|id| !self.states.contains_key(&id)) {
            return Err(RuntimeError::StateLost);
        }
        let mut turns = Vec::new();
        for output in wanted {
            self.hold(function, output)?;
            turns.push(Turn::propose(&self.held[&key(function, output)].custody)?);
        }
        let mut arrays = Vec::new();
        let mut read = Vec::new();
        for input in inputs {
            // An array of its own at every prediction: runtimes go on reading inputs for a while, and refuse to
            // write what they have read.
            let array = self.runtime.input(&input.info, &input.bytes)?;
            let custody = self.book.open();
            custody.make(Move::Input)?;
            read.push(custody);
            arrays.push((input.name.clone(), array));
        }
        let backings: Vec<(String, R::Array)> =
            wanted.iter().map(|o| (o.name.clone(), self.held[&key(function, o)].array.clone())).collect();
        let model = self.models.get_mut(function).ok_or_else(|| not_loaded(function))?;
        let mut taken = state.and_then(|id| self.states.remove(&id).map(|state| (id, state)));
        let results =
            self.runtime.predict(model, &arrays, &backings, taken.as_mut().map(|(_, state)| state))?;
        let mut outputs = Vec::new();
        for (output, turn) in wanted.iter().zip(turns) {
            let result = results.iter().find(|(name, _)| *name == output.name).map(|(_, array)| array);
            let missing = || RuntimeError::MissingOutput { name: output.name.clone() };
            outputs.push(self.lend(function, output, turn, result.ok_or_else(missing)?)?);
        }
        self.states.extend(taken);
        Ok(outputs)
    }

    /// Makes sure that there is a buffer to propose.
    fn hold(&mut self, function: &str, output: &WantedOutput) -> Result<(), RuntimeError> {
        let key = key(function, output);
        if self.held.contains_key(&key) {
            return Ok(());
        }
        let mut choice = choose_memory(output.element, &output.shape, self.runtime.surface_limits());
        let mut array = self.runtime.backing(output.element, &output.shape, choice.memory);
        if let (Err(error), Memory::Surface) = (&array, choice.memory) {
            choice.memory = Memory::Heap;
            choice.because = Some(error.to_string());
            array = self.runtime.backing(output.element, &output.shape, Memory::Heap);
        }
        let custody = self.book.open();
        let held = Held { array: array?, custody, memory: choice.memory, because: choice.because };
        self.held.insert(key, held);
        Ok(())
    }

    /// Lends one result: the backing when the runtime used it, else the array that it made itself.
    fn lend(
        &mut self,
        function: &str,
        output: &WantedOutput,
        turn: Turn,
        result: &R::Array,
    ) -> Result<Output, RuntimeError> {
        let held = &self.held[&key(function, output)];
        let used = self.runtime.is_same(result, &held.array);
        let (turn, memory, because) = if used {
            (turn, held.memory, held.because.clone())
        } else {
            let own = Turn::propose(&self.book.open())?;
            (own, Memory::Own, Some("the runtime did not use the memory it was offered".to_owned()))
        };
        turn.written()?;
        let info = self.runtime.describe(result)?;
        if info.shape != output.shape || info.element != output.element {
            let (have, said) = ((&info.shape, info.element), (&output.shape, output.element));
            let message = format!("`{}` is {have:?}, the program declares {said:?}", output.name);
            return Err(RuntimeError::failed(Call::Describe, message));
        }
        let bytes = self.runtime.lock(result, &info)?;
        // The lock goes before the loan.
        let bytes = Bytes::on_loan(bytes, turn.lend()?);
        Ok(Output { name: output.name.clone(), info, bytes, memory, because })
    }
}

fn not_loaded(function: &str) -> RuntimeError {
    RuntimeError::NotLoaded { function: function.to_owned() }
}

fn key(function: &str, output: &WantedOutput) -> (String, String) {
    (function.to_owned(), output.name.clone())
}
