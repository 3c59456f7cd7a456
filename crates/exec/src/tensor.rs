//! Values while a program runs.
//!
//! A tensor is a view: shape and strides (in elements, never negative) over shared data, so that transposing,
//! slicing, splitting and reshaping mostly cost nothing. Float values are computed and kept as `f32`; those whose
//! type is fp16 have been rounded to fp16. Constants stay fp16 where they are, in the mapped weight file.

use std::sync::Arc;

use half::f16;
use kvbaton_kernels::rows::{self, Isa, Source};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::Package;
use kvbaton_mil::program::{BlobRef, Constant, ConstantData, DataType};
use rayon::prelude::*;

use crate::attention::Shown;
use crate::compressed::Compressed;
use crate::memory::{FloatBuf, Pool};

mod strides;
mod views;

pub(crate) use strides::{RowOffsets, packed_strides};

/// What the values of a tensor are stored as.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    /// Float values.
    Float(Arc<FloatBuf>),
    /// fp16 or fp32 constants in a weight file.
    Weights(Weights),
    /// fp16 values decompressed from a constant.
    Half(Arc<Vec<f16>>),
    /// A weight that is decompressed when it is used.
    Compressed(Arc<Compressed>),
    /// fp16 or fp32 values as they go in and come out: of an input, where the caller keeps them, or of an output.
    Given(Given),
    /// fp16 values of a state.
    State(Arc<Buffer>),
    /// Integers of up to 32 bits (unsigned 32-bit values wrap).
    Int(Arc<Vec<i32>>),
    /// Truth values.
    Bool(Arc<Vec<bool>>),
}

/// A float constant in one of the package's mapped files.
#[derive(Clone, Debug)]
pub(crate) struct Weights {
    package: Arc<Package>,
    blob: BlobRef,
    half: bool,
}

/// Float values in the form of inputs and outputs.
#[derive(Clone, Debug)]
pub(crate) struct Given {
    bytes: Bytes,
    half: bool,
    /// Whether the program made them: nobody else's memory.
    own: bool,
}

impl Given {
    fn source(&self) -> Source<'_> {
        let aligned = "alignment checked in Tensor::given";
        if self.half {
            Source::Halves(rows::as_halves(&self.bytes).expect(aligned))
        } else {
            Source::Singles(rows::as_singles(&self.bytes).expect(aligned))
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<usize>,
    /// Elements from one index to the next, for each dimension; 0 repeats.
    pub(crate) strides: Vec<usize>,
    /// The element that all indices 0 name.
    pub(crate) offset: usize,
    pub(crate) data: Data,
}

/// What evaluation may use.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(crate) isa: Isa,
    pub(crate) pool: Arc<Pool>,
    /// Of this run.
    pub(crate) shown: Arc<Shown>,
}

pub(crate) fn count(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Whether elements of this type are computed as floats.
pub(crate) fn is_float(dtype: DataType) -> bool {
    matches!(dtype, DataType::Float16 | DataType::Float32)
}

/// Little-endian integers or truth values, `None` for types of other kinds or widths.
pub(crate) fn integers(dtype: DataType, bytes: &[u8]) -> Option<Vec<i32>> {
    Some(match dtype {
        DataType::Bool | DataType::UInt8 => bytes.iter().map(|b| i32::from(*b)).collect(),
        #[expect(clippy::cast_possible_wrap, reason = "the byte is an i8")]
        DataType::Int8 => bytes.iter().map(|b| i32::from(*b as i8)).collect(),
        DataType::Int16 => bytes.as_chunks().0.iter().map(|b| i32::from(i16::from_le_bytes(*b))).collect(),
        DataType::UInt16 => bytes.as_chunks().0.iter().map(|b| i32::from(u16::from_le_bytes(*b))).collect(),
        DataType::Int32 | DataType::UInt32 => {
            bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)).collect()
        }
        _ => return None,
    })
}

