//! Prefill by several packages, one after the other: a model whose layers are split over them.
//!
//! `file` reads the chain's own file, `stage` is one package of it, `engine` what runs that. See `docs/chains.md`.

use std::path::{Path, PathBuf};

use kvbaton_exec::{Array, Options};
use kvbaton_layout::{Layout, LiveRows, ModelSpec, TensorInfo};
use kvbaton_runtime::{Runtime, Session, Units};

mod engine;
mod file;
mod stage;
#[cfg(test)]
mod tests;

use crate::chunks::{Chain, ChunkTime, RunStep, Step, steps};
use crate::compatible::check_vocabulary;
use crate::cpu::Stated;
use crate::functions::{ChunkFunction, PrefillFunctions};
use crate::prefill::{ChunkSink, too_long};
use crate::report::PrefillReport;
use crate::{CacheView, Error, ErrorKind, FunctionInfo, Prefill, Prefilled};
use engine::{CpuStage, Left, RuntimeStage, StageEngine};
pub use file::{ChainFile, StageFile, StatedLayout};
use stage::{Passed, Stage};

/// The chain's file that a path names, itself or by its folder.
pub fn chain_file(path: &Path) -> Option<PathBuf> {
    if path.is_dir() {
        return Some(path.join("chain.toml")).filter(|inside| inside.is_file());
    }
    path.extension().is_some_and(|e| e == "toml").then(|| path.to_owned())
}

/// A chain of packages, all of them on one engine.
pub struct ChainPrefill {
    stages: Vec<Stage>,
    model: ModelSpec,
    layout: Layout,
    past: Option<Layout>,
    functions: PrefillFunctions,
    /// Whether the packages keep the cache in states: the rows that these hold.
    states: Option<usize>,
    threads: usize,
    chunk_times: Vec<ChunkTime>,
}

impl ChainPrefill {
    /// Opens the chain that `file` describes on the CPU executor; `stated` says what neither it nor its packages do.
    ///
    /// # Errors
    ///
    /// When the file or a package cannot be read, when nobody states the model or a layout, when packages are of
    /// different models, when their functions are not the same, or when one does not take what the one before leaves.
    pub fn open(file: &Path, options: Options, stated: Stated) -> Result<ChainPrefill, Error> {
        let threads = options.threads;
        let engine = |package: &Path| -> Result<Box<dyn StageEngine>, Error> {
            Ok(Box::new(CpuStage::open(package, options.clone())?))
        };
        ChainPrefill::open_with(file, stated, threads, engine)
    }

    /// Opens the chain that `file` describes on a runtime: each package in a session of its own, which `session` makes.
    /// `units` are the compute units that somebody asked for.
    ///
    /// # Errors
    ///
    /// As [`ChainPrefill::open`].
    pub fn open_on<R: Runtime>(
        file: &Path,
        session: impl Fn(&Path) -> Session<R>,
        units: Option<Units>,
        stated: Stated,
    ) -> Result<ChainPrefill, Error> {
        let engine = |package: &Path| -> Result<Box<dyn StageEngine>, Error> {
            Ok(Box::new(RuntimeStage::open(session(package), package, units)?))
        };
        ChainPrefill::open_with(file, stated, 0, engine)
    }

    /// Opens a chain whose packages `engine` opens. `threads` copy rows; 0 are all cores.
    fn open_with(
        file: &Path,
        stated: Stated,
        threads: usize,
        engine: impl Fn(&Path) -> Result<Box<dyn StageEngine>, Error>,
    ) -> Result<ChainPrefill, Error> {
        let wrong = |what: String| Error::new(ErrorKind::Package, format!("`{}`: {what}", file.display()));
        let chain = ChainFile::read(file)?;
        let folder = file.parent().unwrap_or(Path::new("."));
        let whole = chain.layout.map(|l| l.read(folder)).transpose()?.or(stated.layout);
        let mut stages = Vec::new();
        for stage in chain.stages {
            let layout = stage.layout.map(|l| l.read(folder)).transpose()?;
            let engine = engine(&folder.join(&stage.package))?;
            stages.push(Stage::open(engine, stage.function, layout)?);
        }
        stage::check_passing(&stages)?;
        let model = model(&stages, stated.model)?;
        let functions = functions(&stages)?;
        let held: Vec<&mut Stage> = stages.iter_mut().filter(|s| s.has_cache()).collect();
        let (layout, past) = match whole {
            Some(mut layout) => {
                let by_package = layout.tensors.iter().any(|rule| rule.name.0.starts_with("{group}/"));
                if by_package {
                    held.into_iter().enumerate().for_each(|(n, stage)| stage.name_tensors(n));
                }
                layout.inputs = stages[0].layout.inputs.clone();
                (layout, None)
            }
            None => {
                let of = |get: fn(&Stage) -> Option<&Layout>| joined(stages.iter().filter_map(get));
                let rows = of(|s| Some(&s.layout));
                let past = of(|s| s.past.as_ref());
                (rows.ok_or_else(|| wrong("no package states a layout".to_owned()))?, past)
            }
        };
        // Every layer has its place, before anything is run.
        layout.tensor_names(&model.cache)?;
        let states = stages.iter().filter_map(|stage| stage.state_rows(&layout, &model.cache)).min();
        Ok(ChainPrefill { stages, model, layout, past, functions, states, threads, chunk_times: Vec::new() })
    }

