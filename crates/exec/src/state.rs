//! States: tensors that live from one run of a program to the next.

use std::sync::Arc;

use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::program::{DataType, Dim, TensorType};

use crate::array::Array;
use crate::error::ExecError;
use crate::exchange::{decode, encode};
use crate::executable::Feature;
use crate::tensor::{Context, Data, Tensor};

/// The states of a function, each a packed array of the program's type; made by
/// [`Executable::new_state`](crate::Executable::new_state).
///
/// A run takes fp16 states (Core ML has no others) without copying them, updates them in place where the program
/// does, and puts them back. A run that fails loses the states it took: they are refused until they are set or
/// cleared.
#[derive(Debug)]
pub struct State {
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    feature: Feature,
    shape: Vec<usize>,
    /// `None` after a run that failed.
    bytes: Option<Arc<Buffer>>,
}

/// Bytes of a state that an [`Array`] shares.
struct Shared(Arc<Buffer>);

impl std::ops::Deref for Shared {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

fn zeros(feature: &Feature, shape: &[usize]) -> Arc<Buffer> {
    let element = feature.ty.dtype.bits().unwrap_or(8) / 8;
    Arc::new(Buffer::zeroed(shape.iter().product::<usize>() * element))
}

impl State {
    /// States of these types, zeroed.
    pub(crate) fn new(features: &[Feature]) -> Result<State, ExecError> {
        let slots = features.iter().map(|feature| {
            let shape = feature.ty.fixed_shape().ok_or_else(|| ExecError::StateType {
                name: feature.name.clone(),
                expected: feature.ty.clone(),
                have: feature.ty.clone(),
            })?;
            Ok::<_, ExecError>(Slot { bytes: Some(zeros(feature, &shape)), feature: feature.clone(), shape })
        });
        Ok(State { slots: slots.collect::<Result<_, _>>()? })
    }

    /// Names and types, in the function's order.
    pub fn features(&self) -> impl ExactSizeIterator<Item = &Feature> {
        self.slots.iter().map(|slot| &slot.feature)
    }

    fn slot(&mut self, name: &str) -> Result<&mut Slot, ExecError> {
        match self.slots.iter().position(|s| s.feature.name == name) {
            Some(i) => Ok(&mut self.slots[i]),
            None => Err(self.unknown(name)),
        }
    }

    fn unknown(&self, name: &str) -> ExecError {
        let expected = self.features().map(|f| f.name.clone()).collect();
        ExecError::UnknownState { name: name.to_owned(), expected }
    }

    fn held(&self, name: &str) -> Result<(&Slot, &Arc<Buffer>), ExecError> {
        let slot = self.slots.iter().find(|s| s.feature.name == name).ok_or_else(|| self.unknown(name))?;
        let bytes = slot.bytes.as_ref();
        bytes.map(|b| (slot, b)).ok_or_else(|| ExecError::StateLost { name: name.to_owned() })
    }

    /// The elements of a state, little endian and packed.
    ///
    /// # Errors
    ///
    /// When there is no such state, or a run that failed lost it.
    pub fn bytes(&self, name: &str) -> Result<&[u8], ExecError> {
        Ok(self.held(name)?.1)
    }

    /// The elements of a state, to write. Copies them first if an array of [`State::array`] still shares them.
    ///
    /// # Errors
    ///
    /// As [`State::bytes`].
    pub fn bytes_mut(&mut self, name: &str) -> Result<&mut [u8], ExecError> {
        self.held(name)?;
        let held = self.slot(name)?.bytes.as_mut().expect("held, as checked above");
        if Arc::get_mut(held).is_none() {
            *held = Arc::new(Buffer::copy_of(held));
        }
        Ok(Arc::get_mut(held).expect("the only owner, as made above"))
    }