impl Tensor {
    pub(crate) fn new(dtype: DataType, shape: Vec<usize>, data: Data) -> Tensor {
        Tensor { dtype, strides: packed_strides(&shape), shape, offset: 0, data }
    }

    pub(crate) fn floats(dtype: DataType, shape: Vec<usize>, values: FloatBuf) -> Tensor {
        debug_assert_eq!(count(&shape), values.len(), "as many values as the shape says");
        Tensor::new(dtype, shape, Data::Float(Arc::new(values)))
    }

    pub(crate) fn ints(dtype: DataType, shape: Vec<usize>, values: Vec<i32>) -> Tensor {
        Tensor::new(dtype, shape, Data::Int(Arc::new(values)))
    }

    pub(crate) fn bools(shape: Vec<usize>, values: Vec<bool>) -> Tensor {
        Tensor::new(DataType::Bool, shape, Data::Bool(Arc::new(values)))
    }

    /// A constant of the package; `None` when its type is not handled.
    pub(crate) fn constant(package: &Arc<Package>, constant: &Constant) -> Option<Tensor> {
        let shape = constant.ty.fixed_shape()?;
        let dtype = constant.ty.dtype;
        let bytes = package.constant_bytes(constant)?;
        let data = match (dtype, &constant.data) {
            (DataType::Float16, ConstantData::Blob(blob)) if rows::as_halves(bytes).is_some() => {
                Data::Weights(Weights { package: Arc::clone(package), blob: *blob, half: true })
            }
            (DataType::Float32, ConstantData::Blob(blob)) if rows::as_singles(bytes).is_some() => {
                Data::Weights(Weights { package: Arc::clone(package), blob: *blob, half: false })
            }
            (DataType::Float16, _) => Data::Float(Arc::new(FloatBuf::owned(
                bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            ))),
            (DataType::Float32, _) => Data::Float(Arc::new(FloatBuf::owned(
                bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            ))),
            (DataType::Bool, _) => Data::Bool(Arc::new(bytes.iter().map(|b| *b != 0).collect())),
            _ => Data::Int(Arc::new(integers(dtype, bytes)?)),
        };
        Some(Tensor::new(dtype, shape, data))
    }

    /// An fp16 or fp32 array where it is; `None` when its memory is not aligned for its elements, or it is of
    /// another type.
    pub(crate) fn given(dtype: DataType, shape: Vec<usize>, bytes: Bytes) -> Option<Tensor> {
        let half = match dtype {
            DataType::Float16 => rows::as_halves(&bytes).map(|_| true)?,
            DataType::Float32 => rows::as_singles(&bytes).map(|_| false)?,
            _ => return None,
        };
        Some(Tensor::new(dtype, shape, Data::Given(Given { bytes, half, own: false })))
    }

    /// fp16 values that the program has computed.
    pub(crate) fn halves(shape: Vec<usize>, buffer: Buffer) -> Tensor {
        let given = Given { bytes: Bytes::new(buffer), half: true, own: true };
        Tensor::new(DataType::Float16, shape, Data::Given(given))
    }

    /// The program's own bytes, if the view shows all of them in order as elements of `dtype`.
    pub(crate) fn own_bytes(&self, dtype: DataType) -> Option<Bytes> {
        match &self.data {
            Data::Given(g) if g.own && self.is_packed() && self.offset == 0 => {
                let whole = g.half && dtype == DataType::Float16 && self.count() * 2 == g.bytes.len();
                whole.then(|| g.bytes.clone())
            }
            _ => None,
        }
    }

    pub(crate) fn count(&self) -> usize {
        count(&self.shape)
    }

    /// Whether `other` shows the same elements of the same computed values.
    pub(crate) fn is_same(&self, other: &Tensor) -> bool {
        let (Data::Float(a), Data::Float(b)) = (&self.data, &other.data) else { return false };
        let form = |t: &Tensor| (t.offset, t.shape.clone(), t.strides.clone());
        Arc::ptr_eq(a, b) && form(self) == form(other)
    }

