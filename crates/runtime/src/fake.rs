//! A runtime that behaves as Core ML is known to, on any machine.
//!
//! It computes nothing: every element of its cache says where it is ([`element`]), so a hand-off that mixes up heads,
//! rows or lanes is caught by its values. What it takes from Core ML are the habits that break callers: it writes into
//! the buffers it is offered, or ignores them; pads the rows of surfaces; refuses buffers that it has read or that are
//! locked; hangs; and fails at any call it is told to.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use kvbaton_layout::{CacheSpec, Part};
use kvbaton_memory::{Buffer, Bytes, Leased, ReadLease};

use crate::{
    ArrayInfo, Call, CompiledFeature, CompiledFunction, Element, LoadConfig, Memory, Operation, Runtime,
    RuntimeError, SurfaceLimits, System, Units,
};

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

/// What the runtime stores for an element: distinct for neighbours in every direction, exact in float16.
pub fn element(part: Part, layer: usize, head: usize, row: usize, lane: usize, token: u32) -> f32 {
    let mix = layer
        .wrapping_mul(31)
        .wrapping_add(head.wrapping_mul(17))
        .wrapping_add(row.wrapping_mul(7))
        .wrapping_add(lane.wrapping_mul(3))
        .wrapping_add(token as usize);
    let value = (mix % 2039) as f32;
    if part == Part::Key { value } else { -value - 1.0 }
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
    /// Broken rules: a locked buffer proposed, or one that was an input.
    pub violations: AtomicUsize,
    /// Compilations so far.
    pub compilations: AtomicUsize,
}

/// The runtime.
pub struct FakeRuntime {
    habits: Habits,
    tally: Arc<Tally>,
}

/// A loaded function; it needs nothing but its outputs' shapes, which the backings have.
pub struct FakeModel(());

