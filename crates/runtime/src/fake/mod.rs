//! A runtime that behaves as Core ML is known to, on any machine.
//!
//! What it takes from Core ML are the habits that break callers: it writes into the buffers it is offered, or ignores
//! them; pads the rows of surfaces; refuses buffers that it has read or that are locked; moves its states; hangs; and
//! fails at any call it is told to, half of a state written. By itself it computes nothing: every element of its cache
//! says where it is ([`element`]), so a hand-off that mixes up heads, rows or lanes is caught by its values. With
//! [`Programs`] it computes what those do.

mod program;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvbaton_layout::CacheSpec;
use kvbaton_memory::{Buffer, Bytes, Leased, ReadLease, WritableBytes};

use crate::compile_cache::copy_folder;
use crate::{
    ArrayInfo, Call, CompiledFeature, CompiledFunction, Element, LoadConfig, Memory, Operation, Runtime,
    RuntimeError, SurfaceLimits, System, Units,
};

pub use program::{Program, Programs, Values, element};

/// How the runtime misbehaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Habits {
    /// Rows of surfaces start on multiples of so many bytes; 0 packs them.
    pub row_align_bytes: usize,
    /// Makes arrays of its own at every prediction, whatever was proposed.
    pub ignores_backings: bool,
    /// Fails at these predictions, counted from 0.
    pub fails_at: Vec<usize>,
    /// Fails at these calls of any kind, counted from 0.
    pub fails_at_calls: Vec<usize>,
    /// Fails at so many of a hundred calls, chosen by `seed`.
    pub fails_percent: u64,
    /// Chooses the calls that fail.
    pub seed: u64,
    /// Does not return from these predictions for [`Habits::hang`].
    pub hangs_at: Vec<usize>,
    /// How long a call hangs.
    pub hang: Duration,
    /// Hangs when it loads for these units.
    pub hangs_loading: Vec<Units>,
    /// Refuses to load for these units.
    pub refuses_units: Vec<Units>,
    /// Refuses a backing that the CPU holds locked; otherwise it makes an array of its own instead. Sources disagree on
    /// which of the two Core ML does.
    pub refuses_locked: bool,
    /// Refuses a backing that was an input; otherwise it makes an array of its own instead.
    pub refuses_inputs: bool,
    /// Refuses surfaces even within the limits that it reports.
    pub refuses_surfaces: bool,
    /// The version of the system that it says it is.
    pub version: (u32, u32),
    /// Largest surface.
    pub limits: SurfaceLimits,
}

impl Default for Habits {
    fn default() -> Habits {
        Habits {
            row_align_bytes: 0,
            ignores_backings: false,
            fails_at: Vec::new(),
            fails_at_calls: Vec::new(),
            fails_percent: 0,
            seed: 0,
            hangs_at: Vec::new(),
            hang: Duration::from_millis(200),
            hangs_loading: Vec::new(),
            refuses_units: Vec::new(),
            refuses_locked: true,
            refuses_inputs: true,
            refuses_surfaces: false,
            version: (15, 0),
            limits: SurfaceLimits::GUARANTEED,
        }
    }
}

/// The functions of a model of `cache` whose prefill takes each of `lengths` tokens, stacked as `kvbaton export` stacks
/// its outputs. Layers must all be attention of one shape.
pub fn functions(cache: &CacheSpec, lengths: &[usize]) -> Vec<CompiledFunction> {
    let Some((heads, key_dim, value_dim)) = cache.layers.first().and_then(|l| l.attention()) else {
        return Vec::new();
    };
    let feature =
        |name: &str, element, shape: Vec<usize>| CompiledFeature { name: name.to_owned(), element, shape };
    lengths
        .iter()
        .map(|&tokens| CompiledFunction {
            name: Some(format!("prefill_{tokens}")),
            inputs: vec![
                feature("input_ids", Element::Int32, vec![1, tokens]),
                feature("last_index", Element::Int32, vec![1]),
            ],
            outputs: vec![
                feature("logits", Element::Float16, vec![1, 1]),
                feature("key_cache", Element::Float16, vec![cache.layers.len(), heads, tokens, key_dim]),
                feature("value_cache", Element::Float16, vec![cache.layers.len(), heads, tokens, value_dim]),
            ],
            states: Vec::new(),
        })
        .collect()
}

/// Counts that outlive the runtime's thread.
#[derive(Debug, Default)]
pub struct Tally {
    /// Calls so far.
    pub calls: AtomicUsize,
    /// Predictions so far.
    pub predictions: AtomicUsize,
    /// Arrays that exist.
    pub arrays: AtomicUsize,
    /// Locks that are held.
    pub locks: AtomicUsize,
    /// States that exist.
    pub states: AtomicUsize,
    /// Broken rules: a locked buffer proposed, or one that was an input.
    pub violations: AtomicUsize,
    /// Where it compiled packages to.
    pub compiled_to: Mutex<Vec<PathBuf>>,
}

