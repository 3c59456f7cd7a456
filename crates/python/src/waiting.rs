//! Long calls of an engine, told of to a Python callable.

use std::sync::Arc;
use std::time::Duration;

use kvbaton::Waiting;
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

/// Calls `on_wait` with what is waited for, and the seconds so far.
pub(crate) fn waiting(on_wait: Py<PyAny>) -> Waiting {
    Arc::new(move |what: &str, waited: Duration| {
        Python::attach(|py| {
            if let Err(raised) = on_wait.call1(py, (what, waited.as_secs_f64())) {
                put_by(py, raised, on_wait.bind(py));
            }
        });
    })
}

/// What a callable raises while an engine is waited for cannot end the engine's call: it is reported as Python reports what
/// it cannot raise. An interrupt is put off until the call has returned.
fn put_by(py: Python<'_>, raised: PyErr, on_wait: &Bound<'_, PyAny>) {
    let interrupt = raised.is_instance_of::<PyKeyboardInterrupt>(py);
    if !(interrupt && interrupt_later(py).unwrap_or(false)) {
        raised.write_unraisable(py, Some(on_wait));
    }
}

/// Interrupts Python once it runs again; false where nobody in Python handles interrupts.
fn interrupt_later(py: Python<'_>) -> PyResult<bool> {
    let signal = py.import("signal")?;
    let handled = signal.call_method1("getsignal", (signal.getattr("SIGINT")?,))?.is_callable();
    if handled {
        py.import("_thread")?.call_method0("interrupt_main")?;
    }
    Ok(handled)
}