/// A state with one tensor.
pub struct FakeState {
    info: ArrayInfo,
    buffer: Buffer,
}

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
        FakeRuntime { habits, tally }
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
        self.tally.arrays.fetch_add(1, Ordering::SeqCst);
        FakeArray(Arc::new(Storage {
            buffer: Leased::new(Buffer::zeroed(info.len_bytes)),
            info,
            was_input: AtomicBool::new(false),
            locks: AtomicUsize::new(0),
            tally: self.tally.clone(),
        }))
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
        System { name: "fake".to_owned(), version: self.habits.version }
    }

    fn surface_limits(&self) -> SurfaceLimits {
        self.habits.limits
    }

    fn compile(&mut self, package: &Path) -> Result<PathBuf, RuntimeError> {
        self.enter(Call::Compile)?;
        self.tally.compilations.fetch_add(1, Ordering::SeqCst);
        Ok(package.to_owned())
    }

    fn load(&mut self, _compiled: &Path, config: &LoadConfig) -> Result<FakeModel, RuntimeError> {
        self.enter(Call::Load)?;
        if self.habits.hangs_loading.contains(&config.units) {
            std::thread::sleep(self.habits.hang);
        }
        if self.habits.refuses_units.contains(&config.units) {
            return Err(RuntimeError::failed(Call::Load, format!("{} is refused", config.units)));
        }
        Ok(FakeModel(()))
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

    fn predict(
        &mut self,
        _model: &mut FakeModel,
        inputs: &[(String, FakeArray)],
        backings: &[(String, FakeArray)],
        mut state: Option<&mut FakeState>,
    ) -> Result<Vec<(String, FakeArray)>, RuntimeError> {
        let prediction = self.tally.predictions.fetch_add(1, Ordering::SeqCst);
        self.enter(Call::Predict)?;
        if self.habits.fails_at.contains(&prediction) {
            let message = format!("prediction {prediction} failed, as it was told to");
            return Err(RuntimeError::failed(Call::Predict, message));
        }
        if self.habits.hangs_at.contains(&prediction) {
            std::thread::sleep(self.habits.hang);
        }
        let prefill = inputs.iter().any(|(name, _)| name == "input_ids");
        let tokens = if prefill { self.prompt(inputs)? } else { Vec::new() };
        for (_, input) in inputs {
            input.0.was_input.store(true, Ordering::SeqCst);
        }
        let mut outputs = Vec::new();
        for (name, backing) in backings {
            let locked = backing.0.locks.load(Ordering::SeqCst) > 0;
            let was_input = backing.0.was_input.load(Ordering::SeqCst);
            if locked && self.habits.refuses_locked {
                return Err(self.refuse("a locked buffer was proposed: make a new one"));
            }
            if was_input && self.habits.refuses_inputs {
                return Err(self.refuse("a buffer that was an input was proposed: make a new one"));
            }
            let array = if self.habits.ignores_backings || locked || was_input {
                self.allocate(backing.0.info.clone())
            } else {
                backing.clone()
            };
            if !prefill {
                self.arithmetic(name, inputs, &array, state.as_deref_mut())?;
                outputs.push((name.clone(), array));
                continue;
            }
            let mut bytes = array.0.buffer.write().map_err(|e| self.refuse(&e.to_string()))?;
            match name.as_str() {
                "key_cache" => fill(&mut bytes, &array.0.info, Part::Key, &tokens),
                "value_cache" => fill(&mut bytes, &array.0.info, Part::Value, &tokens),
                _ => bytes.fill(0),
            }
            drop(bytes);
            outputs.push((name.clone(), array));
        }
        Ok(outputs)
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

    fn new_state(&mut self, _model: &mut FakeModel) -> Result<FakeState, RuntimeError> {
        self.enter(Call::NewState)?;
        let info = ArrayInfo::with_rows(Element::Float16, &[4, 64], self.habits.row_align_bytes);
        Ok(FakeState { buffer: Buffer::zeroed(info.len_bytes), info })
    }

    fn read_state(
        &mut self,
        state: &mut FakeState,
        _name: &str,
        read: &mut dyn FnMut(&ArrayInfo, &[u8]),
    ) -> Result<(), RuntimeError> {
        self.enter(Call::ReadState)?;
        // The address may differ each time.
        state.buffer = Buffer::copy_of(&state.buffer);
        read(&state.info, &state.buffer);
        Ok(())
    }

    fn write_state(
        &mut self,
        state: &mut FakeState,
        _name: &str,
        write: &mut dyn FnMut(&ArrayInfo, &mut [u8]),
    ) -> Result<(), RuntimeError> {
        self.enter(Call::WriteState)?;
        state.buffer = Buffer::copy_of(&state.buffer);
        write(&state.info, &mut state.buffer);
        Ok(())
    }
}

impl FakeRuntime {
    /// A program without tokens: `out_n` is twice `in_n`; with a state, `in_n` is added to it and it is returned.
    fn arithmetic(
        &self,
        name: &str,
        inputs: &[(String, FakeArray)],
        output: &FakeArray,
        state: Option<&mut FakeState>,
    ) -> Result<(), RuntimeError> {
        let wanted = name.replacen("out", "in", 1);
        let input = inputs
            .iter()
            .find(|(n, _)| *n == wanted)
            .ok_or_else(|| RuntimeError::failed(Call::Predict, format!("no input `{wanted}`")))?;
        let floats = |packed: &[u8]| -> Vec<half::f16> {
            packed.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b)).collect()
        };
        let bytes = |values: &[half::f16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let read = input.1.0.buffer.read().map_err(|e| self.refuse(&e.to_string()))?;
        let mut values = floats(&input.1.0.info.gather(&read));
        drop(read);
        match state {
            None => values.iter_mut().for_each(|v| *v = *v + *v),
            Some(state) => {
                for (v, old) in values.iter_mut().zip(floats(&state.info.gather(&state.buffer))) {
                    *v += old;
                }
                state.info.scatter(&bytes(&values), &mut state.buffer);
            }
        }
        let mut out = output.0.buffer.write().map_err(|e| self.refuse(&e.to_string()))?;
        output.0.info.scatter(&bytes(&values), &mut out);
        Ok(())
    }

    /// The prompt, from the two inputs that every function has.
    fn prompt(&self, inputs: &[(String, FakeArray)]) -> Result<Vec<u32>, RuntimeError> {
        let values = |name: &str| -> Result<Vec<u32>, RuntimeError> {
            let (_, array) = inputs
                .iter()
                .find(|(n, _)| n == name)
                .ok_or_else(|| RuntimeError::failed(Call::Predict, format!("no input `{name}`")))?;
            let bytes = array.0.buffer.read().map_err(|e| self.refuse(&e.to_string()))?;
            let (words, _) = bytes.as_chunks::<4>();
            Ok(words.iter().map(|w| u32::from_le_bytes(*w)).collect())
        };
        let mut tokens = values("input_ids")?;
        let last = values("last_index")?.first().copied().unwrap_or(0) as usize;
        tokens.truncate(last + 1);
        Ok(tokens)
    }
}

/// Writes every live element; padding and rows of no token are NaN.
fn fill(bytes: &mut [u8], info: &ArrayInfo, part: Part, tokens: &[u32]) {
    const NAN: [u8; 2] = 0x7e00_u16.to_le_bytes();
    bytes.as_chunks_mut::<2>().0.fill(NAN);
    let (shape, strides) = (&info.shape, &info.strides_bytes);
    for layer in 0..shape[0] {
        for head in 0..shape[1] {
            for (row, &token) in tokens.iter().enumerate() {
                for lane in 0..shape[3] {
                    let at = layer * strides[0] + head * strides[1] + row * strides[2] + lane * strides[3];
                    let value = half::f16::from_f32(element(part, layer, head, row, lane, token));
                    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
    }
}

/// A well-mixed function of its argument (splitmix64).
fn splitmix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
