//! The calls that a runtime must offer, and the plain data they speak in.

use std::fmt;
use std::path::{Path, PathBuf};

use kvbaton_layout::DType;
use kvbaton_memory::{Bytes, WritableBytes};
use serde::{Deserialize, Serialize};

use crate::{RuntimeError, SurfaceLimits, Units};

/// An element type that arrays of a runtime have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE 754 half precision.
    Float16,
    /// IEEE 754 single precision.
    Float32,
    /// Signed, 32 bits.
    Int32,
    /// Signed, 8 bits.
    Int8,
}

impl Element {
    /// Bytes of one element.
    pub fn size_bytes(self) -> usize {
        match self {
            Element::Int8 => 1,
            Element::Float16 => 2,
            Element::Float32 | Element::Int32 => 4,
        }
    }

    /// The type as caches have it; `None` of one that they do not have.
    pub fn dtype(self) -> Option<DType> {
        match self {
            Element::Float16 => Some(DType::Float16),
            Element::Float32 => Some(DType::Float32),
            Element::Int8 => Some(DType::Int8),
            Element::Int32 => None,
        }
    }
}

/// An array as its runtime describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayInfo {
    /// Type of its elements.
    pub element: Element,
    /// Elements along each dimension, outermost first.
    pub shape: Vec<usize>,
    /// Bytes from one element to the next along each dimension.
    pub strides_bytes: Vec<usize>,
    /// Bytes that may be read from the first element on.
    pub len_bytes: usize,
}

impl ArrayInfo {
    /// A packed row-major array.
    pub fn packed(element: Element, shape: &[usize]) -> ArrayInfo {
        ArrayInfo::with_rows(element, shape, 0)
    }

    /// A row-major array whose rows (the last dimension) start on multiples of `row_align_bytes`; 0 packs them.
    pub fn with_rows(element: Element, shape: &[usize], row_align_bytes: usize) -> ArrayInfo {
        let mut strides_bytes = vec![0; shape.len()];
        let mut stride = element.size_bytes();
        for (axis, &size) in shape.iter().enumerate().rev() {
            strides_bytes[axis] = stride;
            stride *= size;
            if axis + 1 == shape.len() {
                stride = stride.next_multiple_of(row_align_bytes.max(1));
            }
        }
        ArrayInfo { element, shape: shape.to_vec(), strides_bytes, len_bytes: stride }
    }

    /// An array as a runtime reports it: strides in elements, so many bytes behind its first element.
    ///
    /// # Errors
    ///
    /// When shape and strides differ in length, one of them is negative, or the strides reach beyond the bytes.
    pub fn reported(
        element: Element,
        shape: &[isize],
        strides: &[isize],
        have_bytes: Option<usize>,
    ) -> Result<ArrayInfo, RuntimeError> {
        let wrong = |what: String| RuntimeError::failed(Call::Describe, what);
        if shape.len() != strides.len() {
            return Err(wrong(format!("{} dimensions have {} strides", shape.len(), strides.len())));
        }
        let size = element.size_bytes();
        let mut info = ArrayInfo {
            element,
            shape: Vec::with_capacity(shape.len()),
            strides_bytes: Vec::with_capacity(shape.len()),
            len_bytes: size,
        };
        for (&n, &stride) in shape.iter().zip(strides) {
            let (Ok(n), Ok(stride)) = (usize::try_from(n), usize::try_from(stride)) else {
                return Err(wrong(format!("a dimension of {n} elements has the stride {stride}")));
            };
            let stride = stride.saturating_mul(size);
            info.shape.push(n);
            info.strides_bytes.push(stride);
            info.len_bytes = info.len_bytes.saturating_add(stride.saturating_mul(n.saturating_sub(1)));
        }
        if info.shape.contains(&0) {
            info.len_bytes = 0;
        }
        match have_bytes {
            Some(have) if info.len_bytes > have => {
                Err(wrong(format!("the strides reach byte {}, the array has {have}", info.len_bytes)))
            }
            _ => Ok(info),
        }
    }

