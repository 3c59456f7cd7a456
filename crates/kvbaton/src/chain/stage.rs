//! One package of a chain.

use std::path::Path;

use kvbaton_exec::Array;
use kvbaton_layout::{CacheSpec, Layout, ModelSpec, Sizes, TensorInfo};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::{FUNCTIONS_KEY, LAYOUT_KEY, PAST_KEY};
use kvbaton_runtime::{CompiledFeature, Loaded};

use super::engine::{Left, StageEngine};
use crate::chunks::Step;
use crate::cpu::declared_model;
use crate::described::Described;
use crate::engine::file_name;
use crate::functions::{PrefillFunctions, check_declared, function_length, prefill_functions};
use crate::inputs::{self, Wanted};
use crate::{Error, ErrorKind, FunctionInfo, Tensor};

/// A package, its layout and what runs it.
pub(super) struct Stage {
    engine: Box<dyn StageEngine>,
    /// Names of its inputs and outputs, and what its tensors hold.
    pub(super) layout: Layout,
    pub(super) past: Option<Layout>,
    pub(super) functions: PrefillFunctions,
    /// The function to run, where the chain names one.
    function: Option<String>,
    /// Goes before the names of its tensors.
    prefix: String,
}

/// What goes from package to package.
#[derive(Default)]
pub(super) struct Passed {
    hidden: Option<Left>,
    /// Everything that leaves the chain.
    pub(super) outputs: Vec<Left>,
}

impl Stage {
    pub(super) fn open(
        engine: Box<dyn StageEngine>,
        function: Option<String>,
        layout: Option<Layout>,
    ) -> Result<Stage, Error> {
        let described = engine.described();
        let (path, metadata) = (&described.path, &described.metadata);
        let declared = metadata.get(LAYOUT_KEY).map(|text| Layout::from_toml(text)).transpose()?;
        let layout = match (declared, layout) {
            (Some(own), Some(said)) if own != said => {
                let message = format!(
                    "`{}` declares the layout `{}`, the chain says `{}`",
                    path.display(),
                    own.name,
                    said.name
                );
                return Err(Error::new(ErrorKind::Layout, message)
                    .hint("leave the stage's layout out")
                    .field("package", own.to_toml())
                    .field("chain", said.to_toml()));
            }
            (Some(layout), _) | (None, Some(layout)) => layout,
            (None, None) => {
                let message = format!("`{}` does not state its layout", path.display());
                return Err(Error::new(ErrorKind::Layout, message)
                    .hint("say it in the chain: `layout` of its [[stage]]")
                    .field("key", LAYOUT_KEY));
            }
        };
        let past = metadata.get(PAST_KEY).map(|text| Layout::from_toml(text)).transpose()?;
        let says_functions = metadata.contains_key(FUNCTIONS_KEY);
        let functions = if says_functions && function.is_none() {
            let tokens_input = layout.inputs.tokens.as_deref().unwrap_or_default();
            let facts = described.facts(tokens_input);
            let found = prefill_functions(&facts, tokens_input)?;
            check_declared(&facts, &found, &layout.inputs, false, |f| input_shapes(described, f))?;
            found
        } else {
            one_function(described, function.as_deref(), &layout)?
        };
        let only = functions.whole.first().filter(|_| !says_functions).map(|f| f.name.clone());
        Ok(Stage { layout, past, functions, function: function.or(only), prefix: String::new(), engine })
    }

    pub(super) fn path(&self) -> &Path {
        &self.engine.described().path
    }

