//! A runtime behind a thread: every call has a time limit, and one that never returns is left behind.
//!
//! Runtimes hang: a compilation for the Neural Engine may take an hour, and its daemon has been seen to dead-lock. A
//! call cannot be stopped, only given up. So each session talks to its runtime through a worker thread; when a call
//! exceeds its limit, the thread is abandoned with all that it holds, and the next call gets a new one. The buffers
//! that the lost prediction had are lost with it, never used again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use kvbaton_memory::{Book, Bytes};
use serde::Serialize;

use crate::worker::{InputValues, WantedOutput, Worker};
use crate::{
    ArrayInfo, Call, CompileCache, Compiled, CompiledFeature, Counts, LoadConfig, Output, PlanSummary,
    Runtime, RuntimeError, Units,
};

/// Threads that may be lost before no further one is started.
const MOST_ABANDONED: usize = 3;

/// How often somebody who waits hears of it.
const TICK: Duration = Duration::from_secs(1);

/// How long calls may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Compiling a package.
    pub compile: Duration,
    /// Loading a model, the Neural Engine's compilation included.
    pub load: Duration,
    /// One prediction, and every call on a state.
    pub predict: Duration,
}

impl Patience {
    /// The usual limits, but for those of loading and of predicting that somebody chose. Who waits longer for a model to
    /// be loaded waits as long for its package to be compiled.
    pub fn chosen(load: Option<Duration>, predict: Option<Duration>) -> Patience {
        let usual = Patience::default();
        Patience {
            compile: load.map_or(usual.compile, |load| load.max(usual.compile)),
            load: load.unwrap_or(usual.load),
            predict: predict.unwrap_or(usual.predict),
        }
    }
}

impl Default for Patience {
    fn default() -> Patience {
        let minutes = |m: u64| Duration::from_secs(60 * m);
        Patience { compile: minutes(10), load: minutes(20), predict: minutes(5) }
    }
}

/// A function that is ready to run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Loaded {
    /// The compute units that it was loaded for.
    pub units: Units,
    /// What runs where, where the system says.
    pub plan: Option<PlanSummary>,
    /// What the user should know: attempts that failed, work that is not where it was meant to be.
    pub notes: Vec<String>,
}

/// A state that the worker's thread keeps: only predictions and handlers on that thread reach it, one at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StateId(u64);

type Job<R> = Box<dyn FnOnce(&mut Worker<R>) + Send>;
type Waiting = Box<dyn FnMut(Call, Duration) + Send>;

/// A runtime behind a thread.
pub struct Session<R: Runtime> {
    launch: Arc<dyn Fn() -> R + Send + Sync>,
    worker: Option<mpsc::Sender<Job<R>>>,
    abandoned: usize,
    /// By package.
    compiled: BTreeMap<PathBuf, Compiled>,
    loaded: Vec<(Compiled, LoadConfig)>,
    states: u64,
    book: Book,
    patience: Patience,
    cache: Option<CompileCache>,
    waiting: Waiting,
}

impl<R: Runtime> Session<R> {
    /// A session with the runtime that `launch` makes, on the thread that will call it.
    pub fn new(launch: impl Fn() -> R + Send + Sync + 'static) -> Session<R> {
        Session {
            launch: Arc::new(launch),
            worker: None,
            abandoned: 0,
            compiled: BTreeMap::new(),
            loaded: Vec::new(),
            states: 0,
            book: Book::default(),
            patience: Patience::default(),
            cache: None,
            waiting: Box::new(|_, _| {}),
        }
    }

    /// Keeps compiled models in `cache`.
    #[must_use]
    pub fn with_cache(mut self, cache: CompileCache) -> Session<R> {
        self.cache = Some(cache);
        self
    }

    /// Sets the time limits.
    #[must_use]
    pub fn with_patience(mut self, patience: Patience) -> Session<R> {
        self.patience = patience;
        self
    }

    /// Tells `waiting` once a second what is waited for, and for how long already.
    #[must_use]
    pub fn with_waiting(mut self, waiting: impl FnMut(Call, Duration) + Send + 'static) -> Session<R> {
        self.waiting = Box::new(waiting);
        self
    }

    /// Where all buffers are.
    pub fn counts(&self) -> Counts {
        Counts::of(&self.book.phases())
    }

    /// All work on GPUs that was submitted so far is done: buffers that it read may be written again.
    pub fn settle(&self) {
        self.book.settle();
    }