    /// Bytes of all elements without padding.
    pub fn packed_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.element.size_bytes()
    }

    /// Writes `packed` row-major elements where this array has them; padding is left as it is.
    ///
    /// # Panics
    ///
    /// When either slice is shorter than the array.
    pub fn scatter(&self, packed: &[u8], array: &mut [u8]) {
        let (run, starts) = self.runs();
        for (elements, at) in packed[..self.packed_bytes()].chunks_exact(run).zip(starts) {
            array[at..at + run].copy_from_slice(elements);
        }
    }

    /// The elements of `array` without padding, row-major.
    ///
    /// # Panics
    ///
    /// When the slice is shorter than the array.
    pub fn gather(&self, array: &[u8]) -> Vec<u8> {
        let (run, starts) = self.runs();
        let mut packed = Vec::with_capacity(self.packed_bytes());
        for at in starts {
            packed.extend_from_slice(&array[at..at + run]);
        }
        packed
    }

    /// Bytes of a run of elements that lie side by side, and where each run starts, row-major.
    fn runs(&self) -> (usize, impl Iterator<Item = usize> + '_) {
        let (mut run, mut outer) = (self.element.size_bytes(), self.shape.len());
        while outer > 0 && self.strides_bytes[outer - 1] == run && self.shape[outer - 1] > 0 {
            outer -= 1;
            run *= self.shape[outer];
        }
        let starts = (0..self.shape[..outer].iter().product::<usize>()).map(move |mut index| {
            let mut at = 0;
            for (&n, &stride) in self.shape[..outer].iter().zip(&self.strides_bytes).rev() {
                at += index % n * stride;
                index /= n;
            }
            at
        });
        (run, starts)
    }
}

/// Where an array lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// A surface, which the Neural Engine and the GPU write directly.
    Surface,
    /// Page-aligned memory of the process.
    Heap,
    /// Wherever the runtime chose.
    Own,
}

/// What to load of a package, and for what.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LoadConfig {
    /// Where it may run.
    pub units: Units,
    /// The function; the default one when absent.
    pub function: Option<String>,
    /// Whether to say that input shapes change rarely: without it, ranges of shapes stay off the Neural Engine.
    pub rare_shapes: bool,
}

impl LoadConfig {
    /// What `system` can be asked for: everything that it knows, and an error for what cannot be left out.
    ///
    /// # Errors
    ///
    /// When the system is too old for the units or for naming a function.
    pub fn for_system(
        units: Units,
        function: Option<&str>,
        system: &System,
    ) -> Result<LoadConfig, RuntimeError> {
        if units == Units::CpuAndNe {
            system.require("compute units cpu-and-ne", (13, 0))?;
        }
        if function.is_some() {
            system.require("a package of several functions", (15, 0))?;
        }
        let rare_shapes = system.has((14, 4));
        Ok(LoadConfig { units, function: function.map(str::to_owned), rare_shapes })
    }
}

/// An operation of a compute plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Its kind, as MIL calls it.
    pub kind: String,
    /// `ne`, `gpu` or `cpu`: where it is preferred; `None` where the plan does not say.
    pub device: Option<&'static str>,
    /// Its share of the whole estimated cost; `None` where the plan does not say.
    pub cost: Option<f64>,
}

/// The system that a runtime belongs to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct System {
    /// `macos`, `fake`.
    pub name: String,
    /// Major and minor version.
    pub version: (u32, u32),
    /// The build, in the system's own words.
    pub build: String,
}

impl System {
    /// Whether it is of `version` or later.
    pub fn has(&self, version: (u32, u32)) -> bool {
        self.version >= version
    }

    /// Refuses `what` before `version`: there, the call would end the process.
    ///
    /// # Errors
    ///
    /// When the system is older.
    pub fn require(&self, what: &'static str, version: (u32, u32)) -> Result<(), RuntimeError> {
        if self.has(version) {
            return Ok(());
        }
        Err(RuntimeError::TooOld { what, needs: version, have: self.version })
    }
}

