//! What a choice of engines is made from: a model, its packages, a machine.

use std::path::Path;

use kvbaton::bench::{Machine as Facts, shape};
use kvbaton::layout::{CacheSpec, DType, ModelSpec};
use kvbaton::plan::route::{Choice, Machine, ModelWork, Objective, Package, Request, choose};
use kvbaton::{
    CpuDecode, CpuOptions, CpuPrefill, Decode, Error, ErrorKind, Prefill, built_in_work, machine, model_work,
    this_machine,
};

use super::need_host;
use crate::Host;
use crate::args::{Aim, Circumstances};

impl Aim {
    fn objective(self) -> Objective {
        match self {
            Aim::Ttft => Objective::Ttft,
            Aim::Total => Objective::Total,
            Aim::Energy => Objective::Energy,
        }
    }
}

/// A model, as far as its cost goes.
pub(crate) struct Subject {
    pub(crate) cache: CacheSpec,
    pub(crate) work: ModelWork,
    /// Type of MLX's weights, as machine files name it.
    pub(crate) dtype: String,
    pub(crate) element_bytes: usize,
    /// What the folder says of itself, where there is one.
    pub(crate) model: Option<ModelSpec>,
}

/// A model by its folder or by the name of a built-in shape, its weights held as `dtype`.
pub(crate) fn subject(name: &str, dtype: Option<DType>, host: Option<&dyn Host>) -> Result<Subject, Error> {
    let folder = Path::new(name);
    if let (Some(cache), Some(mut work), false) = (shape(name), built_in_work(name), folder.is_dir()) {
        let held = dtype.unwrap_or(DType::Float16);
        work.weight_bytes *= held.size_bytes() as f64 / 2.0;
        let (dtype, element_bytes) = (held.to_string(), held.size_bytes());
        return Ok(Subject { cache, work, dtype, element_bytes, model: None });
    }
    if !folder.is_dir() {
        let known = kvbaton::bench::SHAPES.join(", ");
        return Err(Error::new(ErrorKind::Usage, format!("no model folder `{name}`, and no built-in shape"))
            .hint(format!("known: {known}; or name a folder with config.json and safetensors"))
            .field("model", name));
    }
    let model = need_host(host, "plan --model FOLDER")?.model_spec(folder)?;
    let work = model_work(folder, &model.cache, dtype)?;
    let own = float_of(folder);
    let held = dtype.unwrap_or(own);
    let name = match bits_of(folder) {
        Some(bits) => format!("{bits}bit"),
        None => held.to_string(),
    };
    Ok(Subject {
        cache: model.cache.clone(),
        work,
        dtype: name,
        element_bytes: held.size_bytes(),
        model: Some(model),
    })
}

fn config(folder: &Path) -> Option<serde_json::Value> {
    serde_json::from_str(&std::fs::read_to_string(folder.join("config.json")).ok()?).ok()
}

/// The type in which a folder's model computes.
fn float_of(folder: &Path) -> DType {
    let config = config(folder);
    let name = config.as_ref().and_then(|c| c.get("torch_dtype").or_else(|| c.get("dtype"))?.as_str());
    name.and_then(|n| n.parse().ok()).unwrap_or(DType::Float16)
}

/// Bits of a quantised folder's weights.
fn bits_of(folder: &Path) -> Option<u64> {
    config(folder)?.get("quantization")?.get("bits")?.as_u64()
}

