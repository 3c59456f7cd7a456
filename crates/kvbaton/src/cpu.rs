//! Prefill on the CPU: the package's program, run by `kvbaton-exec`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvbaton_exec::{Array, Executable, Options, State};
use kvbaton_layout::{Layout, LiveRows, ModelSpec, Placement, TensorInfo};
use kvbaton_mil::{LAYOUT_KEY, MODEL_KEY, PAST_KEY, Package};

use crate::activations::{Activations, Collector, Rows};
use crate::chunks::{Chain, ChunkTime, RunStep, Step, steps};
use crate::compatible::check_vocabulary;
use crate::functions::{Facts, PrefillFunctions, check_declared, prefill_functions, program_inputs};
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
    options: Options,
    /// What the steps of a run reach, while somebody asks for it.
    watched: Option<Activations>,
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
        let (layout, model) = agree(package.path(), package.metadata(), stated)?;
        let tokens_input = input_name(layout.inputs.tokens.as_deref(), "tokens")?;
        let facts = Facts::of(&package, tokens_input);
        let functions = prefill_functions(&facts, tokens_input)?;
        check_declared(&facts, &functions, &layout.inputs, true, |f| program_inputs(&package, f))?;
        let past = package.metadata().get(PAST_KEY).map(|text| Layout::from_toml(text)).transpose()?;
        let (loaded, chunk_times) = (BTreeMap::new(), Vec::new());
        let (options, watched) = (Options::with_threads(threads), None);
        Ok(CpuPrefill { package, model, layout, functions, past, chunk_times, loaded, options, watched })
    }

    /// With other options; functions that are loaded already are loaded again.
    #[must_use]
    pub fn with_options(mut self, options: Options) -> CpuPrefill {
        self.options = options;
        self.loaded.clear();
        self
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

    /// Bytes that the functions loaded so far take together, as computed when they were loaded; `None` when one of
    /// them could not say. Weights that functions share count once.
    pub fn computed_bytes(&self) -> Option<u64> {
        let (mut shared, mut own) = (0, 0);
        for executable in self.loaded.values() {
            let footprint = executable.footprint()?;
            shared = shared.max(footprint.mapped_bytes + footprint.weight_bytes);
            own += footprint.activation_bytes + footprint.output_bytes + footprint.state_bytes;
        }
        Some(shared + own)
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
        let (rows, model, threads) = (self.layout.clone(), self.model.clone(), self.options.threads);
        let chain = Chain { rows: &rows, past: &past, model: &model, threads };
        let done = chain.run(self, &steps, tokens, sink.unwrap_or(&mut |_, _| Ok(())))?;
        self.chunk_times = done.times;
        let report = PrefillReport::new(
            self.engine(),
            steps.last().map_or_else(String::new, |s| s.function.clone()),
            tokens.len(),
            done.seconds,
        );
        Ok(Prefilled { cache: done.cache, logits: done.logits, report })
    }

    /// Prefills with one function.
    fn whole(&mut self, tokens: &[u32], step: &Step) -> Result<Prefilled, Error> {
        let layout = self.layout.clone();
        let executable = self.load(&step.function)?;
        let length = shortest(executable, layout.inputs.tokens.as_deref(), tokens.len(), step.length);
        let step = &Step { length, ..step.clone() };
        let features = executable.inputs();
        let types: Vec<_> = features.iter().map(|f| inputs::for_length(&f.ty, length)).collect();
        let wanted: Vec<Wanted<'_>> =
            features.iter().zip(&types).map(|(f, ty)| Wanted { name: &f.name, ty }).collect();
        let inputs = inputs::build(&layout, &wanted, tokens, length)?;
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        let start = Instant::now();
        let mut state = executable.new_state()?;
        let pad = (layout.placement == Placement::LeftPadded).then(|| step.length - tokens.len());
        let live = pad.unwrap_or(0)..pad.unwrap_or(0) + tokens.len();
        let mut outputs = self.execute(step, &inputs, live, &mut state)?;
        let seconds = start.elapsed().as_secs_f64();
        // A stateful program leaves its cache there.
        for feature in self.loaded[&step.function].states() {
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
        let live = LiveRows { pad, ..LiveRows::seen(tokens.len()) };
        let cache = CacheView::new(self.layout.clone(), self.model.cache.clone(), tensors, live)?
            .with_model(Some(self.model.clone()))
            .with_tokens(tokens.to_vec());
        let report = PrefillReport::new(self.engine(), step.function.clone(), tokens.len(), seconds);
        Ok(Prefilled { cache, logits, report })
    }

    /// Runs a loaded function; shows every result to the one who asked what a prompt reaches.
    fn execute(
        &mut self,
        step: &Step,
        inputs: &[(&str, Array)],
        live: Range<usize>,
        state: &mut State,
    ) -> Result<Vec<(String, Array)>, Error> {
        let executable = &self.loaded[&step.function];
        let Some(watched) = &mut self.watched else { return Ok(executable.run_with(inputs, state)?) };
        let program = self.package.function(Some(&step.function))?;
        let numerics = self.options.numerics.name();
        let rows = Rows { all: step.length, live, first: step.first };
        let mut collector = Collector::new(&self.package, program, &self.layout.inputs, numerics, rows);
        let outputs = executable.run_observed(inputs, state, &mut |observed| collector.see(&observed))?;
        watched.merge(collector.finish());
        Ok(outputs)
    }

    fn load(&mut self, function: &str) -> Result<&Executable, Error> {
        if !self.loaded.contains_key(function) {
            // Other functions keep their buffers; weights are shared.
            let held: u64 =
                self.loaded.values().filter_map(Executable::footprint).map(|f| f.activation_bytes).sum();
            let limit = self.options.max_memory.map(|limit| limit.saturating_sub(held));
            let options = self.options.clone().with_max_memory(limit);
            let mut executable = Executable::load(self.package.clone(), function, &options)?;
            if let Some(other) = self.loaded.values().next() {
                executable = executable.sharing_memory_with(other);
            }
            self.loaded.insert(function.to_owned(), executable);
        }
        Ok(&self.loaded[function])
    }
}

/// The fewest tokens, at least as many as the prompt has, that a function takes; programs of ranged or enumerated shapes
/// take several numbers of them.
fn shortest(executable: &Executable, tokens_input: Option<&str>, prompt: usize, longest: usize) -> usize {
    let features = executable.inputs().iter().zip(executable.input_shapes());
    let shapes = features.filter(|(feature, _)| Some(feature.name.as_str()) == tokens_input).map(|(_, s)| s);
    let mut allowed = shapes.flat_map(|shapes| (prompt..longest).filter(|&n| shapes.allow(&[1, n])));
    allowed.next().unwrap_or(longest)
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
pub(crate) fn agree(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    stated: Stated,
) -> Result<(Layout, ModelSpec), Error> {
    let missing = |what: &str, key: &str, hint: &str| {
        let path = path.display();
        let message = format!("`{path}` does not state its {what}: the metadata key `{key}` is missing");
        Error::new(ErrorKind::Layout, message)
            .hint(format!("{hint}; `kvbaton inspect` shows what it holds"))
            .field("key", key)
    };
    let declared = metadata.get(LAYOUT_KEY).map(|text| Layout::from_toml(text)).transpose()?;
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
    let model = match (declared_model(metadata)?, stated.model) {
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

pub(crate) fn declared_model(metadata: &BTreeMap<String, String>) -> Result<Option<ModelSpec>, Error> {
    let Some(text) = metadata.get(MODEL_KEY) else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|e| {
        let message = format!("the package's metadata key `{MODEL_KEY}` cannot be read: {e}");
        Error::new(ErrorKind::Package, message)
    })
}

pub(crate) fn input_name<'a>(name: Option<&'a str>, role: &str) -> Result<&'a str, Error> {
    name.ok_or_else(|| {
        Error::new(ErrorKind::Layout, format!("the layout does not name the program's {role} input"))
            .hint(format!("add `{role} = \"…\"` to its [inputs] table"))
    })
}

impl RunStep for CpuPrefill {
    fn past_inputs(&mut self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        let inputs = self.load(function)?.inputs().iter().filter(|f| names.contains(&f.name));
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
        let mut state = executable.new_state()?;
        self.execute(step, &inputs, 0..tokens.len(), &mut state)
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

    fn chunk_times(&self) -> &[ChunkTime] {
        &self.chunk_times
    }

    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        self.run(tokens, Some(sink))
    }

    fn activations(&mut self, tokens: &[u32]) -> Result<Activations, Error> {
        self.watched = Some(Activations::none(self.options.numerics.name()));
        let ran = self.run(tokens, None);
        let watched = self.watched.take();
        ran.map(|_| watched.unwrap_or_else(|| Activations::none(self.options.numerics.name())))
    }
}
