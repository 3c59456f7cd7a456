//! Prefill on a runtime: Core ML, or a fake of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvbaton_exec::Array;
use kvbaton_layout::{CacheSpec, Layout, LiveRows, ModelSpec, Placement, TensorInfo};
use kvbaton_mil::program::{DataType, Dim, TensorType};
use kvbaton_mil::{Feature, FeatureKind, Package};
use kvbaton_runtime::{
    ArrayInfo, CompiledFeature, CompiledFunction, CompiledModel, Counts, Element, Loaded, Memory, Output,
    Runtime, Session, Units, is_compiled,
};

use crate::cpu::{agree_on, input_name};
use crate::inputs::{self, Wanted};
use crate::prefill::choose_function;
use crate::{
    CacheView, Error, ErrorKind, FunctionInfo, Logits, Prefill, PrefillReport, Prefilled, Stated, Tensor,
};

/// A package behind a runtime's session.
pub struct RuntimePrefill<R: Runtime> {
    session: Session<R>,
    path: PathBuf,
    layout: Layout,
    cache: CacheSpec,
    model: Option<ModelSpec>,
    functions: Vec<FunctionInfo>,
    programs: BTreeMap<String, CompiledFunction>,
    units: Option<Units>,
    loaded: BTreeMap<String, Loaded>,
}

impl<R: Runtime> RuntimePrefill<R> {
    /// Opens a package, or a compiled model, of which the caller says what it does not say of itself. `units` are the
    /// compute units that somebody asked for.
    ///
    /// # Errors
    ///
    /// When it cannot be read, when nobody states its layout or its model, or when both do and disagree.
    pub fn open(
        session: Session<R>,
        path: &Path,
        units: Option<Units>,
        stated: Stated,
    ) -> Result<RuntimePrefill<R>, Error> {
        let (programs, metadata) = described(path)?;
        let (layout, model) = agree_on(path, &metadata, stated)?;
        let cache = model.cache.clone();
        let engine = RuntimePrefill::of(session, path, layout, cache, programs)?;
        Ok(RuntimePrefill { model: Some(model), units, ..engine })
    }

    /// An engine for functions that are described already.
    pub(crate) fn of(
        session: Session<R>,
        path: &Path,
        layout: Layout,
        cache: CacheSpec,
        described: Vec<CompiledFunction>,
    ) -> Result<RuntimePrefill<R>, Error> {
        let tokens_input = input_name(layout.inputs.tokens.as_deref(), "tokens")?.to_owned();
        let (mut functions, mut programs) = (Vec::new(), BTreeMap::new());
        for function in described {
            let input = function.inputs.iter().find(|i| i.name == tokens_input);
            // The only function of a package has a name that is never asked for.
            let name = function.name.clone().unwrap_or_default();
            if let Some([1, tokens]) = input.map(|i| i.shape.as_slice()) {
                functions.push(FunctionInfo { name: name.clone(), tokens: *tokens });
                programs.insert(name, function);
            }
        }
        functions.sort_by_key(|f| f.tokens);
        if functions.is_empty() {
            let path = path.display();
            let message =
                format!("no function of `{path}` has an input `{tokens_input}` of shape (1, length)");
            return Err(Error::new(ErrorKind::Package, message));
        }
        Ok(RuntimePrefill {
            session,
            path: path.to_owned(),
            layout,
            cache,
            model: None,
            functions,
            programs,
            units: None,
            loaded: BTreeMap::new(),
        })
    }

    /// Where all buffers are.
    pub fn counts(&self) -> Counts {
        self.session.counts()
    }

    /// What was loaded, by function: for which units, and what runs where.
    pub fn loaded(&self) -> &BTreeMap<String, Loaded> {
        &self.loaded
    }

    /// The runtime's session.
    pub fn session(&mut self) -> &mut Session<R> {
        &mut self.session
    }

    fn load(&mut self, function: &str) -> Result<&Loaded, Error> {
        if !self.loaded.contains_key(function) {
            let named = self.programs[function].name.as_deref();
            let loaded = self.session.load(&self.path, named, self.units)?;
            self.loaded.insert(function.to_owned(), loaded);
        }
        Ok(&self.loaded[function])
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), Error> {
        let Some(vocab) = self.model.as_ref().map(|m| m.vocab_size) else { return Ok(()) };
        match tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
            None => Ok(()),
            Some((at, &id)) => {
                let message = format!("token {id} at position {at} is not in the vocabulary of {vocab}");
                Err(Error::new(ErrorKind::Usage, message)
                    .field("token", id)
                    .field("position", at)
                    .field("vocab_size", vocab))
            }
        }
    }

    /// The inputs of `function` for a prompt, packed.
    fn inputs(
        &self,
        function: &FunctionInfo,
        tokens: &[u32],
    ) -> Result<Vec<(String, ArrayInfo, Vec<u8>)>, Error> {
        let types: Vec<(String, TensorType)> = self.programs[&function.name]
            .inputs
            .iter()
            .map(|i| (i.name.clone(), tensor_type(i.element, &i.shape)))
            .collect();
        let wanted: Vec<Wanted<'_>> = types.iter().map(|(name, ty)| Wanted { name, ty }).collect();
        let arrays = inputs::build(&self.layout, &wanted, tokens, function.tokens)?;
        arrays.into_iter().map(|(name, array)| packed(name, &array)).collect()
    }
}