    /// The most tokens that it takes.
    pub fn longest_prompt(&self) -> usize {
        let whole = self.functions.whole.last().map_or(0, |f| f.tokens);
        self.states.or(self.functions.chunks.last().map(|f| f.context)).map_or(whole, |c| c.max(whole))
    }

    /// The steps of a prompt: packages with states take it in pieces of the one length that they have.
    fn steps(&self, tokens: usize) -> Result<Vec<Step>, Error> {
        let (Some(capacity), [function]) = (self.states, self.functions.whole.as_slice()) else {
            return steps(&self.functions, tokens);
        };
        if tokens == 0 {
            return Err(Error::new(ErrorKind::EmptyPrompt, "the prompt has no tokens"));
        }
        // A piece is written as a whole, its padding included.
        let pieces = tokens.div_ceil(function.tokens);
        if pieces * function.tokens > capacity {
            let most = capacity / function.tokens * function.tokens;
            return Err(too_long(tokens, function.tokens, Some(most)));
        }
        let step = |i: usize| Step {
            function: function.name.clone(),
            length: function.tokens,
            context: Some(capacity),
            first: i * function.tokens,
            tokens: function.tokens.min(tokens - i * function.tokens),
        };
        Ok((0..pieces).map(step).collect())
    }

    fn run(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        let steps = self.steps(tokens.len())?;
        check_vocabulary(tokens, self.model.vocab_size)?;
        self.load(&steps)?;
        self.chunk_times.clear();
        if self.states.is_none()
            && let Some(past) = self.past.clone().filter(|_| steps.iter().any(|s| s.context.is_some()))
        {
            let (rows, model, threads) = (self.layout.clone(), self.model.clone(), self.threads);
            let chain = Chain { rows: &rows, past: &past, model: &model, threads };
            let done = chain.run(self, &steps, tokens, sink)?;
            self.chunk_times = done.times;
            let report = self.report(&steps, tokens.len(), done.seconds);
            return Ok(Prefilled { cache: done.cache, logits: done.logits, report });
        }
        let done = self.whole(tokens, &steps)?;
        sink(&done.cache, 0..i64::try_from(tokens.len()).unwrap_or(i64::MAX))?;
        Ok(done)
    }

    /// Prefills with functions that take no past, or keep it themselves: the rows are where the last step leaves them.
    fn whole(&mut self, tokens: &[u32], steps: &[Step]) -> Result<Prefilled, Error> {
        let start = std::time::Instant::now();
        self.stages.iter_mut().for_each(Stage::clear);
        let mut outputs = Vec::new();
        for step in steps {
            // What is lent goes back before the buffers are written again.
            outputs.clear();
            outputs = self.pass(step, &tokens[step.first..step.first + step.tokens], &[])?;
        }
        let mut tensors = Vec::new();
        let function = steps.last().map_or("", |s| s.function.as_str());
        for stage in &mut self.stages {
            tensors.extend(stage.state_tensors(function)?);
        }
        let mut report = self.report(steps, tokens.len(), start.elapsed().as_secs_f64());
        let mut logits = None;
        let logits_name = self.stages.iter().find_map(|s| s.layout.outputs.logits.as_deref());
        for left in outputs {
            if Some(left.name()) == logits_name {
                logits = left.logits()?;
            } else {
                tensors.extend(left.tensor(&mut report.notes));
            }
        }
        let live = LiveRows::seen(tokens.len());
        let cache = CacheView::new(self.layout.clone(), self.model.cache.clone(), tensors, live)?
            .with_model(Some(self.model.clone()))
            .with_tokens(tokens.to_vec());
        Ok(Prefilled { cache, logits, report })
    }

    /// Runs one step through all packages.
    fn pass(&mut self, step: &Step, tokens: &[u32], past: &[(String, Array)]) -> Result<Vec<Left>, Error> {
        let mut passed = Passed::default();
        for stage in &mut self.stages {
            stage.run(step, tokens, past, &mut passed)?;
        }
        Ok(passed.outputs)
    }

    fn load(&mut self, steps: &[Step]) -> Result<(), Error> {
        for step in steps {
            for stage in &mut self.stages {
                stage.load(&step.function)?;
            }
        }
        Ok(())
    }

