//! One package of a chain.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kvbaton_exec::{Array, Executable, Options, State};
use kvbaton_layout::{CacheSpec, Layout, ModelSpec, Sizes, TensorInfo};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::program::ValueType;
use kvbaton_mil::{FUNCTIONS_KEY, LAYOUT_KEY, PAST_KEY, Package};

use crate::chunks::Step;
use crate::cpu::{declared_model, past_inputs};
use crate::functions::{Facts, PrefillFunctions, check_declared, prefill_functions};
use crate::inputs::{self, Wanted};
use crate::tensors::tensor;
use crate::{Error, ErrorKind, FunctionInfo, Tensor};

/// A package, its layout and what it keeps.
pub(super) struct Stage {
    package: Arc<Package>,
    /// Names of its inputs and outputs, and what its tensors hold.
    pub(super) layout: Layout,
    pub(super) past: Option<Layout>,
    pub(super) functions: PrefillFunctions,
    /// The function to run, where the chain names one.
    function: Option<String>,
    loaded: BTreeMap<String, Executable>,
    state: Option<State>,
    /// Goes before the names of its tensors.
    prefix: String,
    options: Options,
}

/// What goes from package to package.
#[derive(Default)]
pub(super) struct Passed {
    hidden: Option<Array>,
    /// Everything that leaves the chain.
    pub(super) outputs: Vec<(String, Array)>,
}

impl Stage {
    pub(super) fn open(
        path: &Path,
        function: Option<String>,
        layout: Option<Layout>,
        options: &Options,
    ) -> Result<Stage, Error> {
        let package = Arc::new(Package::open(path)?);
        let declared = package.metadata().get(LAYOUT_KEY).map(|text| Layout::from_toml(text)).transpose()?;
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
        let past = package.metadata().get(PAST_KEY).map(|text| Layout::from_toml(text)).transpose()?;
        let functions = if package.metadata().contains_key(FUNCTIONS_KEY) && function.is_none() {
            let tokens_input = layout.inputs.tokens.as_deref().unwrap_or_default();
            let found = prefill_functions(&Facts::of(&package, tokens_input), tokens_input)?;
            check_declared(&package, &found, &layout.inputs, false)?;
            found
        } else {
            one_function(&package, function.as_deref(), &layout)?
        };
        let function = function.or_else(|| {
            let only = functions.whole.first().filter(|_| !package.metadata().contains_key(FUNCTIONS_KEY));
            only.map(|f| f.name.clone())
        });
        let (loaded, state, prefix) = (BTreeMap::new(), None, String::new());
        Ok(Stage {
            package,
            layout,
            past,
            functions,
            function,
            loaded,
            state,
            prefix,
            options: options.clone(),
        })
    }

    pub(super) fn path(&self) -> &Path {
        self.package.path()
    }

    pub(super) fn model(&self) -> Result<Option<ModelSpec>, Error> {
        declared_model(self.package.metadata())
    }