/// The runtime.
pub struct FakeRuntime {
    habits: Habits,
    tally: Arc<Tally>,
    programs: Option<Programs>,
}

/// A loaded function.
pub struct FakeModel(Box<dyn Program>);

/// A state: its tensors, which lie elsewhere each time they are shown.
pub struct FakeState {
    tensors: Vec<(String, ArrayInfo, Buffer)>,
    tally: Arc<Tally>,
}

impl Drop for FakeState {
    fn drop(&mut self) {
        self.tally.states.fetch_sub(1, Ordering::SeqCst);
    }
}

impl FakeState {
    /// What a prediction that failed leaves: a state of which half is written.
    fn spoil(&mut self) {
        for (_, _, buffer) in &mut self.tensors {
            let half = buffer.len() / 2;
            buffer[..half].fill(NAN_BYTE);
        }
    }

    fn moved(&mut self, call: Call, name: &str) -> Result<(&ArrayInfo, &mut Buffer), RuntimeError> {
        let found = self.tensors.iter_mut().find(|(n, ..)| n == name);
        let (_, info, buffer) =
            found.ok_or_else(|| RuntimeError::failed(call, format!("the state has no `{name}`")))?;
        *buffer = Buffer::copy_of(buffer);
        Ok((info, buffer))
    }
}

/// Repeated, a NaN of every floating-point type: what padding and spoilt memory hold.
const NAN_BYTE: u8 = 0xff;

/// An array.
#[derive(Clone)]
pub struct FakeArray(Arc<Storage>);

struct Storage {
    info: ArrayInfo,
    buffer: Leased,
    was_input: AtomicBool,
    locks: AtomicUsize,
    tally: Arc<Tally>,
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.tally.arrays.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A lock on an array: its bytes, and the promise to unlock.
struct Lock {
    bytes: ReadLease,
    array: FakeArray,
}

impl std::ops::Deref for Lock {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        self.array.0.locks.fetch_sub(1, Ordering::SeqCst);
        self.array.0.tally.locks.fetch_sub(1, Ordering::SeqCst);
    }
}

impl FakeRuntime {
    /// A runtime with these habits that counts in `tally`.
    pub fn new(habits: Habits, tally: Arc<Tally>) -> FakeRuntime {
        FakeRuntime { habits, tally, programs: None }
    }

    /// Runs what `programs` loads, instead of computing nothing.
    #[must_use]
    pub fn computing(mut self, programs: Programs) -> FakeRuntime {
        self.programs = Some(programs);
        self
    }

    /// Counts a call, and fails it when it is its turn.
    fn enter(&self, call: Call) -> Result<(), RuntimeError> {
        let n = self.tally.calls.fetch_add(1, Ordering::SeqCst);
        let unlucky = splitmix(self.habits.seed ^ n as u64) % 100 < self.habits.fails_percent;
        if unlucky || self.habits.fails_at_calls.contains(&n) {
            return Err(RuntimeError::failed(call, format!("call {n} failed, as it was told to")));
        }
        Ok(())
    }

    fn allocate(&self, info: ArrayInfo) -> FakeArray {
        let memory = Leased::new(Box::new(Buffer::zeroed(info.len_bytes)));
        self.array(info, memory)
    }

    fn array(&self, info: ArrayInfo, buffer: Leased) -> FakeArray {
        self.tally.arrays.fetch_add(1, Ordering::SeqCst);
        FakeArray(Arc::new(Storage {
            buffer,
            info,
            was_input: AtomicBool::new(false),
            locks: AtomicUsize::new(0),
            tally: self.tally.clone(),
        }))
    }

    /// Where an output goes: the backing, or an array of the runtime's own.
    fn destination(&self, backing: &FakeArray) -> Result<FakeArray, RuntimeError> {
        let locked = backing.0.locks.load(Ordering::SeqCst) > 0;
        let was_input = backing.0.was_input.load(Ordering::SeqCst);
        if locked && self.habits.refuses_locked {
            return Err(self.refuse("a locked buffer was proposed: make a new one"));
        }
        if was_input && self.habits.refuses_inputs {
            return Err(self.refuse("a buffer that was an input was proposed: make a new one"));
        }
        if self.habits.ignores_backings || locked || was_input {
            return Ok(self.allocate(backing.0.info.clone()));
        }
        Ok(backing.clone())
    }

