//! `kvbaton inspect`.

use kvbaton::Error;
use kvbaton::mil::{FeatureInspection, FunctionInspection, Inspection, Package, inspect};

use crate::args::Inspect;
use crate::printer::{Printer, bytes, table};

pub(crate) fn run(verb: &Inspect, printer: &Printer) -> Result<(), Error> {
    let inspection = inspect(&Package::open(&verb.file)?);
    if printer.is_json() {
        printer.document(&inspection);
    } else {
        printer.data(&text(&inspection));
    }
    Ok(())
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
