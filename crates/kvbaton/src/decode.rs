//! Engines that decode with a package: one token at a time, the cache in states.

use std::path::Path;
use std::sync::Arc;

use kvbaton_exec::{Array, Executable, Options, State};
use kvbaton_layout::{Layout, LiveRows, ModelSpec, TensorInfo};
use kvbaton_mil::Package;
use kvbaton_mil::program::DataType;
use kvbaton_runtime::Units;

use crate::compatible::check_vocabulary;
use crate::cpu::{Stated, agree};
use crate::functions::{Facts, decode_function, program_states};
use crate::inputs::{self, Wanted as Input};
use crate::tensors::{dtype, tensor};
use crate::{
    CacheView, Error, ErrorKind, HandoffOptions, HandoffReport, Logits, Target, Tensor, Threads, Waived,
    Wanted, check_compatible, hand_off_to,
};

/// An engine that decodes one token at a time.
///
/// It keeps the cache itself: its states are filled by a hand-off, and grow by a row a step.
pub trait Decode: Send {
    /// `cpu`, `coreml`, …
    fn engine(&self) -> &'static str;

    /// What its package is.
    fn facts(&self) -> &DecodeFacts;

    /// What the package says of its model.
    fn model(&self) -> &ModelSpec {
        &self.facts().model
    }

    /// The layout of its states.
    fn layout(&self) -> &Layout {
        &self.facts().layout
    }

    /// Rows that its states hold: a context.
    fn capacity(&self) -> usize {
        self.facts().capacity
    }

    /// Tokens that the states have seen: the position of the next one.
    fn tokens_seen(&self) -> usize;

    /// Forgets every token.
    ///
    /// # Errors
    ///
    /// When the states cannot be made.
    fn clear(&mut self) -> Result<(), Error>;

    /// Takes a cache over: its states hold what `view` holds, and nothing else.
    ///
    /// # Errors
    ///
    /// When the cache is of another shape, has more rows than the states, or values that they cannot hold. The engine
    /// has seen no token then.
    fn receive(&mut self, view: &CacheView, threads: &Threads) -> Result<HandoffReport, Error>;

    /// Runs one token after those it has seen, and returns the logits of the next.
    ///
    /// # Errors
    ///
    /// When the context is full, the token is not in the vocabulary, or the program fails.
    fn step(&mut self, token: u32) -> Result<Logits, Error>;

    /// The states as a cache. While the view lives, the next step of an engine that shows its own memory copies them.
    ///
    /// # Errors
    ///
    /// When a step that failed lost them.
    fn cache(&mut self) -> Result<CacheView, Error>;

    /// Where the states are, and their bytes: those that moved during a step were copied. `None` for engines that may
    /// show a state at another place each time, whether they copied it or not.
    fn addresses(&self) -> Option<Vec<(usize, usize)>>;

    /// The compute units that it was loaded for, where the engine has them.
    fn compute_units(&self) -> Option<Units> {
        None
    }

    /// What the user should know of how it runs.
    fn notes(&self) -> &[String] {
        &[]
    }
}

/// What a decode package is, whichever engine runs it.
#[derive(Clone, Debug)]
pub struct DecodeFacts {
    pub(crate) model: ModelSpec,
    pub(crate) layout: Layout,
    pub(crate) capacity: usize,
}

impl DecodeFacts {
    /// The tokens that `view` has seen, if its rows can be taken over.
    pub(crate) fn check_received(&self, view: &CacheView) -> Result<usize, Error> {
        if let Some(other) = view.model() {
            check_compatible(other, &self.model, Waived { weights: true })?;
        }
        let seen = view.tokens_seen();
        if seen > self.capacity { Err(self.full(seen)) } else { Ok(seen) }
    }