    /// Loads a function of `path`, a package or a compiled model. `asked` are the units that somebody chose; where
    /// nobody did, further ones are tried when the first fail.
    ///
    /// # Errors
    ///
    /// When it cannot be compiled, or loaded for any of the units.
    pub fn load(
        &mut self,
        path: &Path,
        function: Option<&str>,
        asked: Option<Units>,
    ) -> Result<Loaded, RuntimeError> {
        let compiled = self.compile(path)?;
        let mut notes = Vec::new();
        let mut last = None;
        for units in Units::attempts(asked) {
            match self.load_as(&compiled, function, units) {
                Ok(config) => {
                    let plan = self.plan(&compiled, &config, &mut notes);
                    return Ok(Loaded { units, plan, notes });
                }
                Err(error) => {
                    notes.push(format!("compute units {units}: {error}"));
                    last = Some(error);
                }
            }
        }
        Err(last.unwrap_or_else(|| RuntimeError::failed(Call::Load, "no compute units were tried")))
    }

    fn compile(&mut self, path: &Path) -> Result<Compiled, RuntimeError> {
        if let Some(known) = self.compiled.get(path).filter(|c| c.path().is_dir()) {
            return Ok(known.clone());
        }
        let (package, cache) = (path.to_owned(), self.cache.clone());
        let limit = self.patience.compile;
        let compiled = self.call(Call::Compile, limit, move |w| w.compile(&package, cache.as_ref()))?;
        self.compiled.insert(path.to_owned(), compiled.clone());
        Ok(compiled)
    }

    fn load_as(
        &mut self,
        compiled: &Compiled,
        function: Option<&str>,
        units: Units,
    ) -> Result<LoadConfig, RuntimeError> {
        let (from, name) = (compiled.clone(), function.map(str::to_owned));
        let config =
            self.call(Call::Load, self.patience.load, move |w| w.load(from.path(), name.as_deref(), units))?;
        self.loaded.retain(|(_, c)| c.function != config.function);
        self.loaded.push((compiled.clone(), config.clone()));
        Ok(config)
    }

    /// A plan is worth a warning, never a failure.
    fn plan(
        &mut self,
        compiled: &Compiled,
        config: &LoadConfig,
        notes: &mut Vec<String>,
    ) -> Option<PlanSummary> {
        let (from, what) = (compiled.clone(), config.clone());
        match self.call(Call::Plan, self.patience.load, move |w| w.plan(from.path(), &what)) {
            Ok(plan) => {
                notes.extend(plan.warning(config.units));
                Some(plan)
            }
            Err(error) => {
                notes.push(format!("what runs where is not known: {error}"));
                None
            }
        }
    }

    /// Runs a loaded function with packed inputs, and lends the outputs that are wanted. The inputs' bytes are read on the
    /// session's thread, and let go of before this returns, unless the prediction hangs.
    ///
    /// # Errors
    ///
    /// When consumers still hold outputs of the last prediction, when the prediction fails or does not return, or when
    /// its outputs are not what the program declares.
    pub fn predict(
        &mut self,
        function: Option<&str>,
        inputs: Vec<(String, ArrayInfo, Bytes)>,
        outputs: &[CompiledFeature],
    ) -> Result<Vec<Output>, RuntimeError> {
        self.predict_on(function, None, inputs, outputs)
    }

    /// Runs a loaded stateful function on `state`: [`Session::predict`] otherwise.
    ///
    /// # Errors
    ///
    /// As [`Session::predict`]. A state that a failed prediction had is gone; one whose prediction was never made stays.
    pub fn step(
        &mut self,
        function: Option<&str>,
        state: StateId,
        inputs: Vec<(String, ArrayInfo, Bytes)>,
        outputs: &[CompiledFeature],
    ) -> Result<Vec<Output>, RuntimeError> {
        self.predict_on(function, Some(state), inputs, outputs)
    }

    fn predict_on(
        &mut self,
        function: Option<&str>,
        state: Option<StateId>,
        inputs: Vec<(String, ArrayInfo, Bytes)>,
        outputs: &[CompiledFeature],
    ) -> Result<Vec<Output>, RuntimeError> {
        let function = function.unwrap_or_default().to_owned();
        let inputs: Vec<InputValues> =
            inputs.into_iter().map(|(name, info, bytes)| InputValues { name, info, bytes }).collect();
        let wanted: Vec<WantedOutput> = outputs
            .iter()
            .map(|o| WantedOutput { name: o.name.clone(), element: o.element, shape: o.shape.clone() })
            .collect();
        self.reload()?;
        self.call(Call::Predict, self.patience.predict, move |w| {
            w.predict(&function, &inputs, &wanted, state)
        })
    }

    /// A zeroed state of a loaded function.
    ///
    /// # Errors
    ///
    /// When the function has none, or the system is too old for states.
    pub fn new_state(&mut self, function: Option<&str>) -> Result<StateId, RuntimeError> {
        let function = function.unwrap_or_default().to_owned();
        self.reload()?;
        self.states += 1;
        let id = StateId(self.states);
        self.call(Call::NewState, self.patience.predict, move |w| w.new_state(&function, id))?;
        Ok(id)
    }

