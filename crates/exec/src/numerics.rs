//! What a run rounds.

use std::borrow::Cow;
use std::collections::HashSet;

use kvbaton_kernels::rows::Isa;
use kvbaton_mil::program::{Argument, DataType, Function, Op, ValueId, ValueType};

/// What a run rounds to fp16. Arithmetic is `f32` in each case.
///
/// An engine may compute wider than the program says, or narrower. Comparing an answer across these shows whether it
/// hangs on one engine's roundings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Numerics {
    /// Nothing: values that the program declares fp16 are kept in `f32`. Constants and weights (decompressed ones, too)
    /// and the function's inputs hold fp16 values, as the program stores them; outputs and states are rounded when they
    /// are written, as their type says.
    F32,
    /// The result of every operation whose type is fp16, once.
    #[default]
    F16Storage,
    /// Results, and the sums inside products, reductions and softmax while they grow: after every 32 terms, as
    /// [`Isa::with_half_sums`] defines it. `layer_norm` sums in `f32`: engines that compute in fp16 scale its squares.
    F16Accumulate,
}

impl Numerics {
    /// All of them.
    pub const ALL: [Numerics; 3] = [Numerics::F32, Numerics::F16Storage, Numerics::F16Accumulate];

    /// The name on the command line: `f32`, `f16-storage`, `f16-accumulate`.
    pub fn name(self) -> &'static str {
        match self {
            Numerics::F32 => "f32",
            Numerics::F16Storage => "f16-storage",
            Numerics::F16Accumulate => "f16-accumulate",
        }
    }

    /// The one called `name`.
    pub fn from_name(name: &str) -> Option<Numerics> {
        Numerics::ALL.into_iter().find(|n| n.name() == name)
    }

    /// The kernels to run with.
    pub(crate) fn isa(self) -> Isa {
        Isa::best().with_half_sums(self == Numerics::F16Accumulate)
    }

    /// The function with the types that its values are computed in.
    pub(crate) fn typed(self, function: &Function) -> Cow<'_, Function> {
        if self != Numerics::F32 {
            return Cow::Borrowed(function);
        }
        let mut wide = function.clone();
        let mut stored: Vec<bool> = vec![false; wide.values.len()];
        for id in wide.inputs.iter().chain(&wide.states) {
            stored[id.0 as usize] = true;
        }
        let constant = |op: &&Op| op.kind == "const" || op.kind.starts_with("constexpr_");
        for id in function.all_ops().iter().filter(|op| constant(op)).flat_map(|op| &op.outputs) {
            stored[id.0 as usize] = true;
        }
        // What a state becomes is stored as the state is.
        let mut states: HashSet<ValueId> = function.states.iter().copied().collect();
        for op in function.all_ops() {
            let updates = ["read_state", "coreml_update_state", "slice_update"].contains(&op.kind.as_str());
            let of_state = |a: &Argument| matches!(a, Argument::Value(id) if states.contains(id));
            let target = |name: &str| op.inputs.get(name).is_some_and(|a| a.iter().any(of_state));
            if updates && ["x", "input", "state"].into_iter().any(target) {
                states.extend(&op.outputs);
            }
        }
        let written = function.all_ops().into_iter().filter(|op| op.kind == "write_state");
        let written = written.flat_map(|op| op.inputs.get("data").into_iter().flatten());
        states.extend(written.filter_map(|argument| match argument {
            Argument::Value(id) => Some(*id),
            Argument::Constant(_) => None,
        }));
        for id in states {
            stored[id.0 as usize] = true;
        }
        for (value, _) in wide.values.iter_mut().zip(stored).filter(|(_, stored)| !stored) {
            match &mut value.ty {
                ValueType::Tensor(ty) if ty.dtype == DataType::Float16 => ty.dtype = DataType::Float32,
                _ => {}
            }
        }
        Cow::Owned(wide)
    }
}
