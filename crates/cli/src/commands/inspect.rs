//! `kvbaton inspect`.

use std::path::Path;

use kvbaton::mil::{FeatureInspection, FunctionInspection, Inspection, MODEL_KEY, Package, inspect};
use kvbaton::{
    Activation, Activations, ChainFile, CpuPrefill, Error, ErrorKind, Prefill, Stated, chain_file,
};
use serde::Serialize;

use super::{described, layout, need_host, need_tokenizer, parse_ids, read_text};
use crate::Host;
use crate::args::Inspect;
use crate::printer::{Printer, bytes, table};

/// The JSON document.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    package: &'a Inspection,
    #[serde(skip_serializing_if = "Option::is_none")]
    activations: Option<Activations>,
}

/// The JSON document of a chain.
#[derive(Serialize)]
struct ChainReport {
    kind: &'static str,
    path: String,
    /// In the order in which a prompt passes them.
    packages: Vec<Inspection>,
}

pub(crate) fn run(verb: &Inspect, host: Option<&dyn Host>, printer: &Printer) -> Result<(), Error> {
    if let Some(file) = chain_file(&verb.file) {
        return chain(verb, &file, printer);
    }
    let package = Package::open(&verb.file)?;
    let inspection = inspect(&package);
    let tokens = prompt(verb, host)?;
    let activations = tokens.map(|tokens| activations(verb, &package, host, &tokens)).transpose()?;
    if printer.is_json() {
        printer.document(&Report { package: &inspection, activations });
        return Ok(());
    }
    printer.data(&text(&inspection));
    if let Some(activations) = activations {
        printer.data(&activations_text(&activations));
    }
    Ok(())
}

/// Inspects every package of a chain.
fn chain(verb: &Inspect, file: &Path, printer: &Printer) -> Result<(), Error> {
    if verb.prompt.prompt.is_some() || verb.prompt.prompt_tokens.is_some() {
        let message = "activations are shown of one package, not of a chain";
        return Err(Error::new(ErrorKind::Usage, message).hint("leave the prompt out"));
    }
    let folder = file.parent().unwrap_or(Path::new("."));
    let packages = ChainFile::read(file)?
        .stages
        .iter()
        .map(|stage| Ok(inspect(&Package::open(&folder.join(&stage.package))?)))
        .collect::<Result<Vec<_>, Error>>()?;
    if printer.is_json() {
        printer.document(&ChainReport { kind: "chain", path: file.display().to_string(), packages });
        return Ok(());
    }
    printer.data(&format!("{}: a chain of {} packages\n", file.display(), packages.len()));
    packages.iter().for_each(|package| printer.data(&format!("\n{}", text(package))));
    Ok(())
}

/// The ids of the prompt, if one is given.
fn prompt(verb: &Inspect, host: Option<&dyn Host>) -> Result<Option<Vec<u32>>, Error> {
    if let Some(path) = &verb.prompt.prompt_tokens {
        return parse_ids(&read_text(path)?, &path.display().to_string()).map(Some);
    }
    let Some(text) = &verb.prompt.prompt else { return Ok(None) };
    let Some(folder) = &verb.model else {
        return Err(Error::new(ErrorKind::Usage, "--prompt needs the model's tokenizer")
            .hint("name its folder with --model DIR, or give ids with --prompt-tokens FILE"));
    };
    let host = need_host(host, "inspect --prompt")?;
    need_tokenizer(folder, host)?.encode(text, verb.ignore_chat_template).map(Some)
}

fn activations(
    verb: &Inspect,
    package: &Package,
    host: Option<&dyn Host>,
    tokens: &[u32],
) -> Result<Activations, Error> {
    // Where the package says what its model is, the folder serves for its tokenizer alone.
    let folder = verb.model.as_ref().filter(|_| !package.metadata().contains_key(MODEL_KEY));
    let model = folder.map(|f| described(f, need_host(host, "inspect --model")?)).transpose()?;
    let layout = verb.layout.as_deref().map(layout).transpose()?;
    let engine = CpuPrefill::open_stated(&verb.file, verb.threads, Stated { layout, model })?;
    engine.with_options(verb.executor.options(verb.threads)).activations(tokens)
}

