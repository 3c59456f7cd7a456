//! Prefill on a runtime: Core ML, or a fake of it.

mod decode;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvbaton_exec::Array;
use kvbaton_layout::{Layout, LiveRows, ModelSpec, Placement, TensorInfo};
use kvbaton_memory::{Buffer, Bytes};
use kvbaton_mil::program::{Dim, TensorType};
use kvbaton_mil::{Feature, FeatureKind, PAST_KEY, Package};
use kvbaton_runtime::{
    ArrayInfo, CompiledFeature, CompiledFunction, CompiledModel, Counts, Element, Loaded, Memory, Output,
    Runtime, Session, Units, is_compiled,
};

use crate::chunks::{Chain, RunStep, Step, steps};
use crate::cpu::{agree, check_vocabulary, input_name};
use crate::functions::{Facts, PrefillFunctions, only_declared, prefill_functions};
use crate::inputs::{self, Wanted};
use crate::prefill::ChunkSink;
use crate::tensors::{data_type_of, element_of};
use crate::{
    CacheView, Error, ErrorKind, FunctionInfo, Logits, Prefill, PrefillReport, Prefilled, Stated, Tensor,
};

pub use decode::RuntimeDecode;

/// A package behind a runtime's session.
pub struct RuntimePrefill<R: Runtime> {
    session: Session<R>,
    path: PathBuf,
    layout: Layout,
    model: ModelSpec,
    functions: PrefillFunctions,
    /// The layout of the cache so far, where functions take one.
    past: Option<Layout>,
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
        let (layout, model) = agree(path, &metadata, stated)?;
        let tokens_input = input_name(layout.inputs.tokens.as_deref(), "tokens")?;
        let shape =
            |f: &CompiledFunction| f.inputs.iter().find(|i| i.name == tokens_input).map(|i| i.shape.clone());
        let token_shapes = programs.iter().map(|(name, f)| (name.clone(), shape(f))).collect();
        let facts = Facts { path, metadata: &metadata, token_shapes };
        let functions = prefill_functions(&facts, tokens_input)?;
        let past = metadata.get(PAST_KEY).map(|text| Layout::from_toml(text)).transpose()?;
        Ok(RuntimePrefill {
            session,
            path: path.to_owned(),
            layout,
            model,
            functions,
            past,
            programs,
            units,
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

    /// The packed inputs of a step.
    fn inputs(
        &self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<(String, ArrayInfo, Bytes)>, Error> {
        let types: Vec<(String, TensorType)> = self.programs[&step.function]
            .inputs
            .iter()
            .map(|i| (i.name.clone(), tensor_type(i.element, &i.shape)))
            .collect();
        let wanted: Vec<Wanted<'_>> = types.iter().map(|(name, ty)| Wanted { name, ty }).collect();
        let arrays = inputs::build_after(&self.layout, &wanted, tokens, step.length, step.first, past)?;
        arrays.into_iter().map(|(name, array)| packed(name, &array)).collect()
    }

    /// Runs one step.
    fn predict(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<Output>, Error> {
        self.load(&step.function)?;
        let inputs = self.inputs(step, tokens, past)?;
        let program = &self.programs[&step.function];
        Ok(self.session.predict(program.name.as_deref(), inputs, &program.outputs)?)
    }

    /// Prefills with one function.
    fn whole(&mut self, tokens: &[u32], step: &Step) -> Result<Prefilled, Error> {
        let start = Instant::now();
        let outputs = self.predict(step, tokens, &[])?;
        let seconds = start.elapsed().as_secs_f64();
        let mut report = self.report(step, tokens.len(), seconds);
        let (mut tensors, mut logits) = (Vec::new(), None);
        for output in outputs {
            if Some(&output.name) == self.layout.outputs.logits.as_ref() {
                logits = Some(Logits { values: floats(&output)? });
            } else if let Some(tensor) = tensor(output, &mut report.notes) {
                tensors.push(tensor);
            }
        }
        let pad = (self.layout.placement == Placement::LeftPadded).then(|| step.length - tokens.len());
        let live = LiveRows { pad, ..LiveRows::seen(tokens.len()) };
        let cache = CacheView::new(self.layout.clone(), self.model.cache.clone(), tensors, live)?
            .with_model(Some(self.model.clone()))
            .with_tokens(tokens.to_vec());
        Ok(Prefilled { cache, logits, report })
    }

    fn report(&self, step: &Step, tokens: usize, seconds: f64) -> PrefillReport {
        let mut report = PrefillReport::new(R::NAME, step.function.clone(), tokens, seconds);
        if let Some(loaded) = self.loaded.get(&step.function) {
            report.compute_units = Some(loaded.units.name().to_owned());
            report.notes.clone_from(&loaded.notes);
        }
        report
    }

    /// Prefills in one or several steps, and tells `sink` of each one's rows.
    fn run(&mut self, tokens: &[u32], sink: Option<&mut ChunkSink<'_>>) -> Result<Prefilled, Error> {
        let steps = steps(&self.functions, tokens.len())?;
        check_vocabulary(tokens, self.model.vocab_size)?;
        self.prepare(tokens.len())?;
        let one = steps.iter().all(|s| s.context.is_none());
        let Some(past) = self.past.clone().filter(|_| !one) else {
            let done = self.whole(tokens, &steps[0])?;
            if let Some(sink) = sink {
                sink(&done.cache, 0..i64::try_from(tokens.len()).unwrap_or(i64::MAX))?;
            }
            return Ok(done);
        };
        let (rows, model) = (self.layout.clone(), self.model.clone());
        let chain = Chain { rows: &rows, past: &past, model: &model, threads: 0 };
        let done = chain.run(self, &steps, tokens, sink.unwrap_or(&mut |_, _| Ok(())))?;
        let report = self.report(&steps[steps.len() - 1], tokens.len(), done.seconds);
        Ok(Prefilled { cache: done.cache, logits: done.logits, report })
    }
}

impl<R: Runtime> RunStep for RuntimePrefill<R> {
    fn past_inputs(&mut self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error> {
        let inputs = self.programs[function].inputs.iter().filter(|i| names.contains(&i.name));
        inputs
            .map(|i| match i.element.dtype() {
                Some(dtype) => Ok(TensorInfo::contiguous(i.name.clone(), dtype, &i.shape)),
                None => Err(Error::new(
                    ErrorKind::Layout,
                    format!(
                        "the input `{}` has elements of type {:?}: it cannot hold a cache",
                        i.name, i.element
                    ),
                )),
            })
            .collect()
    }

    fn run_step(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<(String, Array)>, Error> {
        let outputs = self.predict(step, tokens, past)?;
        outputs
            .into_iter()
            .map(|o| {
                // Packed, out of the buffers that the next chunk writes.
                let bytes = Bytes::new(Buffer::copy_of(&o.info.gather(&o.bytes)));
                Ok((o.name, Array::new(data_type_of(o.info.element), o.info.shape, bytes)?))
            })
            .collect()
    }
}

impl<R: Runtime> Prefill for RuntimePrefill<R> {
    fn engine(&self) -> &'static str {
        R::NAME
    }

    fn functions(&self) -> &[FunctionInfo] {
        &self.functions.whole
    }

    fn model(&self) -> Option<&ModelSpec> {
        Some(&self.model)
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        for step in steps(&self.functions, tokens)? {
            self.load(&step.function)?;
        }
        Ok(())
    }

    fn settle(&mut self) {
        self.session.settle();
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        self.run(tokens, None)
    }

    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        self.run(tokens, Some(sink))
    }
}

/// Functions by name, and metadata.
type Described = (BTreeMap<String, CompiledFunction>, BTreeMap<String, String>);

/// The functions of a package or a compiled model, and its metadata.
fn described(path: &Path) -> Result<Described, Error> {
    if is_compiled(path) {
        let CompiledModel { functions, metadata } = CompiledModel::read(path)?;
        // A compiled model does not say what its only function is called.
        let only = only_declared(&metadata).unwrap_or_else(|| "main".to_owned());
        let named = functions.into_iter().map(|f| (f.name.clone().unwrap_or_else(|| only.clone()), f));
        return Ok((named.collect(), metadata));
    }
    let package = Package::open(path)?;
    let functions = &package.description().functions;
    // Only a package of several functions is asked for one by name, which older systems cannot be.
    let several = functions.len() > 1;
    let features =
        |all: &[Feature]| all.iter().filter_map(|f| array_feature(f).transpose()).collect::<Result<_, _>>();
    let described = functions.iter().map(|(name, of)| {
        let function = CompiledFunction {
            name: several.then(|| name.clone()),
            inputs: features(&of.inputs)?,
            outputs: features(&of.outputs)?,
            states: features(&of.states)?,
        };
        Ok((name.clone(), function))
    });
    Ok((described.collect::<Result<_, Error>>()?, package.metadata().clone()))
}

/// A feature that is an array.
fn array_feature(feature: &Feature) -> Result<Option<CompiledFeature>, Error> {
    let FeatureKind::Array(array) = &feature.kind else { return Ok(None) };
    let element = array.dtype.and_then(element_of).ok_or_else(|| {
        let dtype = array.dtype.map_or_else(|| "no stated type".to_owned(), |d| format!("type {d}"));
        Error::new(ErrorKind::Package, format!("`{}` has elements of {dtype}", feature.name))
    })?;
    Ok(Some(CompiledFeature { name: feature.name.clone(), element, shape: array.shape.clone() }))
}

fn tensor_type(element: Element, shape: &[usize]) -> TensorType {
    TensorType { dtype: data_type_of(element), shape: shape.iter().map(|&n| Dim::Fixed(n)).collect() }
}

fn packed(name: String, array: &Array) -> Result<(String, ArrayInfo, Bytes), Error> {
    let element = element_of(array.dtype()).ok_or_else(|| {
        Error::new(ErrorKind::Program, format!("the input `{name}` has elements of type {}", array.dtype()))
    })?;
    Ok((name, ArrayInfo::packed(element, array.shape()), array.bytes().clone()))
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

#[cfg(test)]
mod tests;
