//! What the package says about itself: texts, and each function's inputs, outputs and states.

use std::collections::BTreeMap;

use crate::error::MilError;
use crate::program::{DataType, Function, Program, TensorType, ValueId};
use crate::spec;

/// The package's own description.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Description {
    /// What the model is for.
    pub short_description: String,
    /// Who made it.
    pub author: String,
    /// Its licence.
    pub license: String,
    /// The author's version of the model.
    pub version: String,
    /// Features by function. A package with one function describes it as the default function.
    pub functions: BTreeMap<String, Features>,
}

/// Inputs, outputs and states of a function, in the order of the description.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Features {
    /// Inputs, states apart.
    pub inputs: Vec<Feature>,
    /// Outputs.
    pub outputs: Vec<Feature>,
    /// States.
    pub states: Vec<Feature>,
}

/// One input, output or state as the caller sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Feature {
    /// Its name.
    pub name: String,
    /// What it is for; often empty.
    pub short_description: String,
    /// An input that may be left out.
    pub optional: bool,
    /// What it is.
    pub kind: FeatureKind,
}

/// What a feature is.
#[derive(Clone, Debug, PartialEq)]
pub enum FeatureKind {
    /// An array of numbers.
    Array(ArrayFeature),
    /// Something a language model has no use for: `image`, `dictionary`, `sequence`, `string`, `int64`, `double`.
    Other(&'static str),
}

/// Element type and shapes of an array feature.
#[derive(Clone, Debug, PartialEq)]
pub struct ArrayFeature {
    /// Element type; `None` when the description leaves it open.
    pub dtype: Option<DataType>,
    /// The shape, or the default of several; empty when the description leaves it open.
    pub shape: Vec<usize>,
    /// Other shapes the feature may have.
    pub flexibility: Flexibility,
    /// What an optional input holds when it is left out.
    pub default_value: Option<f64>,
}

/// Shapes besides the default one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flexibility {
    /// None.
    Fixed,
    /// One of these.
    Enumerated(Vec<Vec<usize>>),
    /// Any within these bounds, one a dimension.
    Ranges(Vec<SizeRange>),
}

/// Bounds of a dimension, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeRange {
    /// Smallest size.
    pub min: usize,
    /// Largest size; `None` is unbounded.
    pub max: Option<usize>,
}

impl Description {
    /// Reads `wire` for a package whose default function is `default_function`.
    pub(crate) fn from_wire(
        wire: spec::ModelDescription,
        default_function: &str,
    ) -> Result<Description, MilError> {
        let mut functions = BTreeMap::new();
        if wire.functions.is_empty() {
            let features = features(default_function, wire.input, wire.output, wire.state)?;
            functions.insert(default_function.to_owned(), features);
        }
        for function in wire.functions {
            let features = features(&function.name, function.input, function.output, function.state)?;
            if functions.insert(function.name.clone(), features).is_some() {
                let reason = "the function is described twice".to_owned();
                let feature = function.name.clone();
                return Err(MilError::Description { function: function.name, feature, reason });
            }
        }
        let texts = wire.metadata.unwrap_or_default();
        Ok(Description {
            short_description: texts.short_description,
            author: texts.author,
            license: texts.license,
            version: texts.version_string,
            functions,
        })
    }

    /// Checks that each described function takes and gives what is described, and puts the program's inputs
    /// and states into the description's order.
    pub(crate) fn reconcile(&self, program: &mut Program) -> Result<(), MilError> {
        for (name, features) in &self.functions {
            let Some(function) = program.functions.get_mut(name) else {
                return Err(MilError::Description {
                    function: name.clone(),
                    feature: name.clone(),
                    reason: "the program has no such function".to_owned(),
                });
            };
            let inputs = in_order(function, &features.inputs, &function.inputs, "input")?;
            let states = in_order(function, &features.states, &function.states, "state")?;
            let outputs = function.block.outputs.clone();
            in_order(function, &features.outputs, &outputs, "output")?;
            (function.inputs, function.states) = (inputs, states);
        }
        Ok(())
    }
}

/// `ids` in the order of `described`; both must have the same names.
fn in_order(
    function: &Function,
    described: &[Feature],
    ids: &[ValueId],
    what: &str,
) -> Result<Vec<ValueId>, MilError> {
    let fail = |feature: &str, reason: String| {
        Err(MilError::Description { function: function.name.clone(), feature: feature.to_owned(), reason })
    };
    let mut left: BTreeMap<&str, ValueId> =
        ids.iter().map(|&id| (function.value(id).name.as_str(), id)).collect();
    let mut ordered = Vec::with_capacity(ids.len());
    for feature in described {
        let Some(id) = left.remove(feature.name.as_str()) else {
            return fail(&feature.name, format!("the program has no such {what}"));
        };
        if let Some(reason) = contradiction(feature, function.tensor(id)) {
            return fail(&feature.name, reason);
        }
        ordered.push(id);
    }
    match left.keys().next() {
        Some(name) => fail(name, format!("this {what} of the program is not described")),
        None => Ok(ordered),
    }
}

