//! Prefill on the CPU: the package's program, run by `kvbaton-exec`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvbaton_exec::{Array, Executable, Options};
use kvbaton_layout::{DType, Layout, LiveRows, ModelSpec, Placement, TensorInfo};
use kvbaton_mil::program::{DataType, Function, ValueType};
use kvbaton_mil::{LAYOUT_KEY, MODEL_KEY, Package};

use crate::activations::{Activations, Collector};
use crate::inputs::{self, Wanted};
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
    options: Options,
}

impl CpuPrefill {
    /// Opens a package that says of itself what its cache is. `threads` 0 takes all cores.
    ///
    /// # Errors
    ///
    /// When the package cannot be read, or does not state its layout and model.
    pub fn open(path: &Path, threads: usize) -> Result<CpuPrefill, Error> {
        CpuPrefill::open_stated(path, threads, Stated::default())
    }

    /// Opens a package of which the caller says what the package does not.
    ///
    /// # Errors
    ///
    /// When the package cannot be read, when nobody states its layout or its model, or when both the package
    /// and the caller do and disagree.
    pub fn open_stated(path: &Path, threads: usize, stated: Stated) -> Result<CpuPrefill, Error> {
        let package = Arc::new(Package::open(path)?);
        let (layout, model) = agree(&package, stated)?;
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
        let options = Options::with_threads(threads);
        Ok(CpuPrefill { package, model, layout, functions, loaded: BTreeMap::new(), options })
    }

    /// With other options; functions that are loaded already are loaded again.
    #[must_use]
    pub fn with_options(mut self, options: Options) -> CpuPrefill {
        self.options = options;
        self.loaded.clear();
        self
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

    /// The function for a prompt whose tokens are all in the vocabulary.
    fn function_for(&self, tokens: &[u32]) -> Result<FunctionInfo, Error> {
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
        Ok(function)
    }

    /// Rows of padding before the prompt's, where the layout has them there.
    fn pad(&self, rows: usize, tokens: usize) -> Option<usize> {
        (self.layout.placement == Placement::LeftPadded).then(|| rows - tokens)
    }

    fn load(&mut self, function: &str) -> Result<&Executable, Error> {
        if !self.loaded.contains_key(function) {
            let executable = Executable::load(self.package.clone(), function, &self.options)?;
            self.loaded.insert(function.to_owned(), executable);
        }
        Ok(&self.loaded[function])
    }
}

/// What a caller says of a package.
#[derive(Clone, Debug, Default)]
pub struct Stated {
    /// The layout of its cache.
    pub layout: Option<Layout>,
    /// The model it was made from.
    pub model: Option<ModelSpec>,
}

/// The layout and the model of a package, from its metadata or from the caller; both must agree where both speak.
fn agree(package: &Package, stated: Stated) -> Result<(Layout, ModelSpec), Error> {
    let missing = |what: &str, key: &str, hint: &str| {
        let path = package.path().display();
        let message = format!("`{path}` does not state its {what}: the metadata key `{key}` is missing");
        Error::new(ErrorKind::Layout, message)
            .hint(format!("{hint}; `kvbaton inspect` shows what it holds"))
            .field("key", key)
    };
    let declared = package.metadata().get(LAYOUT_KEY).map(|text| Layout::from_toml(text)).transpose()?;
    let layout = match (declared, stated.layout) {
        (Some(own), Some(said)) if own.tensors != said.tensors || own.placement != said.placement => {
            let message =
                format!("the package declares the layout `{}`, the caller says `{}`", own.name, said.name);
            return Err(Error::new(ErrorKind::Layout, message)
                .hint("leave --layout out, or export the package again")
                .field("package", own.to_toml())
                .field("caller", said.to_toml()));
        }
        (Some(own), _) => own,
        (None, Some(said)) => said,
        (None, None) => return Err(missing("layout", LAYOUT_KEY, "say it with --layout NAME|FILE.toml")),
    };
    let model = match (declared_model(package)?, stated.model) {
        (Some(own), Some(said)) => match own.differences(&said).first() {
            Some(first) => {
                let message = format!("the package's model is not the one that the caller names: {first}");
                return Err(Error::new(ErrorKind::Incompatible, message));
            }
            None => own,
        },
        (Some(own), None) => own,
        (None, Some(said)) => said,
        (None, None) => {
            return Err(missing("model", MODEL_KEY, "name the folder it was made from with --model DIR"));
        }
    };
    Ok((layout, model))
}

fn declared_model(package: &Package) -> Result<Option<ModelSpec>, Error> {
    let Some(text) = package.metadata().get(MODEL_KEY) else { return Ok(None) };
    serde_json::from_str(text).map(Some).map_err(|e| {
        let message = format!("the package's metadata key `{MODEL_KEY}` cannot be read: {e}");
        Error::new(ErrorKind::Package, message)
    })
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

/// Values of every input of a function that takes `rows` tokens.
fn prompt_inputs(
    executable: &Executable,
    layout: &Layout,
    tokens: &[u32],
    rows: usize,
) -> Result<Vec<(String, Array)>, Error> {
    let wanted: Vec<Wanted<'_>> =
        executable.inputs().iter().map(|f| Wanted { name: &f.name, ty: &f.ty }).collect();
    inputs::build(layout, &wanted, tokens, rows)
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
        let function = self.function_for(tokens)?;
        let layout = self.layout.clone();
        let executable = self.load(&function.name)?;
        let inputs = prompt_inputs(executable, &layout, tokens, function.tokens)?;
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
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
        let pad = self.pad(function.tokens, tokens.len());
        let live = LiveRows { pad, ..LiveRows::seen(tokens.len()) };
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

    fn activations(&mut self, tokens: &[u32]) -> Result<Activations, Error> {
        let function = self.function_for(tokens)?;
        let options = self.options.clone().fused(false);
        let executable = Executable::load(self.package.clone(), &function.name, &options)?;
        let inputs = prompt_inputs(&executable, &self.layout, tokens, function.tokens)?;
        let inputs: Vec<(&str, Array)> = inputs.iter().map(|(n, a)| (n.as_str(), a.clone())).collect();
        let pad = self.pad(function.tokens, tokens.len()).unwrap_or(0);
        let program = self.package.function(Some(&function.name))?;
        let numerics = options.numerics.name();
        let live = pad..pad + tokens.len();
        let names = &self.layout.inputs;
        let mut collector = Collector::new(&self.package, program, names, numerics, function.tokens, live);
        executable.run_observed(&inputs, &mut |observed| collector.see(&observed))?;
        Ok(collector.finish())
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
