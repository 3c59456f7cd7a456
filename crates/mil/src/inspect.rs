//! What `kvbaton inspect` says about a package.

use std::collections::{BTreeMap, HashSet};

use serde::Serialize;

use crate::description::{Feature, FeatureKind, Flexibility};
use crate::interface::CacheInterface;
use crate::neural_engine::{self, Warning};
use crate::package::Package;
use crate::program::{Argument, ConstantData, DataType, Function};

/// Everything worth knowing before a package is run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    /// Always `mlpackage`.
    pub kind: &'static str,
    /// The folder.
    pub path: String,
    /// Core ML's specification version.
    pub specification_version: i32,
    /// The systems that can run it.
    pub requires: Requires,
    /// What the model is for.
    pub short_description: String,
    /// Who made it.
    pub author: String,
    /// Its licence.
    pub license: String,
    /// The author's version.
    pub version: String,
    /// The function that runs when none is named.
    pub default_function: String,
    /// The functions, by name.
    pub functions: Vec<FunctionInspection>,
    /// The weights, those that functions share counted once.
    pub weights: WeightsInspection,
    /// Keys of the user-defined metadata.
    pub user_metadata: Vec<String>,
    /// What the Neural Engine is known to refuse or to get wrong.
    pub warnings: Vec<Warning>,
}

/// The oldest systems with this specification version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Requires {
    /// macOS.
    pub macos: u32,
    /// iOS.
    pub ios: u32,
}

/// A function.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FunctionInspection {
    /// Its name.
    pub name: String,
    /// Its opset.
    pub opset: String,
    /// Its inputs, states apart.
    pub inputs: Vec<FeatureInspection>,
    /// Its outputs.
    pub outputs: Vec<FeatureInspection>,
    /// Its states.
    pub states: Vec<FeatureInspection>,
    /// Operations by kind, nested blocks included, `const` left out.
    pub operations: BTreeMap<String, usize>,
    /// `const` operations.
    pub constants: usize,
    /// Where it takes tokens and leaves keys and values.
    pub cache_interface: CacheInterface,
}

/// An input, output or state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FeatureInspection {
    /// Its name.
    pub name: String,
    /// `array`, or what else it is.
    pub kind: &'static str,
    /// Element type.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<DataType>,
    /// The shape, or the default of several.
    pub shape: Vec<usize>,
    /// The shapes it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enumerated_shapes: Option<Vec<Vec<usize>>>,
    /// Bounds of each dimension, both included; no upper one is `null`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shape_range: Option<Vec<(usize, Option<usize>)>>,
    /// An input that may be left out.
    pub optional: bool,
}

/// The weights of a package.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WeightsInspection {
    /// Bytes of the weight files.
    pub file_bytes: u64,
    /// By element type as it is stored: a compressed weight counts as its parts.
    pub by_dtype: Vec<WeightsOfType>,
}

/// Weights of one element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WeightsOfType {
    /// Element type.
    pub dtype: DataType,
    /// Tensors.
    pub count: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// What there is to know about `package`.
pub fn inspect(package: &Package) -> Inspection {
    let description = package.description();
    Inspection {
        kind: "mlpackage",
        path: package.path().display().to_string(),
        specification_version: package.specification_version(),
        requires: requires(package.specification_version()),
        short_description: description.short_description.clone(),
        author: description.author.clone(),
        license: description.license.clone(),
        version: description.version.clone(),
        default_function: package.program().default_function.clone(),
        functions: package.program().functions.values().map(|f| function(package, f)).collect(),
        weights: weights(package),
        user_metadata: package.metadata().keys().cloned().collect(),
        warnings: neural_engine::warnings(package),
    }
}

/// Versions as coremltools names its deployment targets.
fn requires(specification_version: i32) -> Requires {
    let (macos, ios) = match specification_version {
        ..=6 => (12, 15),
        7 => (13, 16),
        8 => (14, 17),
        9 => (15, 18),
        _ => (26, 26),
    };
    Requires { macos, ios }
}

fn function(package: &Package, function: &Function) -> FunctionInspection {
    let described = package.description().functions.get(&function.name).cloned().unwrap_or_default();
    let features = |features: &[Feature]| features.iter().map(feature).collect();
    let mut operations = BTreeMap::new();
    for op in function.all_ops() {
        *operations.entry(op.kind.clone()).or_insert(0) += 1;
    }
    FunctionInspection {
        name: function.name.clone(),
        opset: function.opset.clone(),
        inputs: features(&described.inputs),
        outputs: features(&described.outputs),
        states: features(&described.states),
        constants: operations.remove("const").unwrap_or(0),
        operations,
        cache_interface: package
            .cache_interface(&function.name)
            .expect("the function is one of the package's own"),
    }
}

fn feature(feature: &Feature) -> FeatureInspection {
    let mut out = FeatureInspection {
        name: feature.name.clone(),
        kind: "array",
        dtype: None,
        shape: Vec::new(),
        enumerated_shapes: None,
        shape_range: None,
        optional: feature.optional,
    };
    match &feature.kind {
        FeatureKind::Other(kind) => out.kind = kind,
        FeatureKind::Array(array) => {
            out.dtype = array.dtype;
            out.shape.clone_from(&array.shape);
            match &array.flexibility {
                Flexibility::Fixed => {}
                Flexibility::Enumerated(shapes) => out.enumerated_shapes = Some(shapes.clone()),
                Flexibility::Ranges(ranges) => {
                    out.shape_range = Some(ranges.iter().map(|r| (r.min, r.max)).collect());
                }
            }
        }
    }
    out
}

fn weights(package: &Package) -> WeightsInspection {
    let mut seen = HashSet::new();
    let mut by_dtype: BTreeMap<DataType, (usize, u64)> = BTreeMap::new();
    for function in package.program().functions.values() {
        for op in function.all_ops() {
            let inline = op.inputs.values().flatten().filter_map(|argument| match argument {
                Argument::Constant(constant) => Some(constant),
                Argument::Value(_) => None,
            });
            for constant in op.attributes.values().chain(inline) {
                if let ConstantData::Blob(blob) = constant.data
                    && seen.insert(blob)
                {
                    let (count, bytes) = by_dtype.entry(constant.ty.dtype).or_default();
                    *count += 1;
                    *bytes += blob.len_bytes as u64;
                }
            }
        }
    }
    WeightsInspection {
        file_bytes: package.weights_bytes(),
        by_dtype: by_dtype
            .into_iter()
            .map(|(dtype, (count, bytes))| WeightsOfType { dtype, count, bytes })
            .collect(),
    }
}