    /// Runs the program, and writes what it leaves where it belongs.
    fn compute(
        &self,
        model: &mut FakeModel,
        inputs: &[(String, FakeArray)],
        backings: &[(String, FakeArray)],
        state: Option<&mut FakeState>,
    ) -> Result<Vec<(String, FakeArray)>, RuntimeError> {
        let packed = |info: &ArrayInfo| ArrayInfo::packed(info.element, &info.shape);
        let mut values = Vec::new();
        for (name, input) in inputs {
            let bytes = input.0.buffer.read().map_err(|e| self.refuse(&e.to_string()))?;
            values.push((name.clone(), packed(&input.0.info), input.0.info.gather(&bytes)));
            input.0.was_input.store(true, Ordering::SeqCst);
        }
        let mut outputs = Vec::new();
        for (name, backing) in backings {
            outputs.push((name.clone(), self.destination(backing)?));
        }
        let wanted: Vec<_> =
            outputs.iter().map(|(name, array)| (name.clone(), packed(&array.0.info))).collect();
        let mut tensors: Vec<Values> = state
            .iter()
            .flat_map(|s| &s.tensors)
            .map(|(name, info, buffer)| (name.clone(), packed(info), info.gather(buffer)))
            .collect();
        let mut memories = Vec::new();
        for (_, array) in &outputs {
            memories.push(array.0.buffer.write().map_err(|e| self.refuse(&e.to_string()))?);
        }
        let mut leave = |index: usize, bytes: &[u8]| {
            let (info, memory) = (&outputs[index].1.0.info, &mut memories[index]);
            if info.packed_bytes() < memory.len() && info.strides_bytes != packed(info).strides_bytes {
                memory.fill(NAN_BYTE);
            }
            info.scatter(bytes, memory);
        };
        model
            .0
            .run(&values, &mut tensors, &wanted, &mut leave)
            .map_err(|message| RuntimeError::failed(Call::Predict, message))?;
        drop(memories);
        for (tensor, (_, _, bytes)) in state.into_iter().flat_map(|s| &mut s.tensors).zip(tensors) {
            tensor.1.scatter(&bytes, &mut tensor.2);
        }
        Ok(outputs)
    }

    fn refuse(&self, message: &str) -> RuntimeError {
        self.tally.violations.fetch_add(1, Ordering::SeqCst);
        RuntimeError::failed(Call::Predict, message)
    }
}

impl Runtime for FakeRuntime {
    const NAME: &'static str = "fake";

    type Model = FakeModel;
    type Array = FakeArray;
    type State = FakeState;

    fn system(&self) -> System {
        System { name: "fake".to_owned(), version: self.habits.version, build: "none".to_owned() }
    }

    fn surface_limits(&self) -> SurfaceLimits {
        self.habits.limits
    }

    fn compile(&mut self, package: &Path) -> Result<PathBuf, RuntimeError> {
        self.enter(Call::Compile)?;
        let copy = compiled_copy(package).map_err(|e| RuntimeError::failed(Call::Compile, e.to_string()))?;
        self.tally.compiled_to.lock().unwrap_or_else(|e| e.into_inner()).push(copy.clone());
        Ok(copy)
    }

    fn load(&mut self, compiled: &Path, config: &LoadConfig) -> Result<FakeModel, RuntimeError> {
        self.enter(Call::Load)?;
        if self.habits.hangs_loading.contains(&config.units) {
            std::thread::sleep(self.habits.hang);
        }
        if self.habits.refuses_units.contains(&config.units) {
            return Err(RuntimeError::failed(Call::Load, format!("{} is refused", config.units)));
        }
        let Some(programs) = &self.programs else { return Ok(FakeModel(Box::new(program::Elements))) };
        let program = programs(compiled, config.function.as_deref());
        Ok(FakeModel(program.map_err(|message| RuntimeError::failed(Call::Load, message))?))
    }

    fn plan(&mut self, _compiled: &Path, config: &LoadConfig) -> Result<Vec<Operation>, RuntimeError> {
        self.enter(Call::Plan)?;
        let device = if config.units.neural_engine() { "ne" } else { "cpu" };
        let operation = |kind: &str, cost| Operation { kind: kind.to_owned(), device: Some(device), cost };
        Ok(vec![operation("const", None), operation("ios18.linear", Some(1.0))])
    }

    fn input(&mut self, info: &ArrayInfo, bytes: &[u8]) -> Result<FakeArray, RuntimeError> {
        self.enter(Call::Input)?;
        let array = self.allocate(info.clone());
        array.0.was_input.store(true, Ordering::SeqCst);
        array.0.buffer.write().map_err(|e| self.refuse(&e.to_string()))?.copy_from_slice(bytes);
        Ok(array)
    }

