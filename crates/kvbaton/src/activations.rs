//! What values a prompt reaches inside a program.

use std::collections::HashMap;
use std::ops::Range;

use kvbaton_exec::{Observed, Statistics};
use kvbaton_layout::Inputs;
use kvbaton_mil::Package;
use kvbaton_mil::program::{Argument, Constant, DataType, Function, ValueId};
use serde::Serialize;

/// A constant or an input of this size is a mask: no weight or table of a language model is.
const MASK: f32 = 10_000.0;

/// What the activations of one prefill are like.
///
/// Values that a mask was added to are left out until a softmax (or an exponential) has read them: there, -∞ or -40000
/// is what is wanted. Rows of padding are left out of results that have a dimension as long as the function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Activations {
    /// The functions that ran, in order.
    pub functions: Vec<String>,
    /// Tokens of the prompt.
    pub tokens: usize,
    /// `f32`, `f16-storage` or `f16-accumulate`.
    pub numerics: &'static str,
    /// Results of operations that were looked at.
    pub results: usize,
    /// Results that were not, because they are masked.
    pub masked_results: usize,
    /// The finite activation of the largest magnitude.
    pub largest: Option<Activation>,
    /// Infinite values.
    pub infinite: u64,
    /// Values that are no number.
    pub nan: u64,
    /// Finite values that fp16 cannot hold; only a run in `f32` has them.
    pub beyond_half: u64,
    /// The first result, in the program's order, with a value of the last three kinds.
    pub first_overflow: Option<Overflow>,
    /// The largest activation of each layer that is known, by layer.
    pub layers: Vec<Activation>,
}

/// A value, and where it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Activation {
    /// The value.
    pub value: f32,
    /// MIL's name of the operation.
    pub op: String,
    /// The name of its result.
    pub output: String,
    /// The layer, where names of weights tell it.
    pub layer: Option<usize>,
    /// The position in the prompt, where the result has one row a token.
    pub position: Option<usize>,
    /// Its place in the result.
    pub index: Vec<usize>,
}

/// A result with values that are infinite, no number, or beyond fp16.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Overflow {
    /// MIL's name of the operation.
    pub op: String,
    /// The name of its result.
    pub output: String,
    /// The layer, where names of weights tell it.
    pub layer: Option<usize>,
    /// Infinite values.
    pub infinite: u64,
    /// Values that are no number.
    pub nan: u64,
    /// Finite values that fp16 cannot hold.
    pub beyond_half: u64,
}

/// What a program's text tells of a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Place {
    layer: Option<usize>,
    masked: bool,
}

impl Activations {
    /// Of nothing yet.
    pub(crate) fn none(numerics: &'static str) -> Activations {
        Activations {
            functions: Vec::new(),
            tokens: 0,
            numerics,
            results: 0,
            masked_results: 0,
            largest: None,
            infinite: 0,
            nan: 0,
            beyond_half: 0,
            first_overflow: None,
            layers: Vec::new(),
        }
    }

    /// Takes an activation into account.
    fn note(&mut self, seen: Activation) {
        let beats = |old: &Activation| seen.value.abs() > old.value.abs();
        if seen.layer.is_some() {
            match self.layers.iter_mut().find(|a| a.layer == seen.layer) {
                Some(old) if beats(old) => *old = seen.clone(),
                Some(_) => {}
                None => self.layers.push(seen.clone()),
            }
        }
        if self.largest.as_ref().is_none_or(beats) {
            self.largest = Some(seen);
        }
    }

    /// Adds what a later step reached.
    pub(crate) fn merge(&mut self, later: Activations) {
        self.functions.extend(later.functions);
        self.tokens += later.tokens;
        self.results += later.results;
        self.masked_results += later.masked_results;
        self.infinite += later.infinite;
        self.nan += later.nan;
        self.beyond_half += later.beyond_half;
        self.first_overflow = self.first_overflow.take().or(later.first_overflow);
        later.layers.into_iter().chain(later.largest).for_each(|a| self.note(a));
        self.layers.sort_by_key(|a| a.layer);
    }
}

/// Rows of a function, and those of the prompt among them.
pub(crate) struct Rows {
    pub(crate) all: usize,
    pub(crate) live: Range<usize>,
    /// The position of the first live one.
    pub(crate) first: usize,
}

/// Collects [`Activations`] from observed results.
pub(crate) struct Collector<'a> {
    places: HashMap<&'a str, Place>,
    rows: Rows,
    found: Activations,
}