    pub(super) fn engine(&self) -> &'static str {
        self.engine.name()
    }

    pub(super) fn model(&self) -> Result<Option<ModelSpec>, Error> {
        declared_model(&self.engine.described().metadata)
    }

    /// Whether it has a part of the cache: outputs or states that its layout, or the chain's, speaks of.
    pub(super) fn has_cache(&self) -> bool {
        !self.states().is_empty() || !self.layout.tensors.is_empty()
    }

    /// Names its tensors as those of the `n`-th package with a cache.
    pub(super) fn name_tensors(&mut self, n: usize) {
        self.prefix = format!("{n}/");
    }

    /// Whether it takes hidden states of one row, whatever the prompt's length: a head of its own.
    pub(super) fn takes_one_row(&self) -> bool {
        self.layout.inputs.tokens.is_none()
            && self.functions.chunks.is_empty()
            && self.functions.whole.iter().all(|f| f.tokens == 1)
    }

    fn function_name<'a>(&'a self, asked: &'a str) -> &'a str {
        self.function.as_deref().unwrap_or(asked)
    }

    pub(super) fn load(&mut self, function: &str) -> Result<(), Error> {
        let name = self.function_name(function).to_owned();
        self.engine.load(&name)
    }

    /// For which units a step's function was loaded, where the engine has units.
    pub(super) fn loaded(&self, function: &str) -> Option<&Loaded> {
        self.engine.loaded(self.function_name(function))
    }

    /// Adds what there is to know of how a step's function was loaded.
    pub(super) fn notes(&self, function: &str, notes: &mut Vec<String>) {
        let own = self.loaded(function).into_iter().flat_map(|l| &l.notes);
        notes.extend(own.map(|note| format!("{}: {note}", file_name(self.path()))));
    }

    pub(super) fn settle(&mut self) {
        self.engine.settle();
    }

    pub(super) fn past_inputs(&self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        self.engine.described().past_inputs(self.function_name(function), names)
    }

    /// The states that its functions have.
    fn states(&self) -> &[CompiledFeature] {
        let name = self.function.as_deref().or_else(|| self.functions.whole.first().map(|f| f.name.as_str()));
        self.engine.described().function(name).map_or(&[], |(_, f)| &f.states)
    }

    /// The rows that its states hold, if it has any.
    pub(super) fn state_rows(&self, layout: &Layout, cache: &CacheSpec) -> Option<usize> {
        let CompiledFeature { name, shape, .. } = self.states().first()?;
        let named = format!("{}{name}", self.prefix);
        // One of its dimensions is the capacity: with it the layout gives the state this very shape.
        let rows = shape.iter().copied().find(|&capacity| {
            let dtype = kvbaton_layout::DType::Float16;
            let sizes = Sizes { capacity, dtype, block_rows: 16, row_stride_bytes: None };
            let tensors = layout.tensors(cache, &sizes).unwrap_or_default();
            tensors.iter().any(|t| t.name == named && t.shape == *shape)
        });
        // What the layout cannot tell is bounded by the state itself.
        Some(rows.unwrap_or_else(|| shape.iter().rev().nth(1).copied().unwrap_or(0)))
    }

    /// Empties its states.
    pub(super) fn clear(&mut self) {
        self.engine.clear();
    }

    /// Its states as tensors of a cache.
    pub(super) fn state_tensors(&mut self, function: &str) -> Result<Vec<Tensor>, Error> {
        let name = self.function_name(function).to_owned();
        let mut tensors = self.engine.states(&name)?;
        for tensor in &mut tensors {
            tensor.info.name = format!("{}{}", self.prefix, tensor.info.name);
        }
        Ok(tensors)
    }

    /// Runs one step, takes what the package before has left, and leaves its own.
    pub(super) fn run(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
        passed: &mut Passed,
    ) -> Result<(), Error> {
        let function = self.function_name(&step.function).to_owned();
        let inputs = self.inputs(&function, step, tokens, past, passed.hidden.take())?;
        let names = &self.layout.outputs;
        for left in self.engine.run(&function, inputs)? {
            let is = |name: &Option<String>| name.as_deref() == Some(left.name());
            if is(&names.hidden) {
                passed.hidden = Some(left);
            } else if is(&names.logits) {
                passed.outputs.push(left);
            } else {
                let name = format!("{}{}", self.prefix, left.name());
                passed.outputs.push(left.named(name));
            }
        }
        Ok(())
    }

    /// What a function takes at a step.
    fn inputs(
        &self,
        function: &str,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
        hidden: Option<Left>,
    ) -> Result<Vec<(String, Array)>, Error> {
        let types = self.engine.described().inputs(function);
        let wanted: Vec<Wanted<'_>> = types.iter().map(|(name, ty)| Wanted { name, ty }).collect();
        let mut given: Vec<(String, Array)> =
            past.iter().filter(|(name, _)| wanted.iter().any(|w| w.name == name)).cloned().collect();
        let one_row = self.takes_one_row();
        if let (Some(name), Some(hidden)) = (&self.layout.inputs.hidden, hidden) {
            let (_, hidden) = hidden.array()?;
            given.push((name.clone(), if one_row { row(&hidden, tokens.len() - 1)? } else { hidden }));
        }
        let (own, length) = if one_row { (&tokens[tokens.len() - 1..], 1) } else { (tokens, step.length) };
        inputs::build_after(&self.layout, &wanted, own, length, step.first, &given)
    }
}

