//! Prefill on the CPU: the package's program, run by `kvbaton-exec`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvbaton_exec::{Array, Executable, Options};
use kvbaton_layout::{Layout, LiveRows, ModelSpec, Placement, TensorInfo};
use kvbaton_mil::{LAYOUT_KEY, MODEL_KEY, PAST_KEY, Package};

use crate::chunks::{Chain, ChunkTime, RunStep, Step, steps};
use crate::functions::{PrefillFunctions, prefill_functions};
use crate::inputs::{self, Wanted};
use crate::prefill::ChunkSink;
use crate::report::PrefillReport;
use crate::tensors::{dtype, tensor};
use crate::{CacheView, Error, ErrorKind, FunctionInfo, Logits, Prefill, Prefilled};

/// A package on the CPU executor.
pub struct CpuPrefill {
    package: Arc<Package>,
    model: ModelSpec,
    layout: Layout,
    functions: PrefillFunctions,
    /// The layout of the cache so far, where functions take one.
    past: Option<Layout>,
    chunk_times: Vec<ChunkTime>,
    loaded: BTreeMap<String, Executable>,
    threads: usize,
}

impl CpuPrefill {
    /// Opens a package that says of itself what its cache is. `threads` 0 takes all cores.
    ///
    /// # Errors
    ///
    /// When the package cannot be read, or does not state its layout and model.
    pub fn open(path: &Path, threads: usize) -> Result<CpuPrefill, Error> {
        CpuPrefill::open_stated(path, threads, Stated::default())
    }

    /// Opens a package of which the caller says what the package does not.
    ///
    /// # Errors
    ///
    /// When the package cannot be read, when nobody states its layout or its model, or when both the package
    /// and the caller do and disagree.
    pub fn open_stated(path: &Path, threads: usize, stated: Stated) -> Result<CpuPrefill, Error> {
        let package = Arc::new(Package::open(path)?);
        let (layout, model) = agree(&package, stated)?;
        input_name(layout.inputs.tokens.as_deref(), "tokens")?;
        let functions = prefill_functions(&package, &layout.inputs)?;
        let past = package.metadata().get(PAST_KEY).map(|text| Layout::from_toml(text)).transpose()?;
        let (loaded, chunk_times) = (BTreeMap::new(), Vec::new());
        Ok(CpuPrefill { package, model, layout, functions, past, chunk_times, loaded, threads })
    }

    /// The package.
    pub fn package(&self) -> &Package {
        &self.package
    }

    /// The most bytes that activations of the functions for `tokens` tokens take, weights not counted.
    ///
    /// # Errors
    ///
    /// As [`Prefill::prepare`].
    pub fn peak_bytes(&mut self, tokens: usize) -> Result<u64, Error> {
        let mut most = 0;
        for step in steps(&self.functions, tokens)? {
            most = most.max(self.load(&step.function)?.peak_bytes());
        }
        Ok(most)
    }

    /// The most tokens that it takes: those of its longest function, or rows of its largest context.
    pub fn longest_prompt(&self) -> usize {
        let whole = self.functions.whole.last().map_or(0, |f| f.tokens);
        self.functions.chunks.last().map_or(whole, |f| f.context.max(whole))
    }

    /// Tokens of a chunk and rows of the largest context, where prompts may take several chunks.
    pub fn chunks(&self) -> Option<(usize, usize)> {
        self.functions.chunks.last().map(|f| (f.tokens, f.context))
    }

    /// What each chunk of the last prefill cost; nothing if it took one function.
    pub fn chunk_times(&self) -> &[ChunkTime] {
        &self.chunk_times
    }