    /// The elements of every state, to write, in the function's order. Copies those that an array of [`State::array`]
    /// still shares.
    ///
    /// # Errors
    ///
    /// When a run that failed lost a state.
    pub fn all_mut(&mut self) -> Result<Vec<(&Feature, &mut [u8])>, ExecError> {
        let mut all = Vec::new();
        for slot in &mut self.slots {
            let lost = ExecError::StateLost { name: slot.feature.name.clone() };
            let held = slot.bytes.as_mut().ok_or(lost)?;
            if Arc::get_mut(held).is_none() {
                *held = Arc::new(Buffer::copy_of(held));
            }
            let bytes: &mut [u8] = Arc::get_mut(held).expect("the only owner, as made above");
            all.push((&slot.feature, bytes));
        }
        Ok(all)
    }

    /// A state as an array that shares its memory. While the array lives, the next update copies the state.
    ///
    /// # Errors
    ///
    /// As [`State::bytes`].
    pub fn array(&self, name: &str) -> Result<Array, ExecError> {
        let (slot, bytes) = self.held(name)?;
        let bytes = Bytes::new(Shared(Arc::clone(bytes)));
        Ok(Array::new(slot.feature.ty.dtype, slot.shape.clone(), bytes).expect("made to its type"))
    }

    /// Sets a state to the values of `array`.
    ///
    /// # Errors
    ///
    /// When there is no such state, or its type or shape is another.
    pub fn set(&mut self, name: &str, array: &Array) -> Result<(), ExecError> {
        let slot = self.slot(name)?;
        if array.dtype() != slot.feature.ty.dtype || array.shape() != slot.shape {
            let shape = array.shape().iter().map(|n| Dim::Fixed(*n)).collect();
            return Err(ExecError::StateType {
                name: name.to_owned(),
                expected: slot.feature.ty.clone(),
                have: TensorType { dtype: array.dtype(), shape },
            });
        }
        match slot.bytes.as_mut().and_then(Arc::get_mut) {
            Some(bytes) => bytes.copy_from_slice(array.bytes()),
            None => slot.bytes = Some(Arc::new(Buffer::copy_of(array.bytes()))),
        }
        Ok(())
    }

    /// Sets every state to zeros, those that a failed run lost included.
    pub fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.bytes = Some(zeros(&slot.feature, &slot.shape));
        }
    }

    /// Whether the state that a function has is here.
    pub(crate) fn check(&self, wanted: &Feature) -> Result<(), ExecError> {
        let (slot, _) = self.held(&wanted.name)?;
        if slot.feature.ty == wanted.ty {
            return Ok(());
        }
        Err(ExecError::StateType {
            name: wanted.name.clone(),
            expected: wanted.ty.clone(),
            have: slot.feature.ty.clone(),
        })
    }

    /// Takes a state out, for a run: its values, owned by nobody else if nobody shares them.
    pub(crate) fn take(&mut self, cx: &Context, wanted: &Feature) -> Result<Tensor, ExecError> {
        let slot = self.slot(&wanted.name)?;
        let (dtype, shape) = (wanted.ty.dtype, slot.shape.clone());
        let lost = || ExecError::StateLost { name: wanted.name.clone() };
        if dtype == DataType::Float16 {
            let bytes = slot.bytes.take().ok_or_else(lost)?;
            return Ok(Tensor::new(dtype, shape, Data::State(bytes)));
        }
        let bytes = slot.bytes.as_ref().ok_or_else(lost)?;
        let tensor = decode(cx, dtype, &shape, bytes).expect("types of states are checked at load");
        slot.bytes = None;
        Ok(tensor)
    }

    /// Puts a state back after a run.
    pub(crate) fn put(&mut self, cx: &Context, name: &str, tensor: Tensor) -> Result<(), String> {
        let slot = self.slot(name).map_err(|e| e.to_string())?;
        let whole = tensor.shape == slot.shape && tensor.offset == 0 && tensor.is_packed();
        slot.bytes = Some(match tensor.data {
            Data::State(bytes) if whole => bytes,
            _ => Arc::new(encode(cx, &slot.feature.ty, &tensor)?),
        });
        Ok(())
    }
}