    /// Lets go of a state.
    pub fn drop_state(&mut self, state: StateId) {
        if self.worker.is_some() {
            // A thread that does not answer holds nothing that could be given back.
            let _ = self.call(Call::NewState, self.patience.predict, move |w| {
                w.drop_state(state);
                Ok(())
            });
        }
    }

    /// Lets `write` change the tensors `names` of a state, one after the other, each inside its handler: it is given the
    /// index of the name, what the runtime says of the tensor this time, and its bytes.
    ///
    /// # Errors
    ///
    /// Those of `write`, and when a tensor cannot be had. The state is gone then: half of it may be written.
    pub fn write_state<T: Send + 'static, E: From<RuntimeError> + Send + 'static>(
        &mut self,
        state: StateId,
        names: &[String],
        write: impl FnMut(usize, &ArrayInfo, &mut [u8]) -> Result<T, E> + Send + 'static,
    ) -> Result<Vec<T>, E> {
        let names = names.to_vec();
        self.call(Call::WriteState, self.patience.predict, move |w| w.write_state(state, &names, write))?
    }

    /// Packed copies of the tensors `names` of a state. What lies in a state is never reached outside a handler.
    ///
    /// # Errors
    ///
    /// When the state is gone, or has no such tensor.
    pub fn read_state(
        &mut self,
        state: StateId,
        names: &[String],
    ) -> Result<Vec<(ArrayInfo, Vec<u8>)>, RuntimeError> {
        let names = names.to_vec();
        self.call(Call::ReadState, self.patience.predict, move |w| w.read_state(state, &names))
    }

    /// After a thread was lost, the next one knows no models.
    fn reload(&mut self) -> Result<(), RuntimeError> {
        if self.worker.is_none() {
            for (compiled, config) in self.loaded.clone() {
                self.load_as(&compiled, config.function.as_deref(), config.units)?;
            }
        }
        Ok(())
    }

    /// Runs `job` with the runtime, on the worker's thread: for probes, which go around the custody of buffers.
    ///
    /// # Errors
    ///
    /// Those of `job`; when it does not return within the limit; or when too many have not.
    pub fn with_runtime<T: Send + 'static>(
        &mut self,
        call: Call,
        job: impl FnOnce(&mut R) -> Result<T, RuntimeError> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        self.call(call, self.patience.predict, move |w| job(&mut w.runtime))
    }

    fn call<T: Send + 'static>(
        &mut self,
        call: Call,
        limit: Duration,
        job: impl FnOnce(&mut Worker<R>) -> Result<T, RuntimeError> + Send + 'static,
    ) -> Result<T, RuntimeError> {
        let (answer, answered) = mpsc::channel();
        let job: Job<R> = Box::new(move |worker| {
            // Nobody may be listening any more: then the answer, with the loans in it, is dropped here.
            let _ = answer.send(job(worker));
        });
        let gone = |message: &str| RuntimeError::WorkerGone { message: message.to_owned() };
        if self.worker()?.send(job).is_err() {
            self.worker = None;
            return Err(gone("it takes no more calls"));
        }
        let start = Instant::now();
        loop {
            let left = limit.saturating_sub(start.elapsed());
            match answered.recv_timeout(left.min(TICK)) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => {
                    self.worker = None;
                    self.book.lose();
                    return Err(gone("it panicked"));
                }
                Err(RecvTimeoutError::Timeout) if start.elapsed() < limit => {
                    (self.waiting)(call, start.elapsed());
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.worker = None;
                    self.abandoned += 1;
                    self.book.lose();
                    return Err(RuntimeError::TimedOut { call, limit });
                }
            }
        }
    }

    /// The worker, started when there is none.
    fn worker(&mut self) -> Result<mpsc::Sender<Job<R>>, RuntimeError> {
        if let Some(worker) = &self.worker {
            return Ok(worker.clone());
        }
        if self.abandoned >= MOST_ABANDONED {
            return Err(RuntimeError::Stuck { abandoned: self.abandoned });
        }
        let (sender, jobs) = mpsc::channel::<Job<R>>();
        let (launch, book) = (self.launch.clone(), self.book.clone());
        std::thread::Builder::new()
            .name(format!("kvbaton-{}", R::NAME))
            .spawn(move || {
                let mut worker = Worker::new(launch(), book);
                for job in jobs {
                    R::around(|| job(&mut worker));
                }
                R::around(|| drop(worker));
            })
            .map_err(|e| RuntimeError::WorkerGone { message: e.to_string() })?;
        self.worker = Some(sender.clone());
        Ok(sender)
    }
}