impl<'a> Collector<'a> {
    pub(crate) fn new(
        package: &Package,
        function: &'a Function,
        inputs: &Inputs,
        numerics: &'static str,
        rows: Rows,
    ) -> Collector<'a> {
        let functions = vec![function.name.clone()];
        let found = Activations { functions, tokens: rows.live.len(), ..Activations::none(numerics) };
        Collector { places: places(package, function, inputs), rows, found }
    }

    pub(crate) fn see(&mut self, observed: &Observed<'_>) {
        let place = self.places.get(observed.output()).copied().unwrap_or_default();
        let shape = observed.shape();
        let row_axis = shape.iter().position(|d| *d == self.rows.all && *d > 1);
        let mut ranges: Vec<Range<usize>> = shape.iter().map(|d| 0..*d).collect();
        if let Some(axis) = row_axis {
            ranges[axis] = self.rows.live.clone();
        }
        if place.masked {
            self.found.masked_results += 1;
            return;
        }
        let Some(statistics) = observed.statistics(&ranges) else { return };
        self.found.results += 1;
        self.count(observed, place, &statistics);
        let Some(value) = statistics.largest else { return };
        let seen = Activation {
            value,
            op: observed.op().to_owned(),
            output: observed.output().to_owned(),
            layer: place.layer,
            position: row_axis.map(|axis| self.rows.first + statistics.index[axis] - self.rows.live.start),
            index: statistics.index,
        };
        self.found.note(seen);
    }

    fn count(&mut self, observed: &Observed<'_>, place: Place, statistics: &Statistics) {
        let Statistics { infinite, nan, beyond_half, .. } = *statistics;
        self.found.infinite += infinite;
        self.found.nan += nan;
        self.found.beyond_half += beyond_half;
        if infinite + nan + beyond_half > 0 && self.found.first_overflow.is_none() {
            self.found.first_overflow = Some(Overflow {
                op: observed.op().to_owned(),
                output: observed.output().to_owned(),
                layer: place.layer,
                infinite,
                nan,
                beyond_half,
            });
        }
    }

    pub(crate) fn finish(self) -> Activations {
        self.found
    }
}

/// Operations after which a masked score is an ordinary number again.
const UNMASK: &[&str] = &["softmax", "exp", "exp2", "sigmoid", "scaled_dot_product_attention"];
/// Operations by which a mask reaches scores.
const MASKING: &[&str] = &["add", "sub", "mul", "select", "maximum", "minimum"];

/// Layer and mask of every result. A result belongs to the layer that the names of its weights tell, or its own name,
/// or else to the last layer among the results that it is made of.
fn places<'a>(package: &Package, function: &'a Function, inputs: &Inputs) -> HashMap<&'a str, Place> {
    let mut constants: HashMap<ValueId, &Constant> = HashMap::new();
    let mut known: HashMap<ValueId, Place> = HashMap::new();
    for id in &function.inputs {
        let masked = Some(&function.value(*id).name) == inputs.mask.as_ref();
        known.insert(*id, Place { layer: None, masked });
    }
    for op in function.all_ops() {
        if op.kind == "const" || op.kind.starts_with("constexpr_") {
            if let (Some(value), Some(id)) = (op.attributes.get("val"), op.outputs.first()) {
                constants.insert(*id, value);
            }
            continue;
        }
        let mut place = Place::default();
        let (mut weight_layer, mut reads_weight) = (None, false);
        for argument in op.inputs.values().flatten() {
            let constant = match argument {
                Argument::Constant(c) => Some(c),
                Argument::Value(id) => constants.get(id).copied(),
            };
            if let Some(c) = constant {
                place.masked |= MASKING.contains(&op.kind.as_str()) && is_mask(package, c);
            }
            let Argument::Value(id) = argument else { continue };
            match known.get(id) {
                Some(of) => {
                    place.layer = place.layer.max(of.layer);
                    place.masked |= of.masked;
                }
                None => {
                    let name = &function.value(*id).name;
                    weight_layer = weight_layer.or(layer_in(name));
                    reads_weight |= name.contains("weight");
                }
            }
        }
        if reads_weight {
            // A weight without a layer is the embedding, the last norm or the head.
            place.layer = weight_layer;
        }
        if UNMASK.contains(&op.kind.as_str()) {
            place.masked = false;
        }
        for id in &op.outputs {
            let place = Place { layer: layer_in(&function.value(*id).name).or(place.layer), ..place };
            known.insert(*id, place);
        }
    }
    known.into_iter().map(|(id, place)| (function.value(id).name.as_str(), place)).collect()
}

/// Whether a constant holds an infinity or a magnitude of [`MASK`].
fn is_mask(package: &Package, constant: &Constant) -> bool {
    let large = |x: f32| x.abs() >= MASK;
    let Some(bytes) = package.constant_bytes(constant) else { return false };
    match constant.ty.dtype {
        DataType::Float16 => bytes.as_chunks().0.iter().any(|b| large(half::f16::from_le_bytes(*b).to_f32())),
        DataType::Float32 => bytes.as_chunks().0.iter().any(|b| large(f32::from_le_bytes(*b))),
        _ => false,
    }
}

/// 12 in `model_layers_12_mlp_up_proj_weight`, `layer.12.x`, `blocks_12_attn`.
fn layer_in(name: &str) -> Option<usize> {
    let words: Vec<&str> = name.split(['_', '.', '/', '-']).collect();
    words.windows(2).find_map(|pair| match pair {
        ["layer" | "layers" | "block" | "blocks" | "h", number] => number.parse().ok(),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_layers() {
        assert_eq!(layer_in("model_layers_12_mlp_up_proj_weight"), Some(12));
        assert_eq!(layer_in("blocks.0.attn.q"), Some(0));
        assert_eq!(layer_in("transformer/h/3/ln_1"), Some(3));
        for other in ["layers", "linear_7", "layer_norm_5", "model_layers_x_7"] {
            assert_eq!(layer_in(other), None, "{other}");
        }
    }
}