    /// The inputs of a step with `token` after `seen` others, unless no row is left or the model has no embedding for it.
    pub(crate) fn inputs(
        &self,
        wanted: &[Input<'_>],
        token: u32,
        seen: usize,
    ) -> Result<Vec<(String, Array)>, Error> {
        if seen >= self.capacity {
            return Err(self.full(seen + 1));
        }
        check_vocabulary(&[token], self.model.vocab_size)?;
        inputs::build_after(&self.layout, wanted, &[token], 1, seen, &[])
    }

    /// The one of `outputs` that has the logits.
    pub(crate) fn logits<T>(&self, outputs: Vec<T>, name: impl Fn(&T) -> &String) -> Result<T, Error> {
        let wanted = self.layout.outputs.logits.as_ref();
        outputs.into_iter().find(|output| Some(name(output)) == wanted).ok_or_else(|| {
            let message =
                format!("layout `{}` names no output of logits that the program has", self.layout.name);
            Error::new(ErrorKind::Layout, message)
        })
    }

    /// The states' tensors as a cache of `seen` tokens.
    pub(crate) fn view(&self, tensors: Vec<Tensor>, seen: usize) -> Result<CacheView, Error> {
        let live = LiveRows::seen(seen);
        let view = CacheView::new(self.layout.clone(), self.model.cache.clone(), tensors, live)?;
        Ok(view.with_model(Some(self.model.clone())))
    }

    fn full(&self, tokens: usize) -> Error {
        let capacity = self.capacity;
        Error::new(
            ErrorKind::Capacity,
            format!("{tokens} tokens do not fit the decode package's context of {capacity}"),
        )
        .hint(format!("export with --kind decode --context {}", tokens.next_power_of_two()))
        .field("tokens", tokens)
        .field("capacity", capacity)
    }
}

/// A decode package on the CPU executor.
pub struct CpuDecode {
    facts: DecodeFacts,
    program: Executable,
    state: State,
    seen: usize,
}

impl CpuDecode {
    /// Opens a package that says of itself what its states are.
    ///
    /// # Errors
    ///
    /// When the package cannot be read or run, states neither its layout nor its model, or does not decode.
    pub fn open(path: &Path, options: &Options) -> Result<CpuDecode, Error> {
        let package = Arc::new(Package::open(path)?);
        let (layout, model) = agree(package.path(), package.metadata(), Stated::default())?;
        let facts = Facts::of(&package, layout.inputs.tokens.as_deref().unwrap_or_default());
        let states = |name: &str| program_states(&package, name);
        let (name, capacity) = decode_function(&facts, &layout, &model.cache, states)?;
        let program = Executable::load(package, &name, options)?;
        let state = program.new_state()?;
        Ok(CpuDecode { facts: DecodeFacts { model, layout, capacity }, program, state, seen: 0 })
    }
}

impl Decode for CpuDecode {
    fn engine(&self) -> &'static str {
        "cpu"
    }

    fn facts(&self) -> &DecodeFacts {
        &self.facts
    }

    fn tokens_seen(&self) -> usize {
        self.seen
    }

    fn clear(&mut self) -> Result<(), Error> {
        self.seen = 0;
        self.state = self.program.new_state()?;
        Ok(())
    }

    fn receive(&mut self, view: &CacheView, threads: &Threads) -> Result<HandoffReport, Error> {
        self.clear()?;
        let seen = self.facts.check_received(view)?;
        let mut targets = Vec::new();
        for (feature, bytes) in self.state.all_mut()? {
            if let (Some(dtype), Some(shape)) = (dtype(feature.ty.dtype), feature.ty.fixed_shape()) {
                let info = TensorInfo::contiguous(feature.name.clone(), dtype, &shape);
                targets.push(Target { info, bytes });
            }
        }
        let live = LiveRows::seen(seen);
        let (layout, cache) = (&self.facts.layout, &self.facts.model.cache);
        let wanted = Wanted { layout, cache, live: &live, rows: None, whole: &[] };
        // States are zeroed as they are made: rows that nothing fills are zero already.
        let filled = hand_off_to(view, &wanted, &mut targets, threads, HandoffOptions::default());
        match filled {
            Ok(filled) => {
                self.seen = seen;
                Ok(HandoffReport::of_fill(&filled, seen))
            }
            Err(error) => {
                self.clear()?;
                Err(error)
            }
        }
    }

    fn step(&mut self, token: u32) -> Result<Logits, Error> {
        let wanted: Vec<Input<'_>> =
            self.program.inputs().iter().map(|f| Input { name: &f.name, ty: &f.ty }).collect();
        let inputs = self.facts.inputs(&wanted, token, self.seen)?;
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        let outputs = self.program.run_with(&inputs, &mut self.state)?;
        self.seen += 1;
        let (name, array) = self.facts.logits(outputs, |(name, _)| name)?;
        let values = array.to_f32().ok_or_else(|| {
            Error::new(
                ErrorKind::Layout,
                format!("the output `{name}` has elements of type {}", array.dtype()),
            )
        })?;
        Ok(Logits { values })
    }

    fn cache(&mut self) -> Result<CacheView, Error> {
        let mut tensors = Vec::new();
        for feature in self.state.features() {
            tensors.extend(tensor(feature.name.clone(), &self.state.array(&feature.name)?));
        }
        self.facts.view(tensors, self.seen)
    }

    fn addresses(&self) -> Option<Vec<(usize, usize)>> {
        let bytes = self.state.features().filter(|f| f.ty.dtype == DataType::Float16);
        let places = bytes
            .filter_map(|f| self.state.bytes(&f.name).ok())
            .map(|bytes| (bytes.as_ptr().addr(), bytes.len()));
        Some(places.collect())
    }
}