/// The kinds of calls, for messages and for injected failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "each is the method of `Runtime` of that name")]
pub enum Call {
    Compile,
    Load,
    Plan,
    Input,
    Backing,
    Predict,
    Describe,
    Lock,
    NewState,
    ReadState,
    WriteState,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Call::Compile => "compiling the package",
            Call::Load => "loading the model",
            Call::Plan => "reading the compute plan",
            Call::Input => "making an input",
            Call::Backing => "allocating an output",
            Call::Predict => "the prediction",
            Call::Describe => "describing an output",
            Call::Lock => "locking an output",
            Call::NewState => "making a state",
            Call::ReadState => "reading a state",
            Call::WriteState => "writing a state",
        })
    }
}

/// A runtime of packages: Core ML, or a fake of it.
///
/// All calls come from one thread, the session's worker. An implementation takes no decisions: it makes the call and
/// hands on what came back.
pub trait Runtime: 'static {
    /// `coreml`, `fake`.
    const NAME: &'static str;

    /// A loaded function.
    type Model;
    /// An array; cloning copies the handle.
    type Array: Clone;
    /// The state of a stateful function.
    type State;

    /// Runs one job of the session's worker, with whatever a runtime wants around its calls.
    fn around(job: impl FnOnce()) {
        job();
    }

    /// The system.
    fn system(&self) -> System;

    /// How large a surface may be, asked of the system.
    fn surface_limits(&self) -> SurfaceLimits;

    /// Compiles a package and returns where the result lies, in a temporary folder that the caller now owns.
    ///
    /// # Errors
    ///
    /// When the package cannot be compiled.
    fn compile(&mut self, package: &Path) -> Result<PathBuf, RuntimeError>;

    /// Loads a function of a compiled model. The Neural Engine's own compilation happens in here.
    ///
    /// # Errors
    ///
    /// When it cannot be loaded, or the system is too old for what is asked.
    fn load(&mut self, compiled: &Path, config: &LoadConfig) -> Result<Self::Model, RuntimeError>;

    /// What would run where.
    ///
    /// # Errors
    ///
    /// When the system cannot say.
    fn plan(&mut self, compiled: &Path, config: &LoadConfig) -> Result<Vec<Operation>, RuntimeError>;

    /// An array with packed `bytes` as an input.
    ///
    /// # Errors
    ///
    /// When it cannot be allocated.
    fn input(&mut self, info: &ArrayInfo, bytes: &[u8]) -> Result<Self::Array, RuntimeError>;

    /// An array to be proposed as an output's backing.
    ///
    /// # Errors
    ///
    /// When it cannot be allocated there.
    fn backing(
        &mut self,
        element: Element,
        shape: &[usize],
        memory: Memory,
    ) -> Result<Self::Array, RuntimeError>;

    /// A packed array on memory of somebody else, to be proposed as an output's backing. It is given back once the
    /// runtime and every reader have let go of the array.
    ///
    /// # Errors
    ///
    /// When no array can be made of it.
    fn backing_on(
        &mut self,
        element: Element,
        shape: &[usize],
        memory: WritableBytes,
    ) -> Result<Self::Array, RuntimeError>;

    /// Runs a function. The outputs may be the backings, or may not. A state that is given belongs to this one
    /// prediction until it returns; after a failure nothing is known of what it holds.
    ///
    /// # Errors
    ///
    /// When the prediction fails.
    fn predict(
        &mut self,
        model: &mut Self::Model,
        inputs: &[(String, Self::Array)],
        backings: &[(String, Self::Array)],
        state: Option<&mut Self::State>,
    ) -> Result<Vec<(String, Self::Array)>, RuntimeError>;

    /// Whether two handles are of one array: how the use of a backing is known.
    fn is_same(&self, left: &Self::Array, right: &Self::Array) -> bool;

    /// The array's type, shape and strides as the runtime reports them now.
    ///
    /// # Errors
    ///
    /// When its elements are of a type that no output has.
    fn describe(&mut self, array: &Self::Array) -> Result<ArrayInfo, RuntimeError>;

    /// The array's `len_bytes` bytes, readable until the last handle on them is dropped.
    ///
    /// # Errors
    ///
    /// When they cannot be locked.
    fn lock(&mut self, array: &Self::Array, info: &ArrayInfo) -> Result<Bytes, RuntimeError>;

    /// A zeroed state.
    ///
    /// # Errors
    ///
    /// When the model has none.
    fn new_state(&mut self, model: &mut Self::Model) -> Result<Self::State, RuntimeError>;

    /// Lets `read` see the tensor `name` of a state, which may lie elsewhere the next time.
    ///
    /// # Errors
    ///
    /// When the state has no such tensor.
    fn read_state(
        &mut self,
        state: &mut Self::State,
        name: &str,
        read: &mut dyn FnMut(&ArrayInfo, &[u8]),
    ) -> Result<(), RuntimeError>;

    /// Lets `write` change the tensor `name` of a state.
    ///
    /// # Errors
    ///
    /// As [`Runtime::read_state`].
    fn write_state(
        &mut self,
        state: &mut Self::State,
        name: &str,
        write: &mut dyn FnMut(&ArrayInfo, &mut [u8]),
    ) -> Result<(), RuntimeError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_as_reported_are_checked_against_the_bytes_there_are() {
        // A Neural Engine's output: rows of 200 float16, 224 apart.
        let info = ArrayInfo::reported(Element::Float16, &[2, 3, 200], &[672, 224, 1], Some(2688)).unwrap();
        assert_eq!((info.strides_bytes, info.len_bytes), (vec![1344, 448, 2], 2 * (5 * 224 + 200)));
        for (shape, strides, have) in [
            (&[2, 3][..], &[3][..], None),
            (&[2, -3], &[3, 1], None),
            (&[2, 3], &[3, -1], None),
            (&[2, 3], &[4, 1], Some(13)),
            (&[isize::MAX, 3], &[isize::MAX, 1], Some(100)),
        ] {
            assert!(
                ArrayInfo::reported(Element::Float16, shape, strides, have).is_err(),
                "{shape:?} {strides:?}"
            );
        }
        assert_eq!(ArrayInfo::reported(Element::Int8, &[3, 0], &[1, 1], Some(0)).unwrap().len_bytes, 0);
    }

    #[test]
    fn scatter_and_gather_step_over_padding() {
        let info = ArrayInfo::with_rows(Element::Int32, &[2, 3, 2], 12);
        let packed: Vec<u8> = (0..48).collect();
        let mut array = vec![0xff; info.len_bytes];
        info.scatter(&packed, &mut array);
        assert_eq!(array[..24], [&packed[..8], &[0xff; 4], &packed[8..16], &[0xff; 4]].concat());
        assert_eq!(info.gather(&array), packed);
        let scalar = ArrayInfo::packed(Element::Float16, &[]);
        assert_eq!(scalar.gather(&[1, 2]), [1, 2]);
    }

    #[test]
    fn old_systems_are_asked_for_nothing_they_lack() {
        let system =
            |major, minor| System { name: "macos".to_owned(), version: (major, minor), build: String::new() };
        let config = |units, function, major, minor| {
            LoadConfig::for_system(units, function, &system(major, minor)).map_err(|e| e.to_string())
        };
        assert!(!config(Units::All, None, 14, 3).unwrap().rare_shapes);
        assert!(config(Units::All, None, 14, 4).unwrap().rare_shapes);
        assert_eq!(
            config(Units::CpuAndNe, None, 12, 6).unwrap_err(),
            "compute units cpu-and-ne needs macOS 13.0, this is 12.6"
        );
        assert!(config(Units::Cpu, Some("prefill"), 14, 7).unwrap_err().contains("needs macOS 15.0"));
        assert!(config(Units::Cpu, Some("prefill"), 26, 0).is_ok());
    }
}