    /// Prefills in one or several steps, and tells `sink` of each one's rows.
    fn run(&mut self, tokens: &[u32], sink: Option<&mut ChunkSink<'_>>) -> Result<Prefilled, Error> {
        let steps = steps(&self.functions, tokens.len())?;
        check_vocabulary(tokens, self.model.vocab_size)?;
        self.chunk_times.clear();
        let one = steps.iter().all(|s| s.context.is_none());
        let Some(past) = self.past.clone().filter(|_| !one) else {
            let done = self.whole(tokens, &steps[0])?;
            if let Some(sink) = sink {
                sink(&done.cache, 0..i64::try_from(tokens.len()).unwrap_or(i64::MAX))?;
            }
            return Ok(done);
        };
        let (rows, model, threads) = (self.layout.clone(), self.model.clone(), self.threads);
        let chain = Chain { rows: &rows, past: &past, model: &model, threads };
        let done = chain.run(self, &steps, tokens, sink.unwrap_or(&mut |_, _| Ok(())))?;
        self.chunk_times = done.times;
        let report = PrefillReport {
            engine: self.engine().to_owned(),
            function: steps.last().map_or_else(String::new, |s| s.function.clone()),
            tokens: tokens.len(),
            seconds: done.seconds,
            tokens_per_second: tokens.len() as f64 / done.seconds,
        };
        Ok(Prefilled { cache: done.cache, logits: done.logits, report })
    }

    /// Prefills with one function.
    fn whole(&mut self, tokens: &[u32], step: &Step) -> Result<Prefilled, Error> {
        let layout = self.layout.clone();
        let executable = self.load(&step.function)?;
        let wanted: Vec<Wanted<'_>> =
            executable.inputs().iter().map(|f| Wanted { name: &f.name, ty: &f.ty }).collect();
        let inputs = inputs::build(&layout, &wanted, tokens, step.length)?;
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        let start = Instant::now();
        let mut state = executable.new_state()?;
        let mut outputs = executable.run_with(&inputs, &mut state)?;
        let seconds = start.elapsed().as_secs_f64();
        // A stateful program leaves its cache there.
        for feature in executable.states() {
            outputs.push((feature.name.clone(), state.array(&feature.name)?));
        }

        let logits_name = self.layout.outputs.logits.clone();
        let mut tensors = Vec::new();
        let mut logits = None;
        for (name, array) in outputs {
            if Some(&name) == logits_name.as_ref() {
                logits = array.to_f32().map(|values| Logits { values });
            } else if let Some(tensor) = tensor(name, &array) {
                tensors.push(tensor);
            }
        }
        let pad = (layout.placement == Placement::LeftPadded).then(|| step.length - tokens.len());
        let live = LiveRows { pad, ..LiveRows::seen(tokens.len()) };
        let cache = CacheView::new(self.layout.clone(), self.model.cache.clone(), tensors, live)?
            .with_model(Some(self.model.clone()))
            .with_tokens(tokens.to_vec());
        let report = PrefillReport {
            engine: self.engine().to_owned(),
            function: step.function.clone(),
            tokens: tokens.len(),
            seconds,
            tokens_per_second: tokens.len() as f64 / seconds,
        };
        Ok(Prefilled { cache, logits, report })
    }

    fn load(&mut self, function: &str) -> Result<&Executable, Error> {
        if !self.loaded.contains_key(function) {
            let options = Options::with_threads(self.threads);
            let mut executable = Executable::load(self.package.clone(), function, &options)?;
            if let Some(other) = self.loaded.values().next() {
                executable = executable.sharing_memory_with(other);
            }
            self.loaded.insert(function.to_owned(), executable);
        }
        Ok(&self.loaded[function])
    }
}

/// What a caller says of a package.
#[derive(Clone, Debug, Default)]
pub struct Stated {
    /// The layout of its cache.
    pub layout: Option<Layout>,
    /// The model it was made from.
    pub model: Option<ModelSpec>,
}