/// How `feature` differs from its type in the program. What either leaves open is no difference.
fn contradiction(feature: &Feature, ty: Option<&TensorType>) -> Option<String> {
    let (FeatureKind::Array(array), Some(ty)) = (&feature.kind, ty) else { return None };
    if let Some(dtype) = array.dtype
        && dtype != ty.dtype
    {
        return Some(format!("it is described as {dtype} but the program has {ty}"));
    }
    let fixed = array.flexibility == Flexibility::Fixed && !array.shape.is_empty();
    match ty.fixed_shape() {
        Some(shape) if fixed && shape != array.shape => {
            Some(format!("it is described as {:?} but the program has {ty}", array.shape))
        }
        _ => None,
    }
}

fn features(
    function: &str,
    inputs: Vec<spec::FeatureDescription>,
    outputs: Vec<spec::FeatureDescription>,
    states: Vec<spec::FeatureDescription>,
) -> Result<Features, MilError> {
    let read = |features: Vec<spec::FeatureDescription>| {
        features.into_iter().map(|wire| feature(function, wire)).collect::<Result<Vec<_>, _>>()
    };
    Ok(Features { inputs: read(inputs)?, outputs: read(outputs)?, states: read(states)? })
}

fn feature(function: &str, wire: spec::FeatureDescription) -> Result<Feature, MilError> {
    let fail = |reason: String| MilError::Description {
        function: function.to_owned(),
        feature: wire.name.clone(),
        reason,
    };
    let ty = wire.r#type.ok_or_else(|| fail("it has no type".to_owned()))?;
    let kind = match ty.kind.ok_or_else(|| fail("it has no type".to_owned()))? {
        spec::FeatureKind::MultiArray(wire) => FeatureKind::Array(array(wire).map_err(fail)?),
        spec::FeatureKind::State(state) => {
            let wire = state.array.ok_or_else(|| fail("the state wraps no array".to_owned()))?;
            FeatureKind::Array(array(wire).map_err(fail)?)
        }
        spec::FeatureKind::Int64(_) => FeatureKind::Other("int64"),
        spec::FeatureKind::Double(_) => FeatureKind::Other("double"),
        spec::FeatureKind::String(_) => FeatureKind::Other("string"),
        spec::FeatureKind::Image(_) => FeatureKind::Other("image"),
        spec::FeatureKind::Dictionary(_) => FeatureKind::Other("dictionary"),
        spec::FeatureKind::Sequence(_) => FeatureKind::Other("sequence"),
    };
    Ok(Feature { name: wire.name, short_description: wire.short_description, optional: ty.is_optional, kind })
}

fn array(wire: spec::ArrayFeatureType) -> Result<ArrayFeature, String> {
    let flexibility = match wire.flexibility {
        None => Flexibility::Fixed,
        Some(spec::ShapeFlexibility::Enumerated(shapes)) => Flexibility::Enumerated(
            shapes.shapes.into_iter().map(|shape| sizes(&shape.shape)).collect::<Result<_, _>>()?,
        ),
        Some(spec::ShapeFlexibility::Range(ranges)) => {
            Flexibility::Ranges(ranges.size_ranges.iter().map(size_range).collect::<Result<_, _>>()?)
        }
    };
    Ok(ArrayFeature {
        dtype: data_type(wire.data_type)?,
        shape: sizes(&wire.shape)?,
        flexibility,
        default_value: wire.default_value.map(|value| match value {
            spec::DefaultValue::Int(v) => v.into(),
            spec::DefaultValue::Float(v) => v.into(),
            spec::DefaultValue::Double(v) => v,
        }),
    })
}

fn sizes(shape: &[i64]) -> Result<Vec<usize>, String> {
    shape.iter().map(|&n| usize::try_from(n).map_err(|_| format!("{n} is not a size"))).collect()
}

/// A negative upper bound means none.
fn size_range(range: &spec::SizeRange) -> Result<SizeRange, String> {
    let min =
        usize::try_from(range.lower_bound).map_err(|_| format!("{} is not a size", range.lower_bound))?;
    let max = usize::try_from(range.upper_bound).ok();
    match max {
        Some(max) if max < min => Err(format!("the sizes {min} to {max} are none")),
        _ => Ok(SizeRange { min, max }),
    }
}

/// Numbers of `ArrayFeatureType.ArrayDataType`: the kind in the high half, the bits in the low one.
fn data_type(number: i32) -> Result<Option<DataType>, String> {
    Ok(Some(match number {
        0 => return Ok(None),
        0x1_0010 => DataType::Float16,
        0x1_0020 => DataType::Float32,
        0x1_0040 => DataType::Float64,
        0x2_0008 => DataType::Int8,
        0x2_0020 => DataType::Int32,
        _ => return Err(format!("the array type number {number} is unknown")),
    }))
}

#[cfg(test)]
mod tests;