    fn report(&self, steps: &[Step], tokens: usize, seconds: f64) -> PrefillReport {
        let function = steps.last().map_or("", |s| s.function.as_str());
        let mut report = PrefillReport::new(self.engine(), function.to_owned(), tokens, seconds);
        let mut units: Vec<&str> =
            self.stages.iter().filter_map(|s| s.loaded(function)).map(|l| l.units.name()).collect();
        if units.windows(2).all(|pair| pair[0] == pair[1]) {
            units.truncate(1);
        }
        report.compute_units = Some(units.join(", ")).filter(|units| !units.is_empty());
        self.stages.iter().for_each(|stage| stage.notes(function, &mut report.notes));
        report
    }
}

/// The model that all packages, and the caller, name.
fn model(stages: &[Stage], stated: Option<ModelSpec>) -> Result<ModelSpec, Error> {
    let mut known: Option<(String, ModelSpec)> = stated.map(|m| ("the caller".to_owned(), m));
    for stage in stages {
        let Some(own) = stage.model()? else { continue };
        let place = format!("`{}`", stage.path().display());
        if let Some((other, model)) = &known {
            let digests = (&model.weights_digest, &own.weights_digest);
            let difference =
                model.differences(&own).first().map(ToString::to_string).or_else(|| match digests {
                    (Some(a), Some(b)) if a != b => {
                        Some(format!("weights_digest differs: {a} here, {b} there"))
                    }
                    _ => None,
                });
            if let Some(difference) = difference {
                let message = format!("{other} and {place} are not of one model: {difference}");
                return Err(Error::new(ErrorKind::Incompatible, message));
            }
        }
        known.get_or_insert((place, own));
    }
    known.map(|(_, model)| model).ok_or_else(|| {
        Error::new(ErrorKind::Layout, "no package of the chain states its model")
            .hint("name the folder it was made from with --model DIR")
    })
}

/// The functions that all packages have; they must agree.
fn functions(stages: &[Stage]) -> Result<PrefillFunctions, Error> {
    let lengths = |f: &PrefillFunctions| {
        let whole: Vec<usize> = f.whole.iter().map(|f: &FunctionInfo| f.tokens).collect();
        let chunks: Vec<(usize, usize)> =
            f.chunks.iter().map(|f: &ChunkFunction| (f.tokens, f.context)).collect();
        (whole, chunks)
    };
    let first = &stages[0];
    for stage in &stages[1..] {
        // A stage that takes one row at a time runs after the last token alone.
        if !stage.takes_one_row() && lengths(&stage.functions) != lengths(&first.functions) {
            let (a, b) = (first.path().display(), stage.path().display());
            let message = format!(
                "`{a}` takes {:?} tokens (and, with a past, {:?}), `{b}` {:?} ({:?})",
                lengths(&first.functions).0,
                lengths(&first.functions).1,
                lengths(&stage.functions).0,
                lengths(&stage.functions).1
            );
            return Err(Error::new(ErrorKind::Package, message)
                .hint("packages of a chain have functions of the same lengths"));
        }
    }
    Ok(first.functions.clone())
}

/// One layout of several that each speak of some layers.
fn joined<'a>(layouts: impl Iterator<Item = &'a Layout>) -> Option<Layout> {
    let mut all: Option<Layout> = None;
    for layout in layouts {
        match &mut all {
            None => all = Some(Layout { partial: false, ..layout.clone() }),
            Some(all) => {
                all.tensors.extend(layout.tensors.iter().cloned());
                all.outputs.logits = layout.outputs.logits.clone().or(all.outputs.logits.take());
                all.inputs.last_index = layout.inputs.last_index.clone().or(all.inputs.last_index.take());
            }
        }
    }
    all.filter(|layout| !layout.tensors.is_empty())
}

impl RunStep for ChainPrefill {
    fn past_inputs(&mut self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        let mut infos = Vec::new();
        for stage in &self.stages {
            infos.extend(stage.past_inputs(function, names)?);
        }
        Ok(infos)
    }

    fn run_step(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<(String, Array)>, Error> {
        // Out of the buffers that the next chunk writes.
        self.pass(step, tokens, past)?.into_iter().map(Left::array).collect()
    }
}

impl Prefill for ChainPrefill {
    fn engine(&self) -> &'static str {
        self.stages[0].engine()
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
        let steps = self.steps(tokens)?;
        self.load(&steps)
    }

    fn settle(&mut self) {
        self.stages.iter_mut().for_each(Stage::settle);
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        self.run(tokens, &mut |_, _| Ok(()))
    }

    fn chunk_times(&self) -> &[ChunkTime] {
        &self.chunk_times
    }

    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        self.run(tokens, sink)
    }
}