/// The layout and the model of a package, from its metadata or from the caller; both must agree where both speak.
pub(crate) fn agree(package: &Package, stated: Stated) -> Result<(Layout, ModelSpec), Error> {
    let missing = |what: &str, key: &str, hint: &str| {
        let path = package.path().display();
        let message = format!("`{path}` does not state its {what}: the metadata key `{key}` is missing");
        Error::new(ErrorKind::Layout, message)
            .hint(format!("{hint}; `kvbaton inspect` shows what it holds"))
            .field("key", key)
    };
    let declared = package.metadata().get(LAYOUT_KEY).map(|text| Layout::from_toml(text)).transpose()?;
    let layout = match (declared, stated.layout) {
        (Some(own), Some(said)) if own.tensors != said.tensors || own.placement != said.placement => {
            let message =
                format!("the package declares the layout `{}`, the caller says `{}`", own.name, said.name);
            return Err(Error::new(ErrorKind::Layout, message)
                .hint("leave --layout out, or export the package again")
                .field("package", own.to_toml())
                .field("caller", said.to_toml()));
        }
        (Some(own), _) => own,
        (None, Some(said)) => said,
        (None, None) => return Err(missing("layout", LAYOUT_KEY, "say it with --layout NAME|FILE.toml")),
    };
    let model = match (declared_model(package)?, stated.model) {
        (Some(own), Some(said)) => match own.differences(&said).first() {
            Some(first) => {
                let message = format!("the package's model is not the one that the caller names: {first}");
                return Err(Error::new(ErrorKind::Incompatible, message));
            }
            None => own,
        },
        (Some(own), None) => own,
        (None, Some(said)) => said,
        (None, None) => {
            return Err(missing("model", MODEL_KEY, "name the folder it was made from with --model DIR"));
        }
    };
    Ok((layout, model))
}

pub(crate) fn declared_model(package: &Package) -> Result<Option<ModelSpec>, Error> {
    let Some(text) = package.metadata().get(MODEL_KEY) else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|e| {
        let message = format!("the package's metadata key `{MODEL_KEY}` cannot be read: {e}");
        Error::new(ErrorKind::Package, message)
    })
}

fn input_name<'a>(name: Option<&'a str>, role: &str) -> Result<&'a str, Error> {
    name.ok_or_else(|| {
        Error::new(ErrorKind::Layout, format!("the layout does not name the program's {role} input"))
            .hint(format!("add `{role} = \"…\"` to its [inputs] table"))
    })
}

/// Refuses ids that the model has no embedding for.
pub(crate) fn check_vocabulary(tokens: &[u32], vocab: usize) -> Result<(), Error> {
    match tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
        None => Ok(()),
        Some((at, &id)) => Err(Error::new(
            ErrorKind::Usage,
            format!("token {id} at position {at} is not in the vocabulary of {vocab}"),
        )
        .field("token", id)
        .field("position", at)
        .field("vocab_size", vocab)),
    }
}

/// The inputs of a loaded function that hold the cache so far.
pub(crate) fn past_inputs(executable: &Executable, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
    let inputs = executable.inputs().iter().filter(|f| names.contains(&f.name));
    inputs
        .map(|f| match (dtype(f.ty.dtype), f.ty.fixed_shape()) {
            (Some(dtype), Some(shape)) => Ok(TensorInfo::contiguous(f.name.clone(), dtype, &shape)),
            _ => Err(Error::new(
                ErrorKind::Layout,
                format!("the program's input `{}` is {}: it cannot hold a cache", f.name, f.ty),
            )),
        })
        .collect()
}

impl RunStep for CpuPrefill {
    fn past_inputs(&mut self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        past_inputs(self.load(function)?, names)
    }

    fn run_step(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<(String, Array)>, Error> {
        let layout = self.layout.clone();
        let executable = self.load(&step.function)?;
        let wanted: Vec<Wanted<'_>> =
            executable.inputs().iter().map(|f| Wanted { name: &f.name, ty: &f.ty }).collect();
        let inputs = inputs::build_after(&layout, &wanted, tokens, step.length, step.first, past)?;
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        Ok(executable.run(&inputs)?)
    }
}

impl Prefill for CpuPrefill {
    fn engine(&self) -> &'static str {
        "cpu"
    }

    fn functions(&self) -> &[FunctionInfo] {
        &self.functions.whole
    }

    fn model(&self) -> Option<&ModelSpec> {
        Some(&self.model)
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        for step in steps(&self.functions, tokens)? {
            self.load(&step.function)?;
        }
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        self.run(tokens, None)
    }

    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        self.run(tokens, Some(sink))
    }
}
