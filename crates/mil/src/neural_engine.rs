//! What the Neural Engine is known to refuse or to get wrong, each rule with its source.
//!
//! Core ML says nothing when it moves work to the CPU or the GPU, so these are warnings from published findings,
//! not checks against hardware: a program without any may still run elsewhere.

use serde::Serialize;

use crate::description::{ArrayFeature, FeatureKind, Features, Flexibility};
use crate::package::Package;
use crate::program::{DataType, Function, TensorType, ValueId};

/// The largest dimension the Neural Engine takes, and the height every IOSurface may have.
const LARGEST_DIM: usize = 16_384;
/// The last dimension of a state comes in multiples of this: 64 bytes of fp16.
const STATE_WIDTH: usize = 32;
/// This many states in one function fail at prediction.
const TOO_MANY_STATES: usize = 3;

/// A reason to expect less than the Neural Engine's speed, or wrong numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// The rule's short name; it does not change.
    pub rule: &'static str,
    /// What was found.
    pub message: String,
    /// The function, and the value or the first of several.
    #[serde(rename = "where")]
    pub place: String,
    /// Who found the rule.
    pub source: &'static str,
}

/// The warnings of every function, in the order of the functions.
pub(crate) fn warnings(package: &Package) -> Vec<Warning> {
    let described = &package.description().functions;
    let functions = package.program().functions.values();
    functions.flat_map(|function| of_function(function, described.get(&function.name))).collect()
}

fn of_function(function: &Function, features: Option<&Features>) -> Vec<Warning> {
    let mut rules = Rules { function, warnings: Vec::new() };
    rules.states();
    rules.large_dimensions();
    rules.surface_rows();
    rules.operations();
    if let Some(features) = features {
        rules.ranged_shapes(features);
    }
    rules.warnings
}

struct Rules<'a> {
    function: &'a Function,
    warnings: Vec<Warning>,
}

impl Rules<'_> {
    fn warn(&mut self, rule: &'static str, source: &'static str, value: Option<ValueId>, message: String) {
        let place = match value {
            Some(id) => format!("function `{}`, `{}`", self.function.name, self.function.value(id).name),
            None => format!("function `{}`", self.function.name),
        };
        self.warnings.push(Warning { rule, message, place, source });
    }

    fn states(&mut self) {
        let states = &self.function.states;
        for &id in states {
            let Some(ty) = self.function.tensor(id) else { continue };
            let Some(shape) = ty.fixed_shape() else { continue };
            let Some((&width, outer)) = shape.split_last() else { continue };
            if !width.is_multiple_of(STATE_WIDTH) {
                let message =
                    format!("the last dimension of {ty} is {width}, not a multiple of {STATE_WIDTH}");
                self.warn("state_width", "coremltools issue 2631", Some(id), message);
            }
            let odd = outer.iter().skip(1).find(|dim| !dim.is_power_of_two());
            if let Some(dim) = odd {
                let message = format!("{ty} has the dimension {dim}, which is not a power of two");
                let source = "SqueezeBits, publication on Yetter, 2025-08 (disputed)";
                self.warn("state_power_of_two", source, Some(id), message);
            }
        }
        if states.len() >= TOO_MANY_STATES {
            let message = format!(
                "the function has {} states; {TOO_MANY_STATES} or more fail at prediction",
                states.len()
            );
            self.warn("state_count", "CoreML-LLM (john-rocky)", None, message);
        }
    }

    fn large_dimensions(&mut self) {
        let large = |ty: &TensorType| ty.shape.iter().any(|dim| dim.fixed().is_some_and(|n| n > LARGEST_DIM));
        // A gather's table may be large; what counts is what operations compute.
        let computed = self.function.all_ops().into_iter().filter(|op| op.kind != "const");
        let outputs: Vec<ValueId> = computed
            .flat_map(|op| &op.outputs)
            .copied()
            .filter(|&id| self.function.tensor(id).is_some_and(large))
            .collect();
        if let Some(&first) = outputs.first() {
            let ty = self.function.tensor(first).expect("only tensors were kept");
            let message = match outputs.len() {
                1 => format!("{ty} has a dimension above {LARGEST_DIM}"),
                n => format!("{n} values have a dimension above {LARGEST_DIM}; the first is {ty}"),
            };
            let source = "ANEMLL and CoreML-LLM, which split the vocabulary for this reason";
            self.warn("dimension_limit", source, Some(first), message);
        }
    }

    fn surface_rows(&mut self) {
        for &id in &self.function.block.outputs {
            let Some(ty) = self.function.tensor(id).filter(|ty| ty.dtype == DataType::Float16) else {
                continue;
            };
            let Some(shape) = ty.fixed_shape() else { continue };
            let Some((_, outer)) = shape.split_last() else { continue };
            let rows = outer.iter().fold(1_usize, |rows, &dim| rows.saturating_mul(dim));
            if rows > LARGEST_DIM {
                let message = format!(
                    "{ty} needs a surface of {rows} rows and {LARGEST_DIM} are guaranteed: the output falls \
                     back to heap memory; give it in groups of layers"
                );
                let source = "IOSurface dimension limit (WebKit pull request 49469)";
                self.warn("surface_rows", source, Some(id), message);
            }
        }
    }

    fn operations(&mut self) {
        let of_kind = |kind: &str| -> Vec<ValueId> {
            let ops = self.function.all_ops().into_iter().filter(|op| op.kind == kind);
            ops.filter_map(|op| op.outputs.first().copied()).collect()
        };
        let half = |id: &ValueId| self.function.tensor(*id).is_some_and(|ty| ty.dtype == DataType::Float16);
        let (mut powers, attentions) = (of_kind("pow"), of_kind("scaled_dot_product_attention"));
        powers.retain(half);
        if let Some(&first) = powers.first() {
            let message = format!(
                "{} `pow` in fp16: it leaves the engine, and squares above 65504 overflow",
                powers.len()
            );
            self.warn("pow", "SqueezeBits, publication on Yetter, 2025-08", Some(first), message);
        }
        if let Some(&first) = attentions.first() {
            let message = format!(
                "{} `scaled_dot_product_attention`: wrong results on the engine; write the softmax out",
                attentions.len()
            );
            self.warn("sdpa", "CoreML-LLM (john-rocky)", Some(first), message);
        }
    }

    fn ranged_shapes(&mut self, features: &Features) {
        let ranged = |kind: &FeatureKind| {
            matches!(kind, FeatureKind::Array(ArrayFeature { flexibility: Flexibility::Ranges(_), .. }))
        };
        let Some(input) = features.inputs.iter().find(|input| ranged(&input.kind)) else { return };
        if features.states.is_empty() {
            return;
        }
        let message =
            format!("input `{}` has a range of shapes beside states: all runs on the CPU", input.name);
        self.warn("ranged_shape_with_states", "coremltools issue 2600 (one report)", None, message);
    }
}

#[cfg(test)]
mod tests;