/// A package that prefills, as far as its cost goes. It must be of `subject`'s model.
pub(crate) fn prefill_package(path: &Path, subject: &Subject, threads: usize) -> Result<Package, Error> {
    if path.is_file() || path.join("chain.toml").is_file() {
        let message = format!("the cost of a chain of packages cannot be estimated: `{}`", path.display());
        return Err(Error::new(ErrorKind::Usage, message).hint("name one package, or the route with --route"));
    }
    let engine = CpuPrefill::open(path, threads)?;
    if let (Some(own), Some(model)) = (engine.model(), &subject.model) {
        kvbaton::check_compatible(own, model, kvbaton::Waived { weights: true })?;
    }
    if engine.cache().is_some_and(|cache| *cache != subject.cache) {
        let message = format!("the cache of `{}` is not that of the model", path.display());
        return Err(Error::new(ErrorKind::Incompatible, message));
    }
    Ok(Package {
        lengths: engine.functions().iter().map(|f| f.tokens).collect(),
        chunks: engine.chunks(),
        weight_bytes: folder_bytes(path),
        dtype: engine.model().and_then(|m| m.dtype.clone()).unwrap_or_else(|| "float16".to_owned()),
        element_bytes: 2,
    })
}

/// A package that decodes, as far as its cost goes. It must be of `subject`'s model.
pub(crate) fn decode_package(path: &Path, subject: &Subject, threads: usize) -> Result<Package, Error> {
    let engine = CpuDecode::open(path, &CpuOptions::with_threads(threads))?;
    if let Some(model) = &subject.model {
        kvbaton::check_compatible(engine.model(), model, kvbaton::Waived { weights: true })?;
    }
    if engine.model().cache != subject.cache {
        let message = format!("the cache of `{}` is not that of the model", path.display());
        return Err(Error::new(ErrorKind::Incompatible, message));
    }
    Ok(Package {
        lengths: Vec::new(),
        chunks: Some((1, engine.capacity())),
        weight_bytes: folder_bytes(path),
        dtype: engine.model().dtype.clone().unwrap_or_else(|| "float16".to_owned()),
        element_bytes: 2,
    })
}

/// Bytes of all files below a folder: nearly all of a package is its weights.
fn folder_bytes(folder: &Path) -> f64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries
        .map(|entry| match entry.metadata() {
            Ok(facts) if facts.is_dir() => folder_bytes(&entry.path()),
            Ok(facts) => facts.len() as f64,
            Err(_) => 0.0,
        })
        .sum()
}

/// The machine that was named, or this one.
pub(crate) fn named_machine(circumstances: &Circumstances) -> Result<Machine, Error> {
    match &circumstances.machine {
        Some(name) => machine(name),
        None => this_machine(&Facts::here().cpu),
    }
}

/// What is to be decided.
pub(crate) struct Question<'a> {
    pub(crate) subject: &'a Subject,
    pub(crate) machine: &'a Machine,
    pub(crate) context: usize,
    pub(crate) max_tokens: usize,
    pub(crate) prefill: Option<&'a Package>,
    pub(crate) decode: Option<&'a Package>,
}

/// The routes and the pick.
///
/// # Errors
///
/// When the circumstances make no sense, or no route that could be taken has an estimate.
pub(crate) fn decide(question: &Question<'_>, circumstances: &Circumstances) -> Result<Choice, Error> {
    let usage = |message: String| Err(Error::new(ErrorKind::Usage, message));
    let busy = circumstances.gpu_busy;
    if !(0.0..1.0).contains(&busy) {
        return usage(format!("--gpu-busy {busy} is no share from 0 to below 1"));
    }
    if question.context == 0 {
        return Err(Error::new(ErrorKind::EmptyPrompt, "a prompt of 0 tokens has no first token"));
    }
    if question.max_tokens == 0 {
        return usage("--max-tokens 0 asks for no answer".to_owned());
    }
    let Question { subject, machine, .. } = question;
    let choice = choose(
        &Request {
            machine,
            work: &subject.work,
            cache: &subject.cache,
            context: question.context,
            max_tokens: question.max_tokens,
            gpu_busy: busy,
            dtype: &subject.dtype,
            element_bytes: subject.element_bytes,
            prefill: question.prefill,
            decode: question.decode,
        },
        circumstances.objective.objective(),
    );
    if choice.pick.is_none() {
        return Err(Error::new(ErrorKind::Usage, choice.reason)
            .hint("measure this machine with `kvbaton calibrate`, or name another with --machine")
            .field("machine", machine.name.clone()));
    }
    Ok(choice)
}