    /// Whether it has a part of the cache: outputs or states that its layout, or the chain's, speaks of.
    pub(super) fn has_cache(&self) -> bool {
        let name = self.function.as_deref().or_else(|| self.functions.whole.first().map(|f| f.name.as_str()));
        let states = self.package.function(name).is_ok_and(|f| !f.states.is_empty());
        states || !self.layout.tensors.is_empty()
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

    pub(super) fn load(&mut self, function: &str) -> Result<&Executable, Error> {
        let name = self.function_name(function).to_owned();
        if !self.loaded.contains_key(&name) {
            let mut executable = Executable::load(self.package.clone(), &name, &self.options)?;
            if let Some(other) = self.loaded.values().next() {
                executable = executable.sharing_memory_with(other);
            }
            self.loaded.insert(name.clone(), executable);
        }
        Ok(&self.loaded[&name])
    }

    pub(super) fn past_inputs(&mut self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        past_inputs(self.load(function)?, names)
    }

    /// The rows that its states hold, if it has any.
    pub(super) fn state_rows(&mut self, layout: &Layout, cache: &CacheSpec) -> Result<Option<usize>, Error> {
        let prefix = self.prefix.clone();
        let name = self.functions.whole.first().map_or_else(String::new, |f| f.name.clone());
        let executable = self.load(&name)?;
        let Some(first) = executable.states().first() else { return Ok(None) };
        let named = format!("{prefix}{}", first.name);
        let shape = first.ty.fixed_shape().unwrap_or_default();
        // One of its dimensions is the capacity: with it the layout gives the state this very shape.
        let rows = shape.iter().copied().find(|&capacity| {
            let dtype = kvbaton_layout::DType::Float16;
            let sizes = Sizes { capacity, dtype, block_rows: 16, row_stride_bytes: None };
            let tensors = layout.tensors(cache, &sizes).unwrap_or_default();
            tensors.iter().any(|t| t.name == named && t.shape == shape)
        });
        // What the layout cannot tell is bounded by the state itself.
        Ok(Some(rows.unwrap_or_else(|| shape.iter().rev().nth(1).copied().unwrap_or(0))))
    }

    /// Empties its states.
    pub(super) fn clear(&mut self) -> Result<(), Error> {
        self.state = None;
        Ok(())
    }

    /// Its states as tensors of a cache.
    pub(super) fn state_tensors(&self) -> Result<Vec<Tensor>, Error> {
        let Some(state) = &self.state else { return Ok(Vec::new()) };
        let mut tensors = Vec::new();
        for feature in state.features() {
            let name = format!("{}{}", self.prefix, feature.name);
            tensors.extend(tensor(name, &state.array(&feature.name)?));
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
        let one_row = self.takes_one_row();
        let layout = self.layout.clone();
        let prefix = self.prefix.clone();
        self.load(&step.function)?;
        let executable = &self.loaded[self.function_name(&step.function)];
        let wanted: Vec<Wanted<'_>> =
            executable.inputs().iter().map(|f| Wanted { name: &f.name, ty: &f.ty }).collect();
        let mut given: Vec<(String, Array)> =
            past.iter().filter(|(name, _)| wanted.iter().any(|w| w.name == name)).cloned().collect();
        if let (Some(name), Some(hidden)) = (&layout.inputs.hidden, passed.hidden.take()) {
            let hidden = if one_row { row(&hidden, tokens.len() - 1)? } else { hidden };
            given.push((name.clone(), hidden));
        }
        let length = if one_row { 1 } else { step.length };
        let own = if one_row { &tokens[tokens.len() - 1..] } else { tokens };
        let inputs = inputs::build_after(&layout, &wanted, own, length, step.first, &given)?;
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        let outputs = if executable.states().is_empty() {
            executable.run(&inputs)?
        } else {
            if self.state.is_none() {
                self.state = Some(executable.new_state()?);
            }
            let state = self.state.as_mut().expect("made above");
            executable.run_with(&inputs, state)?
        };
        for (name, array) in outputs {
            if Some(&name) == layout.outputs.hidden.as_ref() {
                passed.hidden = Some(array);
            } else if Some(&name) == layout.outputs.logits.as_ref() {
                passed.outputs.push((name, array));
            } else {
                passed.outputs.push((format!("{prefix}{name}"), array));
            }
        }
        Ok(())
    }
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
    package: &Package,
    function: Option<&str>,
    layout: &Layout,
) -> Result<PrefillFunctions, Error> {
    let found = package.function(function)?;
    let input = |name: &Option<String>| {
        let name = name.as_ref()?;
        let value = found.inputs.iter().map(|&id| found.value(id)).find(|v| v.name == *name)?;
        match &value.ty {
            ValueType::Tensor(ty) => ty.fixed_shape(),
            _ => None,
        }
    };
    let names = &layout.inputs;
    let tokens = match (input(&names.tokens).as_deref(), input(&names.hidden).as_deref()) {
        (Some([1, tokens]), _) | (_, Some([1, tokens, _])) => *tokens,
        _ => {
            let message = format!(
                "`{}`: function `{}` has neither tokens of shape (1, S) nor hidden states of shape (1, S, hidden)",
                package.path().display(),
                found.name
            );
            return Err(Error::new(ErrorKind::Layout, message)
                .hint("name them in the stage's layout: [inputs] tokens or hidden"));
        }
    };
    let whole = vec![FunctionInfo { name: found.name.clone(), tokens }];
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
