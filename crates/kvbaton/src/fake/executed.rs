//! What lets a fake runtime run real packages: the executor behind its calls.

use std::path::Path;
use std::sync::Arc;

use kvbaton_exec::{Array, Executable, Feature, Options, State};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::Package;
use kvbaton_runtime::fake::{FakeRuntime, Habits, Program, Programs, Tally, Values};
use kvbaton_runtime::{ArrayInfo, Session};

use crate::engine::open_prefill_on;
use crate::tensors::{data_type_of, element_of};
use crate::{EngineOptions, Error, Prefill};

/// Programs for [`FakeRuntime::computing`](kvbaton_runtime::fake::FakeRuntime::computing) that the executor runs: the
/// runtime keeps its habits, and its outputs are the executor's.
pub fn executed(threads: usize) -> Programs {
    Arc::new(move |path: &Path, function: Option<&str>| {
        let package = Arc::new(Package::open(path).map_err(|e| e.to_string())?);
        let only = package.program().functions.keys().next().cloned().unwrap_or_default();
        let function = function.unwrap_or(&only);
        let options = Options::with_threads(threads);
        let program = Executable::load(package.clone(), function, &options).map_err(|e| e.to_string())?;
        let state = program.new_state().map_err(|e| e.to_string())?;
        Ok(Box::new(Executed { program, state }) as Box<dyn Program>)
    })
}

/// Opens a package or a chain of them as it is opened on Core ML, with the fake of it in Core ML's place: every package has
/// a runtime of its own with these habits, and `options.cpu.threads` of the executor behind its calls.
///
/// # Errors
///
/// As [`open_prefill`](crate::open_prefill).
pub fn open_on_runtime(
    path: &Path,
    habits: Habits,
    options: EngineOptions,
) -> Result<Box<dyn Prefill>, Error> {
    let programs = executed(options.cpu.threads);
    open_prefill_on(path, options, || {
        let (habits, programs, tally) = (habits.clone(), programs.clone(), Arc::new(Tally::default()));
        Session::new(move || FakeRuntime::new(habits.clone(), tally.clone()).computing(programs.clone()))
    })
}

struct Executed {
    program: Executable,
    state: State,
}

impl Program for Executed {
    fn states(&self) -> Vec<(String, ArrayInfo)> {
        self.program.states().iter().filter_map(|f| Some((f.name.clone(), info(f)?))).collect()
    }

    fn run(
        &mut self,
        inputs: &[Values],
        states: &mut [Values],
        wanted: &[(String, ArrayInfo)],
        leave: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), String> {
        let mut arrays = Vec::new();
        for (name, info, bytes) in inputs {
            let bytes = Bytes::new(Buffer::copy_of(bytes));
            let array = Array::new(data_type_of(info.element), info.shape.clone(), bytes);
            arrays.push((name.as_str(), array.map_err(|e| e.to_string())?));
        }
        for (name, _, bytes) in &*states {
            self.state.bytes_mut(name).map_err(|e| e.to_string())?.copy_from_slice(bytes);
        }
        let outputs = self.program.run_with(&arrays, &mut self.state).map_err(|e| e.to_string())?;
        for (name, _, bytes) in states {
            bytes.copy_from_slice(self.state.bytes(name).map_err(|e| e.to_string())?);
        }
        for (index, (name, _)) in wanted.iter().enumerate() {
            let output = outputs.iter().find(|(n, _)| n == name);
            let (_, array) = output.ok_or_else(|| format!("no output `{name}`"))?;
            leave(index, array.bytes());
        }
        Ok(())
    }
}

fn info(feature: &Feature) -> Option<ArrayInfo> {
    Some(ArrayInfo::packed(element_of(feature.ty.dtype)?, &feature.ty.fixed_shape()?))
}
