//! `read_state` and `write_state` (coremltools' `coreml_update_state` is both): names for versions of a state.
//!
//! They compute nothing. A state is a value like others, of which the program has several versions.

use std::collections::HashMap;

use kvbaton_mil::program::{Argument, ValueId};

use super::{Form, Operand, Reason};

/// MIL's names of the operations.
pub(crate) const NAMES: [&str; 2] = ["read_state", "write_state"];

/// What an operation says of a state.
#[derive(Debug)]
pub(crate) enum Named {
    /// `result` stands for the current version.
    Read { result: ValueId, version: Operand },
    /// `version` is the current one from here on.
    Written { state: ValueId, version: Operand },
}

/// Reads the operation; `versions` has the current one of each state.
pub(crate) fn name(form: &mut Form<'_>, versions: &HashMap<ValueId, Operand>) -> Result<Named, Reason> {
    let state = match form.argument("input") {
        Some(Argument::Value(id)) if versions.contains_key(id) => *id,
        _ => return Err("`input` is not a state of the function".to_owned()),
    };
    let ty = form.function.tensor(state).ok_or("`input` is no tensor")?;
    if form.op.kind == "read_state" {
        let [result] = form.op.outputs.as_slice() else { return Err("has not one result".to_owned()) };
        if form.function.tensor(*result).is_none_or(|result| result != ty) {
            return Err(format!("its result is not a {ty}, as the state is"));
        }
        return Ok(Named::Read { result: *result, version: versions[&state].clone() });
    }
    let data = form.argument("data").ok_or("`data` is missing")?;
    let have = match data {
        Argument::Constant(c) => Some(&c.ty),
        Argument::Value(id) => form.function.tensor(*id),
    };
    if have.is_none_or(|have| have != ty) {
        let have = have.map_or_else(|| "no tensor".to_owned(), ToString::to_string);
        return Err(format!("`data` is {have}, the state {ty}"));
    }
    Ok(Named::Written { state, version: form.resolve("data", data)? })
}
