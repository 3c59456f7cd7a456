//! Prefill on the CPU: the package's program, run by `kvbaton-exec`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvbaton_exec::{Array, Executable, Options};
use kvbaton_layout::{DType, Layout, LiveRows, ModelSpec, TensorInfo};
use kvbaton_mil::program::{DataType, Function, ValueType};
use kvbaton_mil::{LAYOUT_KEY, MODEL_KEY, Package};

use crate::prefill::choose_function;
use crate::report::PrefillReport;
use crate::{CacheView, Error, ErrorKind, FunctionInfo, Logits, Prefill, Prefilled, Tensor};

/// A package on the CPU executor.
pub struct CpuPrefill {
    package: Arc<Package>,
    model: ModelSpec,
    layout: Layout,
    functions: Vec<FunctionInfo>,
    loaded: BTreeMap<String, Executable>,
    threads: usize,
}

impl CpuPrefill {
    /// Opens a package that says of itself what its cache is. `threads` 0 takes all cores.
    ///
    /// # Errors
    ///
    /// When the package cannot be read, or does not state its layout and model.
    pub fn open(path: &Path, threads: usize) -> Result<CpuPrefill, Error> {
        let package = Arc::new(Package::open(path)?);
        let (layout, model) = declared(&package)?;
        let tokens_input = input_name(layout.inputs.tokens.as_deref(), "tokens")?;
        let mut functions = Vec::new();
        for function in package.program().functions.values() {
            if let Some(tokens) = function_length(function, tokens_input) {
                functions.push(FunctionInfo { name: function.name.clone(), tokens });
            }
        }
        functions.sort_by_key(|f| f.tokens);
        if functions.is_empty() {
            return Err(Error::new(
                ErrorKind::Package,
                format!(
                    "no function of `{}` has an input `{tokens_input}` of shape (1, length)",
                    path.display()
                ),
            ));
        }
        Ok(CpuPrefill { package, model, layout, functions, loaded: BTreeMap::new(), threads })
    }

    /// The package.
    pub fn package(&self) -> &Package {
        &self.package
    }

    /// The most bytes that activations of the function for `tokens` tokens take, weights not counted.
    ///
    /// # Errors
    ///
    /// As [`Prefill::prepare`].
    pub fn peak_bytes(&mut self, tokens: usize) -> Result<u64, Error> {
        let name = choose_function(&self.functions, tokens)?.name.clone();
        Ok(self.load(&name)?.peak_bytes())
    }

    fn load(&mut self, function: &str) -> Result<&Executable, Error> {
        if !self.loaded.contains_key(function) {
            let options = Options::with_threads(self.threads);
            let executable = Executable::load(self.package.clone(), function, &options)?;
            self.loaded.insert(function.to_owned(), executable);
        }
        Ok(&self.loaded[function])
    }
}

/// The layout and the model that a package declares.
pub(crate) fn declared(package: &Package) -> Result<(Layout, ModelSpec), Error> {
    let get = |key: &str| {
        package.metadata().get(key).ok_or_else(|| {
            Error::new(
                ErrorKind::Layout,
                format!(
                    "`{}` does not state its cache: the metadata key `{key}` is missing",
                    package.path().display()
                ),
            )
            .hint("export it with `kvbaton export`, or see what it holds with `kvbaton inspect`")
            .field("key", key)
        })
    };
    let layout = Layout::from_toml(get(LAYOUT_KEY)?)?;
    let model = serde_json::from_str(get(MODEL_KEY)?).map_err(|e| {
        Error::new(
            ErrorKind::Package,
            format!("the package's metadata key `{MODEL_KEY}` cannot be read: {e}"),
        )
    })?;
    Ok((layout, model))
}

fn input_name<'a>(name: Option<&'a str>, role: &str) -> Result<&'a str, Error> {
    name.ok_or_else(|| {
        Error::new(ErrorKind::Layout, format!("the layout does not name the program's {role} input"))
            .hint(format!("add `{role} = \"…\"` to its [inputs] table"))
    })
}

/// S, when the function has a token input of shape (1, S).
fn function_length(function: &Function, tokens_input: &str) -> Option<usize> {
    let input = function.inputs.iter().map(|&id| function.value(id)).find(|v| v.name == tokens_input)?;
    match &input.ty {
        ValueType::Tensor(ty) => match ty.fixed_shape()?.as_slice() {
            [1, length] => Some(*length),
            _ => None,
        },
        _ => None,
    }
}

impl Prefill for CpuPrefill {
    fn engine(&self) -> &'static str {
        "cpu"
    }

    fn functions(&self) -> &[FunctionInfo] {
        &self.functions
    }

    fn model(&self) -> Option<&ModelSpec> {
        Some(&self.model)
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
        let vocab = self.model.vocab_size;
        if let Some((at, &id)) = tokens.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
            return Err(Error::new(
                ErrorKind::Usage,
                format!("token {id} at position {at} is not in the vocabulary of {vocab}"),
            )
            .field("token", id)
            .field("position", at)
            .field("vocab_size", vocab));
        }
        let tokens_input = input_name(self.layout.inputs.tokens.as_deref(), "tokens")?.to_owned();
        let mut ids = vec![0i32; function.tokens];
        for (slot, &id) in ids.iter_mut().zip(tokens) {
            *slot = i32::try_from(id).unwrap_or(i32::MAX);
        }
        let mut inputs = vec![(tokens_input, Array::from_i32(&[1, function.tokens], &ids)?)];
        if let Some(name) = &self.layout.inputs.last_index {
            let last = i32::try_from(tokens.len() - 1).unwrap_or(i32::MAX);
            inputs.push((name.clone(), Array::from_i32(&[1], &[last])?));
        }
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();

        let executable = self.load(&function.name)?;
        let start = Instant::now();
        let outputs = executable.run(&inputs)?;
        let seconds = start.elapsed().as_secs_f64();

        let logits_name = self.layout.outputs.logits.clone();
        let mut tensors = Vec::new();
        let mut logits = None;
        for (name, array) in outputs {
            if Some(&name) == logits_name.as_ref() {
                logits = array.to_f32().map(|values| Logits { values });
            } else if let Some(tensor) = tensor(name, &array) {
                tensors.push(tensor);
            }
        }
        let live = LiveRows::seen(tokens.len());
        let cache = CacheView::new(self.layout.clone(), self.model.cache.clone(), tensors, live)?
            .with_model(Some(self.model.clone()))
            .with_tokens(tokens.to_vec());
        let report = PrefillReport {
            engine: self.engine().to_owned(),
            function: function.name,
            tokens: tokens.len(),
            seconds,
            tokens_per_second: tokens.len() as f64 / seconds,
        };
        Ok(Prefilled { cache, logits, report })
    }
}

/// An output as a cache tensor, if its type is one that caches have.
fn tensor(name: String, array: &Array) -> Option<Tensor> {
    let dtype = match array.dtype() {
        DataType::Float16 => DType::Float16,
        DataType::BFloat16 => DType::BFloat16,
        DataType::Float32 => DType::Float32,
        DataType::Int8 => DType::Int8,
        _ => return None,
    };
    Some(Tensor { info: TensorInfo::contiguous(name, dtype, array.shape()), bytes: array.bytes().clone() })
}