impl<R: Runtime> Prefill for RuntimePrefill<R> {
    fn engine(&self) -> &'static str {
        R::NAME
    }

    fn functions(&self) -> &[FunctionInfo] {
        &self.functions
    }

    fn model(&self) -> Option<&ModelSpec> {
        self.model.as_ref()
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        let name = choose_function(&self.functions, tokens)?.name.clone();
        self.load(&name).map(|_| ())
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        let function = choose_function(&self.functions, tokens.len())?.clone();
        self.check_tokens(tokens)?;
        let inputs = self.inputs(&function, tokens)?;
        let loaded = self.load(&function.name)?.clone();
        let program = &self.programs[&function.name];
        let start = Instant::now();
        let outputs = self.session.predict(program.name.as_deref(), inputs, &program.outputs)?;
        let seconds = start.elapsed().as_secs_f64();

        let mut report = PrefillReport::new(self.engine(), function.name, tokens.len(), seconds);
        report.compute_units = Some(loaded.units.name().to_owned());
        report.notes = loaded.notes;
        let (mut tensors, mut logits) = (Vec::new(), None);
        for output in outputs {
            if Some(&output.name) == self.layout.outputs.logits.as_ref() {
                logits = Some(Logits { values: floats(&output)? });
            } else if let Some(tensor) = tensor(output, &mut report.notes) {
                tensors.push(tensor);
            }
        }
        let pad = (self.layout.placement == Placement::LeftPadded).then(|| function.tokens - tokens.len());
        let live = LiveRows { pad, ..LiveRows::seen(tokens.len()) };
        let cache = CacheView::new(self.layout.clone(), self.cache.clone(), tensors, live)?
            .with_model(self.model.clone())
            .with_tokens(tokens.to_vec());
        Ok(Prefilled { cache, logits, report })
    }
}

/// The functions of a package or a compiled model, and its metadata.
fn described(path: &Path) -> Result<(Vec<CompiledFunction>, BTreeMap<String, String>), Error> {
    if is_compiled(path) {
        let model = CompiledModel::read(path)?;
        return Ok((model.functions, model.metadata));
    }
    let package = Package::open(path)?;
    let functions = &package.description().functions;
    // Only a package of several functions is asked for one by name, which older systems cannot be.
    let several = functions.len() > 1;
    let features =
        |all: &[Feature]| all.iter().filter_map(|f| array_feature(f).transpose()).collect::<Result<_, _>>();
    let described = functions.iter().map(|(name, of)| {
        Ok(CompiledFunction {
            name: several.then(|| name.clone()),
            inputs: features(&of.inputs)?,
            outputs: features(&of.outputs)?,
            states: features(&of.states)?,
        })
    });
    Ok((described.collect::<Result<_, Error>>()?, package.metadata().clone()))
}

/// A feature that is an array.
fn array_feature(feature: &Feature) -> Result<Option<CompiledFeature>, Error> {
    let FeatureKind::Array(array) = &feature.kind else { return Ok(None) };
    let element = array.dtype.and_then(element).ok_or_else(|| {
        let dtype = array.dtype.map_or_else(|| "no stated type".to_owned(), |d| format!("type {d}"));
        Error::new(ErrorKind::Package, format!("`{}` has elements of {dtype}", feature.name))
    })?;
    Ok(Some(CompiledFeature { name: feature.name.clone(), element, shape: array.shape.clone() }))
}

fn element(dtype: DataType) -> Option<Element> {
    Some(match dtype {
        DataType::Float16 => Element::Float16,
        DataType::Float32 => Element::Float32,
        DataType::Int32 => Element::Int32,
        DataType::Int8 => Element::Int8,
        _ => return None,
    })
}

fn tensor_type(element: Element, shape: &[usize]) -> TensorType {
    let dtype = match element {
        Element::Float16 => DataType::Float16,
        Element::Float32 => DataType::Float32,
        Element::Int32 => DataType::Int32,
        Element::Int8 => DataType::Int8,
    };
    TensorType { dtype, shape: shape.iter().map(|&n| Dim::Fixed(n)).collect() }
}

fn packed(name: String, array: &Array) -> Result<(String, ArrayInfo, Vec<u8>), Error> {
    let element = element(array.dtype()).ok_or_else(|| {
        Error::new(ErrorKind::Program, format!("the input `{name}` has elements of type {}", array.dtype()))
    })?;
    Ok((name, ArrayInfo::packed(element, array.shape()), array.bytes().to_vec()))
}

/// An output as a cache tensor, if its type is one that caches have; what is worth knowing of it goes to `notes`.
fn tensor(output: Output, notes: &mut Vec<String>) -> Option<Tensor> {
    let Output { name, info, bytes, memory, because } = output;
    if memory != Memory::Surface {
        let because = because.unwrap_or_default();
        notes.push(format!("`{name}` is not in a surface, the engine copies it: {because}"));
    }
    let info = TensorInfo {
        name,
        dtype: info.element.dtype()?,
        shape: info.shape,
        strides_bytes: info.strides_bytes,
        len_bytes: info.len_bytes,
    };
    Some(Tensor { info, bytes })
}

/// Logits as float32.
fn floats(output: &Output) -> Result<Vec<f32>, Error> {
    let packed = output.info.gather(&output.bytes);
    match output.info.element {
        Element::Float16 => {
            Ok(packed.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect())
        }
        Element::Float32 => Ok(packed.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        other => Err(Error::new(
            ErrorKind::Layout,
            format!("the logits `{}` have elements of type {other:?}", output.name),
        )),
    }
}
