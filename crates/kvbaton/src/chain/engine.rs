//! What runs a package of a chain: the executor, or a runtime behind its session.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kvbaton_exec::{Array, Executable, Options, State};
use kvbaton_mil::Package;
use kvbaton_runtime::{Loaded, Output, Runtime, Session, StateId, Units};

use crate::accelerated::{RuntimePackage, copied, lent, logits};
use crate::described::Described;
use crate::engine::refuse_compiled;
use crate::tensors::tensor;
use crate::{Error, Logits, Tensor};

/// An engine with one package. States stay inside it: they are made when a function that has some first runs, and what is
/// read of them is a copy, or shares memory that the next run leaves alone.
pub(super) trait StageEngine: Send {
    /// `cpu`, `coreml` or `fake`.
    fn name(&self) -> &'static str;

    /// What the package says of itself.
    fn described(&self) -> &Described;

    /// Loads a function, unless it is.
    fn load(&mut self, function: &str) -> Result<(), Error>;

    /// For which units a function was loaded, and what there is to know of that, where the engine has units.
    fn loaded(&self, function: &str) -> Option<&Loaded>;

    /// Runs a function, which is loaded for it, on the package's states where it has some.
    fn run(&mut self, function: &str, inputs: Vec<(String, Array)>) -> Result<Vec<Left>, Error>;

    /// Forgets what the states hold.
    fn clear(&mut self);

    /// The states of a function; none before it has run.
    fn states(&mut self, function: &str) -> Result<Vec<Tensor>, Error>;

    /// All work on GPUs that was submitted so far is done.
    fn settle(&mut self) {}
}

/// An output.
pub(super) enum Left {
    /// The executor's: packed, in memory of its own.
    Own(String, Array),
    /// A runtime's: in a buffer that the next prediction writes, as the runtime lays it out.
    Lent(Output),
}

impl Left {
    pub(super) fn name(&self) -> &str {
        match self {
            Left::Own(name, _) => name,
            Left::Lent(output) => &output.name,
        }
    }

    /// Under another name.
    pub(super) fn named(self, name: String) -> Left {
        match self {
            Left::Own(_, array) => Left::Own(name, array),
            Left::Lent(output) => Left::Lent(Output { name, ..output }),
        }
    }

    /// Packed, in memory of its own.
    ///
    /// A buffer that is lent is copied out of, although the next package could read it where it is: if that hung, it
    /// would never be free again.
    pub(super) fn array(self) -> Result<(String, Array), Error> {
        match self {
            Left::Own(name, array) => Ok((name, array)),
            Left::Lent(output) => copied(output),
        }
    }

    /// As a cache tensor where it is, if its type is one that caches have.
    pub(super) fn tensor(self, notes: &mut Vec<String>) -> Option<Tensor> {
        match self {
            Left::Own(name, array) => tensor(name, &array),
            Left::Lent(output) => lent(output, notes),
        }
    }

    /// As logits, if its type is one that they have.
    pub(super) fn logits(&self) -> Result<Option<Logits>, Error> {
        match self {
            Left::Own(_, array) => Ok(array.to_f32().map(|values| Logits { values })),
            Left::Lent(output) => logits(output).map(Some),
        }
    }
}

/// A package on the CPU executor.
pub(super) struct CpuStage {
    package: Arc<Package>,
    described: Described,
    options: Options,
    loaded: BTreeMap<String, Executable>,
    state: Option<State>,
}

impl CpuStage {
    pub(super) fn open(path: &Path, options: Options) -> Result<CpuStage, Error> {
        refuse_compiled(path)?;
        let package = Arc::new(Package::open(path)?);
        let described = Described::of(&package)?;
        Ok(CpuStage { package, described, options, loaded: BTreeMap::new(), state: None })
    }
}

impl StageEngine for CpuStage {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn described(&self) -> &Described {
        &self.described
    }

    fn load(&mut self, function: &str) -> Result<(), Error> {
        if self.loaded.contains_key(function) {
            return Ok(());
        }
        let loaded = Executable::load(self.package.clone(), function, &self.options);
        let mut executable =
            loaded.map_err(|e| Error::from(e).of_function(function, &self.described.path))?;
        if let Some(other) = self.loaded.values().next() {
            executable = executable.sharing_memory_with(other);
        }
        self.loaded.insert(function.to_owned(), executable);
        Ok(())
    }

    fn loaded(&self, _function: &str) -> Option<&Loaded> {
        None
    }

    fn run(&mut self, function: &str, inputs: Vec<(String, Array)>) -> Result<Vec<Left>, Error> {
        self.load(function)?;
        let executable = &self.loaded[function];
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        let mut run = || {
            if executable.states().is_empty() {
                return executable.run(&inputs);
            }
            if self.state.is_none() {
                self.state = Some(executable.new_state()?);
            }
            executable.run_with(&inputs, self.state.as_mut().expect("made above"))
        };
        let outputs = run().map_err(|e| Error::from(e).of_function(function, &self.described.path))?;
        Ok(outputs.into_iter().map(|(name, array)| Left::Own(name, array)).collect())
    }

    fn clear(&mut self) {
        self.state = None;
    }

    fn states(&mut self, _function: &str) -> Result<Vec<Tensor>, Error> {
        let Some(state) = &self.state else { return Ok(Vec::new()) };
        let arrays = state.features().map(|f| Ok((f.name.clone(), state.array(&f.name)?)));
        let arrays = arrays.collect::<Result<Vec<_>, Error>>()?;
        Ok(arrays.into_iter().filter_map(|(name, array)| tensor(name, &array)).collect())
    }
}

/// A package on a runtime.
pub(super) struct RuntimeStage<R: Runtime> {
    package: RuntimePackage<R>,
    state: Option<StateId>,
}

impl<R: Runtime> RuntimeStage<R> {
    pub(super) fn open(
        session: Session<R>,
        path: &Path,
        units: Option<Units>,
    ) -> Result<RuntimeStage<R>, Error> {
        Ok(RuntimeStage { package: RuntimePackage::open(session, path, units)?, state: None })
    }

    /// The state that a function runs on, made when there is none.
    fn state(&mut self, function: &str) -> Result<Option<StateId>, Error> {
        if self.package.function(function)?.states.is_empty() {
            return Ok(None);
        }
        if self.state.is_none() {
            self.state = Some(self.package.new_state(function)?);
        }
        Ok(self.state)
    }
}

impl<R: Runtime> StageEngine for RuntimeStage<R> {
    fn name(&self) -> &'static str {
        R::NAME
    }

    fn described(&self) -> &Described {
        &self.package.described
    }

    fn load(&mut self, function: &str) -> Result<(), Error> {
        self.package.load(function).map(|_| ())
    }

    fn loaded(&self, function: &str) -> Option<&Loaded> {
        self.package.loaded().get(function)
    }

    fn run(&mut self, function: &str, inputs: Vec<(String, Array)>) -> Result<Vec<Left>, Error> {
        let state = self.state(function)?;
        let outputs = self.package.run(function, inputs, state)?;
        Ok(outputs.into_iter().map(Left::Lent).collect())
    }

    fn clear(&mut self) {
        if let Some(state) = self.state.take() {
            self.package.session.drop_state(state);
        }
    }

    fn states(&mut self, function: &str) -> Result<Vec<Tensor>, Error> {
        match self.state {
            Some(state) => self.package.read_states(function, state),
            None => Ok(Vec::new()),
        }
    }

    fn settle(&mut self) {
        self.package.session.settle();
    }
}
