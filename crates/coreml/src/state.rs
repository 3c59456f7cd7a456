//! States: reachable inside a handler alone, never during a prediction.

use std::cell::RefCell;
use std::ptr::NonNull;

use block2::RcBlock;
use kvbaton_runtime::{ArrayInfo, Call, RuntimeError};
use objc2_core_ml::{MLMultiArray, MLState};
use objc2_foundation::NSString;

use crate::arrays;

pub(crate) fn read(
    state: &MLState,
    name: &str,
    read: &mut dyn FnMut(&ArrayInfo, &[u8]),
) -> Result<(), RuntimeError> {
    with_tensor(state, name, Call::ReadState, &mut |multi| arrays::read(multi, Call::ReadState, read))
}

pub(crate) fn write(
    state: &MLState,
    name: &str,
    write: &mut dyn FnMut(&ArrayInfo, &mut [u8]),
) -> Result<(), RuntimeError> {
    with_tensor(state, name, Call::WriteState, &mut |multi| arrays::write(multi, Call::WriteState, write))
}

fn with_tensor(
    state: &MLState,
    name: &str,
    call: Call,
    work: &mut dyn FnMut(&MLMultiArray) -> Result<(), RuntimeError>,
) -> Result<(), RuntimeError> {
    let outcome = RefCell::new(Err(RuntimeError::failed(call, format!("the state has no `{name}`"))));
    let work = RefCell::new(work);
    let handler = RcBlock::new(|tensor: NonNull<MLMultiArray>| {
        // SAFETY: Core ML passes a valid array that lives as long as this call; no prediction runs, since predictions
        // and states share one thread.
        let tensor = unsafe { tensor.as_ref() };
        *outcome.borrow_mut() = (work.borrow_mut())(tensor);
    });
    // SAFETY: the handler is called before this returns, so what it borrows is alive.
    unsafe { state.getMultiArrayForStateNamed_handler(&NSString::from_str(name), &handler) };
    drop(handler);
    outcome.into_inner()
}