    pub(crate) fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The stored float values, all of them, whatever this view shows.
    ///
    /// # Errors
    ///
    /// When the tensor does not hold floats.
    pub(crate) fn source(&self) -> Result<Source<'_>, String> {
        match &self.data {
            Data::Float(values) => Ok(Source::Singles(values)),
            Data::Half(values) => Ok(Source::Halves(values)),
            Data::Given(given) => Ok(given.source()),
            Data::State(bytes) => {
                Ok(Source::Halves(rows::as_halves(bytes).expect("a buffer starts on a page")))
            }
            Data::Weights(w) => {
                let bytes = w.package.blob_bytes(w.blob);
                let aligned = "alignment checked in Tensor::constant";
                Ok(if w.half {
                    Source::Halves(rows::as_halves(bytes).expect(aligned))
                } else {
                    Source::Singles(rows::as_singles(bytes).expect(aligned))
                })
            }
            Data::Compressed(_) => Err("a compressed weight where its values are needed".to_owned()),
            Data::Int(_) | Data::Bool(_) => Err(format!("a {} tensor where floats are needed", self.dtype)),
        }
    }

    /// The tensor, decompressed if it was compressed.
    pub(crate) fn decompressed(&self, cx: &Context) -> Tensor {
        let Data::Compressed(weight) = &self.data else { return self.clone() };
        let mut values = cx.pool.take(weight.count());
        weight.copy_to(cx.isa, 0, &mut values);
        Tensor { data: Data::Float(Arc::new(values)), ..self.clone() }
    }

    /// Whether the view shows its elements one after the other.
    pub(crate) fn is_packed(&self) -> bool {
        self.is_packed_from(0)
    }

    /// Whether dimensions `from..` show their elements one after the other.
    pub(crate) fn is_packed_from(&self, from: usize) -> bool {
        let mut expected = 1;
        for (d, s) in self.shape.iter().zip(&self.strides).skip(from).rev() {
            if *d != 1 && *s != expected {
                return false;
            }
            expected *= d;
        }
        true
    }

    /// The view's float values in order, if they are stored so as `f32`.
    pub(crate) fn packed_singles(&self) -> Option<&[f32]> {
        match self.source() {
            Ok(Source::Singles(values)) if self.is_packed() => {
                Some(&values[self.offset..self.offset + self.count()])
            }
            _ => None,
        }
    }

    /// The same values as `f32`, one after the other; copies when they are not.
    pub(crate) fn to_packed(&self, cx: &Context) -> Result<Tensor, String> {
        if self.packed_singles().is_some() || (!is_float(self.dtype) && self.is_packed()) {
            return Ok(self.clone());
        }
        match &self.data {
            Data::Int(v) => {
                let values = self.indices().map(|i| v[i]).collect();
                Ok(Tensor::ints(self.dtype, self.shape.clone(), values))
            }
            Data::Bool(v) => Ok(Tensor::bools(self.shape.clone(), self.indices().map(|i| v[i]).collect())),
            Data::Float(_)
            | Data::Weights(_)
            | Data::Half(_)
            | Data::Compressed(_)
            | Data::Given(_)
            | Data::State(_) => {
                let mut values = cx.pool.take(self.count());
                self.copy_to(cx.isa, &mut values)?;
                Ok(Tensor::floats(self.dtype, self.shape.clone(), values))
            }
        }
    }

    /// Whether some elements are the same memory.
    pub(crate) fn repeats(&self) -> bool {
        self.shape.iter().zip(&self.strides).any(|(d, s)| *d > 1 && *s == 0)
    }

    /// The same values in memory that no other tensor sees and where each has its own place: this tensor's, if it
    /// has no other owner, or a copy.
    pub(crate) fn into_exclusive(mut self, cx: &Context) -> Result<Tensor, String> {
        let alone = match &mut self.data {
            Data::Float(values) => Arc::get_mut(values).is_some(),
            Data::State(bytes) => Arc::get_mut(bytes).is_some(),
            Data::Int(values) => Arc::get_mut(values).is_some(),
            Data::Bool(values) => Arc::get_mut(values).is_some(),
            Data::Weights(_) | Data::Half(_) | Data::Compressed(_) | Data::Given(_) => false,
        };
        if alone && !self.repeats() {
            return Ok(self);
        }
        Ok(match &self.data {
            Data::Int(_) => Tensor::ints(self.dtype, self.shape.clone(), self.int_values()?),
            Data::Bool(_) => Tensor::bools(self.shape.clone(), self.bool_values()?),
            Data::Float(_)
            | Data::Weights(_)
            | Data::Half(_)
            | Data::Compressed(_)
            | Data::Given(_)
            | Data::State(_) => {
                let mut values = cx.pool.take(self.count());
                self.copy_to(cx.isa, &mut values)?;
                Tensor::floats(self.dtype, self.shape.clone(), values)
            }
        })
    }

    /// As [`Tensor::into_exclusive`], and its elements one after the other.
    pub(crate) fn into_exclusive_packed(self, cx: &Context) -> Result<Tensor, String> {
        let packed = if self.is_packed() { self } else { self.to_packed(cx)? };
        packed.into_exclusive(cx)
    }

    /// Stored positions of the view's elements, in order.
    pub(crate) fn indices(&self) -> impl Iterator<Item = usize> + '_ {
        let mut index = vec![0usize; self.rank()];
        let mut at = self.offset;
        (0..self.count()).map(move |_| {
            let here = at;
            for d in (0..index.len()).rev() {
                index[d] += 1;
                at += self.strides[d];
                if index[d] < self.shape[d] {
                    break;
                }
                at -= self.strides[d] * self.shape[d];
                index[d] = 0;
            }
            here
        })
    }

    /// Writes the view's float values to `out` in order.
    pub(crate) fn copy_to(&self, isa: Isa, out: &mut [f32]) -> Result<(), String> {
        let source = self.source()?;
        // The longest inner part that is stored in one piece.
        let mut from = self.rank();
        while from > 0 && self.is_packed_from(from - 1) {
            from -= 1;
        }
        let run = count(&self.shape[from..]);
        if run == 0 || out.is_empty() {
            return Ok(());
        }
        let outer = RowOffsets::new(&self.shape[..from], &self.strides[..from], self.offset);
        let runs = (COPY_CHUNK / run).max(1);
        out.par_chunks_mut(runs * run).enumerate().for_each(|(c, out)| {
            for (i, out) in out.chunks_mut(run).enumerate() {
                let at = outer.get(c * runs + i);
                match source {
                    Source::Singles(v) => out.copy_from_slice(&v[at..at + run]),
                    Source::Halves(v) => rows::widen(isa, &v[at..at + run], out),
                    Source::Scalar(_) | Source::Destination => {}
                }
            }
        });
        Ok(())
    }

    /// Integers in order.
    pub(crate) fn int_values(&self) -> Result<Vec<i32>, String> {
        match &self.data {
            Data::Int(v) => Ok(self.indices().map(|i| v[i]).collect()),
            _ => Err(format!("a {} tensor where integers are needed", self.dtype)),
        }
    }

    /// Truth values in order.
    pub(crate) fn bool_values(&self) -> Result<Vec<bool>, String> {
        match &self.data {
            Data::Bool(v) => Ok(self.indices().map(|i| v[i]).collect()),
            _ => Err(format!("a {} tensor where truth values are needed", self.dtype)),
        }
    }

    /// The float values in order, as a vector: for small operands.
    pub(crate) fn float_values(&self, isa: Isa) -> Result<Vec<f32>, String> {
        let mut values = vec![0.0; self.count()];
        self.copy_to(isa, &mut values)?;
        Ok(values)
    }
}

/// Values a thread copies before the next task may be taken by another.
const COPY_CHUNK: usize = 1 << 14;