/// Names and shapes of a function's inputs.
fn input_shapes(described: &Described, function: &str) -> Vec<(String, Vec<usize>)> {
    let inputs = described.functions.get(function).into_iter().flat_map(|f| &f.inputs);
    inputs.map(|i| (i.name.clone(), i.shape.clone())).collect()
}

/// Row `index` of hidden states `(1, S, hidden)`.
fn row(hidden: &Array, index: usize) -> Result<Array, Error> {
    let [1, rows, width] = hidden.shape() else {
        let message = format!("hidden states are (1, S, hidden), these are {:?}", hidden.shape());
        return Err(Error::new(ErrorKind::Layout, message));
    };
    let size = hidden.bytes().len() / rows.max(&1);
    let bytes = Bytes::new(Buffer::copy_of(&hidden.bytes()[index * size..(index + 1) * size]));
    Ok(Array::new(hidden.dtype(), vec![1, 1, *width], bytes)?)
}

/// The one function of a package that does not say what its functions are.
fn one_function(
    described: &Described,
    function: Option<&str>,
    layout: &Layout,
) -> Result<PrefillFunctions, Error> {
    let (name, _) = described.function(function)?;
    let tokens = function_length(&layout.inputs, &input_shapes(described, name)).ok_or_else(|| {
        let message = format!(
            "`{}`: function `{name}` has neither tokens of shape (1, S) nor hidden states of shape (1, S, hidden)",
            described.path.display(),
        );
        Error::new(ErrorKind::Layout, message)
            .hint("name them in the stage's layout: [inputs] tokens or hidden")
    })?;
    let whole = vec![FunctionInfo { name: name.to_owned(), tokens }];
    Ok(PrefillFunctions { whole, chunks: Vec::new() })
}

/// The first package takes tokens, every other one what the one before it leaves.
pub(super) fn check_passing(stages: &[Stage]) -> Result<(), Error> {
    let wrong = |stage: &Stage, what: &str| {
        let message = format!("`{}` {what}", stage.path().display());
        Error::new(ErrorKind::Package, message)
            .hint("packages are in the order in which a prompt passes them")
    };
    for (i, stage) in stages.iter().enumerate() {
        let names = &stage.layout;
        match i {
            0 if names.inputs.tokens.is_none() => {
                return Err(wrong(stage, "is first in its chain and takes no tokens"));
            }
            0 => {}
            _ if names.inputs.hidden.is_none() => {
                return Err(wrong(stage, "takes no hidden states, and is not the first in its chain"));
            }
            _ if stages[i - 1].layout.outputs.hidden.is_none() => {
                return Err(wrong(
                    &stages[i - 1],
                    "leaves no hidden states, and is not the last in its chain",
                ));
            }
            _ => {}
        }
    }
    Ok(())
}