fn activations_text(found: &Activations) -> String {
    let mut out = format!(
        "\nprompt of {} tokens on {}, numerics {}: {} results ({} masked ones left out)\n",
        found.tokens,
        found.functions.join(", "),
        found.numerics,
        found.results,
        found.masked_results
    );
    let place = |a: &Activation| {
        let layer = a.layer.map_or_else(String::new, |l| format!(", layer {l}"));
        let position = a.position.map_or_else(String::new, |p| format!(", position {p}"));
        format!("{} `{}`{layer}{position}, index {:?}", a.op, a.output, a.index)
    };
    let largest = match &found.largest {
        Some(a) => vec!["  largest activation".to_owned(), a.value.to_string(), place(a)],
        None => vec!["  largest activation".to_owned(), "none".to_owned(), "no value is finite".to_owned()],
    };
    let first = found.first_overflow.as_ref().map_or_else(String::new, |o| {
        let layer = o.layer.map_or_else(String::new, |l| format!(", layer {l}"));
        format!("first in {} `{}`{layer}", o.op, o.output)
    });
    let count = |what: &str, n: u64| {
        vec![format!("  {what}"), n.to_string(), if n > 0 { first.clone() } else { String::new() }]
    };
    out += &table(&[
        largest,
        count("infinite", found.infinite),
        count("NaN", found.nan),
        count("beyond fp16", found.beyond_half),
    ]);
    out
}

fn text(package: &Inspection) -> String {
    let mut out = format!(
        "{}: Core ML package, specification {} (macOS {}, iOS {})\n",
        package.path, package.specification_version, package.requires.macos, package.requires.ios
    );
    if !package.short_description.is_empty() {
        out += &format!("{}\n", package.short_description);
    }
    let size = |n: u64| bytes(usize::try_from(n).unwrap_or(usize::MAX));
    out += &format!("\nweights: {}\n", size(package.weights.file_bytes));
    for of in &package.weights.by_dtype {
        out += &format!("  {}: {} tensors, {}\n", of.dtype, of.count, size(of.bytes));
    }
    if !package.user_metadata.is_empty() {
        out += &format!("metadata: {}\n", package.user_metadata.join(", "));
    }
    for function in &package.functions {
        let default = if function.name == package.default_function { ", the default" } else { "" };
        out += &format!("\nfunction {} ({}{default})\n", function.name, function.opset);
        out += &features(function);
        out += &operations(function);
        out += &cache(function);
    }
    out += "\n";
    if package.warnings.is_empty() {
        out += "nothing here is known to be refused by the Neural Engine\n";
    }
    for warning in &package.warnings {
        out += &format!("warning: {}: {} [{}]\n", warning.place, warning.message, warning.source);
    }
    out
}

fn features(function: &FunctionInspection) -> String {
    let mut rows = Vec::new();
    for (what, features) in
        [("input", &function.inputs), ("output", &function.outputs), ("state", &function.states)]
    {
        for feature in features {
            rows.push(vec![format!("  {what} {}", feature.name), feature_type(feature)]);
        }
    }
    table(&rows)
}

fn feature_type(feature: &FeatureInspection) -> String {
    let dtype = feature.dtype.map_or_else(|| feature.kind.to_owned(), |d| d.to_string());
    let mut text = format!("{dtype} {:?}", feature.shape);
    if let Some(shapes) = &feature.enumerated_shapes {
        text += &format!(" or one of {shapes:?}");
    }
    if let Some(ranges) = &feature.shape_range {
        let bounds: Vec<String> = ranges
            .iter()
            .map(|(low, high)| high.map_or_else(|| format!("{low}.."), |high| format!("{low}..={high}")))
            .collect();
        text += &format!(" within [{}]", bounds.join(", "));
    }
    if feature.optional {
        text += ", optional";
    }
    text
}

fn operations(function: &FunctionInspection) -> String {
    let mut counts: Vec<_> = function.operations.iter().collect();
    counts.sort_by_key(|(kind, count)| (std::cmp::Reverse(**count), (*kind).clone()));
    let list: Vec<String> = counts.iter().map(|(kind, count)| format!("{kind} {count}")).collect();
    format!("  operations: {} (constants: {})\n", list.join(", "), function.constants)
}

fn cache(function: &FunctionInspection) -> String {
    let interface = &function.cache_interface;
    let found = &interface.discovered;
    let mut out = match &interface.declared.layout {
        Some(layout) => format!("  cache, as the package declares it:\n{}", indent(layout)),
        None => "  cache: the package declares none; names and shapes suggest:\n".to_owned(),
    };
    if interface.declared.layout.is_none() {
        for cache in &found.caches {
            out += &format!(
                "    {} {}: {} {:?}, because {}\n",
                serde_name(&cache.port),
                cache.name,
                cache.dtype,
                cache.shape.iter().map(|d| d.unwrap_or(0)).collect::<Vec<_>>(),
                cache.because
            );
        }
        if found.caches.is_empty() {
            out += "    nothing\n";
        }
    }
    out
}

fn serde_name(value: &impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

fn indent(text: &str) -> String {
    text.lines().map(|l| if l.is_empty() { "\n".to_owned() } else { format!("    {l}\n") }).collect()
}