    fn backing(
        &mut self,
        element: Element,
        shape: &[usize],
        memory: Memory,
    ) -> Result<FakeArray, RuntimeError> {
        self.enter(Call::Backing)?;
        if memory == Memory::Surface && self.habits.refuses_surfaces {
            return Err(RuntimeError::failed(Call::Backing, "no surface of this size"));
        }
        let align = if memory == Memory::Surface { self.habits.row_align_bytes } else { 0 };
        Ok(self.allocate(ArrayInfo::with_rows(element, shape, align)))
    }

    fn backing_on(
        &mut self,
        element: Element,
        shape: &[usize],
        memory: WritableBytes,
    ) -> Result<FakeArray, RuntimeError> {
        self.enter(Call::Backing)?;
        let info = ArrayInfo::packed(element, shape);
        if info.len_bytes > memory.len() {
            let message = format!("{} bytes are needed, there are {}", info.len_bytes, memory.len());
            return Err(RuntimeError::failed(Call::Backing, message));
        }
        Ok(self.array(info, Leased::new(memory)))
    }

    fn predict(
        &mut self,
        model: &mut FakeModel,
        inputs: &[(String, FakeArray)],
        backings: &[(String, FakeArray)],
        mut state: Option<&mut FakeState>,
    ) -> Result<Vec<(String, FakeArray)>, RuntimeError> {
        let prediction = self.tally.predictions.fetch_add(1, Ordering::SeqCst);
        let told = match self.enter(Call::Predict) {
            Ok(()) if self.habits.fails_at.contains(&prediction) => {
                let message = format!("prediction {prediction} failed, as it was told to");
                Err(RuntimeError::failed(Call::Predict, message))
            }
            other => other,
        };
        if let Err(error) = told {
            if let Some(state) = state {
                state.spoil();
            }
            return Err(error);
        }
        if self.habits.hangs_at.contains(&prediction) {
            std::thread::sleep(self.habits.hang);
        }
        let done = self.compute(model, inputs, backings, state.as_deref_mut());
        if let (Err(_), Some(state)) = (&done, state) {
            state.spoil();
        }
        done
    }

    fn is_same(&self, left: &FakeArray, right: &FakeArray) -> bool {
        Arc::ptr_eq(&left.0, &right.0)
    }

    fn describe(&mut self, array: &FakeArray) -> Result<ArrayInfo, RuntimeError> {
        self.enter(Call::Describe)?;
        Ok(array.0.info.clone())
    }

    fn lock(&mut self, array: &FakeArray, _info: &ArrayInfo) -> Result<Bytes, RuntimeError> {
        self.enter(Call::Lock)?;
        let bytes = array.0.buffer.read().map_err(|e| self.refuse(&e.to_string()))?;
        array.0.locks.fetch_add(1, Ordering::SeqCst);
        self.tally.locks.fetch_add(1, Ordering::SeqCst);
        Ok(Bytes::new(Lock { bytes, array: array.clone() }))
    }

    fn new_state(&mut self, model: &mut FakeModel) -> Result<FakeState, RuntimeError> {
        self.enter(Call::NewState)?;
        let tensors: Vec<_> = model
            .0
            .states()
            .into_iter()
            .map(|(name, info)| {
                let info = ArrayInfo::with_rows(info.element, &info.shape, self.habits.row_align_bytes);
                let buffer = Buffer::zeroed(info.len_bytes);
                (name, info, buffer)
            })
            .collect();
        if tensors.is_empty() {
            return Err(RuntimeError::failed(Call::NewState, "the function has no state"));
        }
        self.tally.states.fetch_add(1, Ordering::SeqCst);
        Ok(FakeState { tensors, tally: self.tally.clone() })
    }

    fn read_state(
        &mut self,
        state: &mut FakeState,
        name: &str,
        read: &mut dyn FnMut(&ArrayInfo, &[u8]),
    ) -> Result<(), RuntimeError> {
        self.enter(Call::ReadState)?;
        let (info, buffer) = state.moved(Call::ReadState, name)?;
        read(info, buffer);
        Ok(())
    }

    fn write_state(
        &mut self,
        state: &mut FakeState,
        name: &str,
        write: &mut dyn FnMut(&ArrayInfo, &mut [u8]),
    ) -> Result<(), RuntimeError> {
        self.enter(Call::WriteState)?;
        let (info, buffer) = state.moved(Call::WriteState, name)?;
        write(info, buffer);
        Ok(())
    }
}

/// What compiling leaves: a folder of its own, which is the caller's from then on. It holds what the package does.
fn compiled_copy(package: &Path) -> io::Result<PathBuf> {
    let folder = tempfile::Builder::new().prefix("kvbaton-fake-").suffix(".mlmodelc").tempdir()?;
    if package.is_dir() {
        copy_folder(package, folder.path())?;
    }
    Ok(folder.keep())
}

/// A well-mixed function of its argument (splitmix64).
fn splitmix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
