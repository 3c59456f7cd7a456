//! What a package, or a compiled model, says of itself, whichever engine runs it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvbaton_layout::TensorInfo;
use kvbaton_mil::program::{Dim, TensorType, ValueId};
use kvbaton_mil::{Feature, FeatureKind, Package};
use kvbaton_runtime::{CompiledFeature, CompiledFunction, CompiledModel, Element, is_compiled};

use crate::functions::{Facts, only_declared};
use crate::tensors::{data_type_of, element_of};
use crate::{Error, ErrorKind};

/// A package's functions and its metadata.
pub(crate) struct Described {
    /// The package.
    pub(crate) path: PathBuf,
    /// Its functions by name, as the package declares them: of flexible shapes the default ones.
    pub(crate) functions: BTreeMap<String, CompiledFunction>,
    /// The function that is meant where none is named, if the package says.
    default_function: Option<String>,
    /// What its author wrote beside it.
    pub(crate) metadata: BTreeMap<String, String>,
}

impl Described {
    /// Reads the description of the package or the compiled model at `path`.
    ///
    /// # Errors
    ///
    /// When it cannot be read, or a feature has elements of a type that no runtime's arrays have.
    pub(crate) fn read(path: &Path) -> Result<Described, Error> {
        if is_compiled(path) { Described::compiled(path) } else { Described::of(&Package::open(path)?) }
    }

    /// The description of an opened package.
    ///
    /// # Errors
    ///
    /// When a feature has elements of a type that no runtime's arrays have.
    pub(crate) fn of(package: &Package) -> Result<Described, Error> {
        let declared = &package.description().functions;
        // Only a package of several functions is asked for one by name, which older systems cannot be.
        let several = declared.len() > 1;
        let functions = declared.iter().map(|(name, of)| {
            let program = package.function(Some(name))?;
            let features = |all: &[Feature], ids: &[ValueId]| -> Result<Vec<_>, Error> {
                let typed = |f: &Feature| {
                    let id = ids.iter().find(|&&id| program.value(id).name == f.name);
                    array_feature(f, id.and_then(|&id| program.tensor(id))).transpose()
                };
                all.iter().filter_map(typed).collect()
            };
            let function = CompiledFunction {
                name: several.then(|| name.clone()),
                inputs: features(&of.inputs, &program.inputs)?,
                outputs: features(&of.outputs, &program.block.outputs)?,
                states: features(&of.states, &program.states)?,
            };
            Ok((name.clone(), function))
        });
        Ok(Described {
            path: package.path().to_owned(),
            functions: functions.collect::<Result<_, Error>>()?,
            default_function: Some(package.program().default_function.clone()),
            metadata: package.metadata().clone(),
        })
    }

    fn compiled(path: &Path) -> Result<Described, Error> {
        let CompiledModel { functions, metadata } = CompiledModel::read(path)?;
        // A compiled model does not say what its only function is called.
        let only = only_declared(&metadata).unwrap_or_else(|| "main".to_owned());
        let named = functions.into_iter().map(|f| (f.name.clone().unwrap_or_else(|| only.clone()), f));
        let functions: BTreeMap<_, _> = named.collect();
        let default_function = functions.keys().next().filter(|_| functions.len() == 1).cloned();
        Ok(Described { path: path.to_owned(), functions, default_function, metadata })
    }

    /// The function `name`, or the default one, under its name.
    ///
    /// # Errors
    ///
    /// When there is no such function; the message lists those there are.
    pub(crate) fn function(&self, name: Option<&str>) -> Result<(&str, &CompiledFunction), Error> {
        let wanted = name.or(self.default_function.as_deref());
        if let Some((name, function)) = wanted.and_then(|name| self.functions.get_key_value(name)) {
            return Ok((name, function));
        }
        let known: Vec<&str> = self.functions.keys().map(String::as_str).collect();
        let (path, known) = (self.path.display(), known.join(", "));
        let message = match wanted {
            Some(name) => format!("`{path}` has no function `{name}`; it has {known}"),
            None => format!("`{path}` does not say which of its functions is meant: {known}"),
        };
        Err(Error::new(ErrorKind::Package, message))
    }

    /// The facts of a package whose functions take tokens in `tokens_input`.
    pub(crate) fn facts(&self, tokens_input: &str) -> Facts<'_> {
        let shape =
            |f: &CompiledFunction| f.inputs.iter().find(|i| i.name == tokens_input).map(|i| i.shape.clone());
        let token_shapes = self.functions.iter().map(|(name, f)| (name.clone(), shape(f))).collect();
        Facts { path: &self.path, metadata: &self.metadata, token_shapes }
    }

    /// Names and types of the inputs of a function; none of one that there is not.
    pub(crate) fn inputs(&self, function: &str) -> Vec<(String, TensorType)> {
        let inputs = self.functions.get(function).into_iter().flat_map(|f| &f.inputs);
        inputs.map(|i| (i.name.clone(), tensor_type(i.element, &i.shape))).collect()
    }

    /// Those inputs of a function that hold the cache so far.
    ///
    /// # Errors
    ///
    /// When one of `names` has elements of a type that caches do not have.
    pub(crate) fn past_inputs(&self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        let inputs = self.functions.get(function).into_iter().flat_map(|f| &f.inputs);
        inputs.filter(|i| names.contains(&i.name)).map(|i| cache_tensor("input", i)).collect()
    }
}

/// A feature as a tensor of a cache, packed; `what` it is goes into the message.
///
/// # Errors
///
/// When caches do not have elements of its type.
pub(crate) fn cache_tensor(what: &str, feature: &CompiledFeature) -> Result<TensorInfo, Error> {
    let CompiledFeature { name, element, shape } = feature;
    match element.dtype() {
        Some(dtype) => Ok(TensorInfo::contiguous(name.clone(), dtype, shape)),
        None => {
            let message =
                format!("the {what} `{name}` has elements of type {element:?}: it cannot hold a cache");
            Err(Error::new(ErrorKind::Layout, message))
        }
    }
}

/// A feature that is an array, of this type in the program. What its description leaves open the program says.
fn array_feature(feature: &Feature, ty: Option<&TensorType>) -> Result<Option<CompiledFeature>, Error> {
    let FeatureKind::Array(array) = &feature.kind else { return Ok(None) };
    let dtype = array.dtype.or(ty.map(|ty| ty.dtype));
    let element = dtype.and_then(element_of).ok_or_else(|| {
        let dtype = dtype.map_or_else(|| "no stated type".to_owned(), |d| format!("type {d}"));
        Error::new(ErrorKind::Package, format!("`{}` has elements of {dtype}", feature.name))
    })?;
    let shape = ty.and_then(TensorType::fixed_shape).unwrap_or_else(|| array.shape.clone());
    Ok(Some(CompiledFeature { name: feature.name.clone(), element, shape }))
}

fn tensor_type(element: Element, shape: &[usize]) -> TensorType {
    TensorType { dtype: data_type_of(element), shape: shape.iter().map(|&n| Dim::Fixed(n)).collect() }
}
