//! Multi-arrays: what they say of themselves, and inputs.

use std::cell::RefCell;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use block2::RcBlock;
use kvbaton_runtime::{ArrayInfo, Call, Element, RuntimeError};
use objc2::AnyThread;
use objc2::rc::Retained;
use objc2_core_ml::{MLMultiArray, MLMultiArrayDataType};
use objc2_core_video::CVPixelBuffer;
use objc2_foundation::{NSArray, NSInteger, NSNumber};

use crate::failed;
use crate::storage::HeapBlock;

/// A multi-array, and the memory that it was given.
#[derive(Clone)]
pub struct Array {
    pub(crate) multi: Retained<MLMultiArray>,
    pub(crate) heap: Option<Arc<HeapBlock>>,
}

impl Array {
    /// An array that Core ML made.
    pub(crate) fn own(multi: Retained<MLMultiArray>) -> Array {
        Array { multi, heap: None }
    }

    /// The image that it lies in.
    pub(crate) fn pixels(&self) -> Option<Retained<CVPixelBuffer>> {
        // SAFETY: a property of a valid array.
        unsafe { self.multi.pixelBuffer() }
    }

    /// The same object, or another one on the same image.
    pub(crate) fn is_same(&self, other: &Array) -> bool {
        let same_image = match (self.pixels(), other.pixels()) {
            (Some(left), Some(right)) => std::ptr::eq(&*left, &*right),
            _ => false,
        };
        std::ptr::eq(&*self.multi, &*other.multi) || same_image
    }

    /// Type, shape and strides.
    pub(crate) fn describe(&self) -> Result<ArrayInfo, RuntimeError> {
        describe(&self.multi, None)
    }
}

/// An array's description; `bytes` is how many lie behind its first element, where that is known.
pub(crate) fn describe(multi: &MLMultiArray, bytes: Option<usize>) -> Result<ArrayInfo, RuntimeError> {
    // SAFETY: properties of a valid array.
    let (data_type, shape, strides) = unsafe { (multi.dataType(), multi.shape(), multi.strides()) };
    ArrayInfo::reported(element(data_type)?, &numbers(&shape), &numbers(&strides), bytes)
}

fn element(data_type: MLMultiArrayDataType) -> Result<Element, RuntimeError> {
    [Element::Float16, Element::Float32, Element::Int32, Element::Int8]
        .into_iter()
        .find(|&e| self::data_type(e) == data_type)
        .ok_or_else(|| RuntimeError::failed(Call::Describe, format!("elements of type {:#x}", data_type.0)))
}

/// Core ML's name of an element type.
pub(crate) fn data_type(element: Element) -> MLMultiArrayDataType {
    match element {
        Element::Float16 => MLMultiArrayDataType::Float16,
        Element::Float32 => MLMultiArrayDataType::Float32,
        Element::Int32 => MLMultiArrayDataType::Int32,
        Element::Int8 => MLMultiArrayDataType::Int8,
    }
}

pub(crate) fn numbers(array: &NSArray<NSNumber>) -> Vec<isize> {
    array.iter().map(|n| n.integerValue()).collect()
}

pub(crate) fn list(values: &[usize]) -> Retained<NSArray<NSNumber>> {
    let numbers: Vec<_> = values.iter().map(|&n| NSNumber::new_usize(n)).collect();
    NSArray::from_retained_slice(&numbers)
}

/// An array of Core ML's own with `packed` values.
pub(crate) fn input(info: &ArrayInfo, packed: &[u8]) -> Result<Array, RuntimeError> {
    let (shape, data_type) = (list(&info.shape), data_type(info.element));
    // SAFETY: shape and type are valid; the array owns its memory.
    let multi =
        unsafe { MLMultiArray::initWithShape_dataType_error(MLMultiArray::alloc(), &shape, data_type) }
            .map_err(failed(Call::Input))?;
    write(&multi, Call::Input, &mut |info, bytes| info.scatter(packed, bytes))?;
    Ok(Array::own(multi))
}

/// Lets `write` change an array's bytes. The array may move them to other memory, with other strides, before it does.
pub(crate) fn write(
    multi: &MLMultiArray,
    call: Call,
    write: &mut dyn FnMut(&ArrayInfo, &mut [u8]),
) -> Result<(), RuntimeError> {
    let outcome = RefCell::new(Err(RuntimeError::failed(call, "its bytes cannot be had")));
    let write = RefCell::new(write);
    // SAFETY: properties of a valid array.
    let (data_type, shape) = unsafe { (multi.dataType(), multi.shape()) };
    let handler =
        RcBlock::new(|bytes: NonNull<c_void>, size: NSInteger, strides: NonNull<NSArray<NSNumber>>| {
            let have = usize::try_from(size).unwrap_or(0);
            // SAFETY: Core ML passes valid strides that live as long as this call.
            let strides = numbers(unsafe { strides.as_ref() });
            let described = element(data_type)
                .and_then(|e| ArrayInfo::reported(e, &numbers(&shape), &strides, Some(have)));
            *outcome.borrow_mut() = described.map(|info| {
                // SAFETY: Core ML passes `size` bytes that nobody else uses during this call.
                let bytes = unsafe { std::slice::from_raw_parts_mut(bytes.as_ptr().cast(), have) };
                (write.borrow_mut())(&info, bytes);
            });
        });
    // SAFETY: the handler is called before this returns, so what it borrows is alive.
    unsafe { multi.getMutableBytesWithHandler(&handler) };
    drop(handler);
    outcome.into_inner()
}

/// Lets `read` see an array's bytes.
pub(crate) fn read(
    multi: &MLMultiArray,
    call: Call,
    read: &mut dyn FnMut(&ArrayInfo, &[u8]),
) -> Result<(), RuntimeError> {
    let outcome = RefCell::new(Err(RuntimeError::failed(call, "its bytes cannot be had")));
    let read = RefCell::new(read);
    let handler = RcBlock::new(|bytes: NonNull<c_void>, size: NSInteger| {
        let have = usize::try_from(size).unwrap_or(0);
        *outcome.borrow_mut() = describe(multi, Some(have)).map(|info| {
            // SAFETY: Core ML passes `size` bytes that nobody writes during this call.
            let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), have) };
            (read.borrow_mut())(&info, bytes);
        });
    });
    // SAFETY: the handler is called before this returns, so what it borrows is alive.
    unsafe { multi.getBytesWithHandler(&handler) };
    drop(handler);
    outcome.into_inner()
}
