//! What the functions of a package are: said by the package itself, or told from the shape of their inputs.

use std::collections::BTreeMap;
use std::path::Path;

use kvbaton_layout::{CacheSpec, Inputs, Layout};
use kvbaton_mil::program::{Function, TensorType, ValueId, ValueType};
use kvbaton_mil::{FUNCTIONS_KEY, FeatureKind, Flexibility, PAST_KEY, Package};
use serde::Deserialize;

use crate::{Error, ErrorKind, FunctionInfo};

/// What a function is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Purpose {
    /// Many tokens at once.
    Prefill,
    /// One token at a time, the cache in states.
    Decode,
}

/// A function as the package declares it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Declared {
    /// Its name.
    pub(crate) name: String,
    /// What it is for.
    pub(crate) kind: Purpose,
    /// Tokens it takes at once.
    pub(crate) tokens: usize,
    /// Rows of the cache so far that it takes; `None` when it starts from nothing.
    #[serde(default)]
    pub(crate) context: Option<usize>,
}

/// A function that takes the cache so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkFunction {
    pub(crate) name: String,
    /// Tokens it takes at once.
    pub(crate) tokens: usize,
    /// Rows of the whole context, its own among them.
    pub(crate) context: usize,
}

/// The functions of a package that prefill: those that start from nothing, shortest first, and those that take the
/// cache so far, smallest context first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PrefillFunctions {
    pub(crate) whole: Vec<FunctionInfo>,
    pub(crate) chunks: Vec<ChunkFunction>,
}

/// What is known of a package's functions, whichever engine runs it.
pub(crate) struct Facts<'a> {
    pub(crate) path: &'a Path,
    pub(crate) metadata: &'a BTreeMap<String, String>,
    /// Shape of the input that takes tokens, by function, the largest where several are allowed; `None` where it has no
    /// such input, or one without a bound.
    pub(crate) token_shapes: BTreeMap<String, Option<Vec<usize>>>,
}

impl<'a> Facts<'a> {
    /// The facts of a package whose functions take tokens in `tokens_input`.
    pub(crate) fn of(package: &'a Package, tokens_input: &str) -> Facts<'a> {
        let functions = &package.program().functions;
        let shape = |f: &Function| {
            let input = f.inputs.iter().map(|&id| f.value(id)).find(|v| v.name == tokens_input)?;
            let ValueType::Tensor(ty) = &input.ty else { return None };
            ty.fixed_shape().or_else(|| largest(package, &f.name, tokens_input))
        };
        let token_shapes = functions.iter().map(|(name, f)| (name.clone(), shape(f))).collect();
        Facts { path: package.path(), metadata: package.metadata(), token_shapes }
    }
}

/// The largest shape that the package's description allows an input.
fn largest(package: &Package, function: &str, input: &str) -> Option<Vec<usize>> {
    let features = package.description().functions.get(function)?;
    let FeatureKind::Array(array) = &features.inputs.iter().find(|f| f.name == input)?.kind else {
        return None;
    };
    match &array.flexibility {
        Flexibility::Ranges(ranges) => ranges.iter().map(|range| range.max).collect(),
        Flexibility::Enumerated(shapes) => {
            shapes.iter().chain([&array.shape]).max_by_key(|s| s.iter().product::<usize>()).cloned()
        }
        Flexibility::Fixed => None,
    }
}

/// What the package declares of its functions, if it does.
pub(crate) fn declared(facts: &Facts<'_>) -> Result<Option<Vec<Declared>>, Error> {
    let Some(text) = facts.metadata.get(FUNCTIONS_KEY) else { return Ok(None) };
    let unreadable = |what: String| {
        let path = facts.path.display();
        let message = format!("the metadata key `{FUNCTIONS_KEY}` of `{path}` cannot be used: {what}");
        Error::new(ErrorKind::Package, message).field("key", FUNCTIONS_KEY)
    };
    let declared: Vec<Declared> = serde_json::from_str(text).map_err(|e| unreadable(e.to_string()))?;
    for function in &declared {
        if !facts.token_shapes.contains_key(&function.name) {
            return Err(unreadable(format!("the program has no function `{}`", function.name)));
        }
        if function.tokens == 0 || function.context.is_some_and(|c| c < function.tokens) {
            let (tokens, context) = (function.tokens, function.context.unwrap_or(0));
            let name = &function.name;
            return Err(unreadable(format!("`{name}` takes {tokens} tokens in a context of {context}")));
        }
    }
    Ok(Some(declared))
}

/// The name of the only function that a package declares, for packages whose only function has no name in the program.
pub(crate) fn only_declared(metadata: &BTreeMap<String, String>) -> Option<String> {
    let declared: Vec<Declared> = serde_json::from_str(metadata.get(FUNCTIONS_KEY)?).ok()?;
    <[Declared; 1]>::try_from(declared).ok().map(|[only]| only.name)
}

/// The functions of a package that prefill, their tokens in the input `tokens_input`.
pub(crate) fn prefill_functions(facts: &Facts<'_>, tokens_input: &str) -> Result<PrefillFunctions, Error> {
    let mut found = PrefillFunctions::default();
    match declared(facts)? {
        Some(declared) => {
            for function in declared.into_iter().filter(|f| f.kind == Purpose::Prefill) {
                let Declared { name, tokens, context, .. } = function;
                match context {
                    Some(context) => found.chunks.push(ChunkFunction { name, tokens, context }),
                    None => found.whole.push(FunctionInfo { name, tokens }),
                }
            }
        }
        None => {
            for (name, shape) in &facts.token_shapes {
                if let Some([1, tokens]) = shape.as_deref() {
                    found.whole.push(FunctionInfo { name: name.clone(), tokens: *tokens });
                }
            }
        }
    }
    found.whole.sort_by_key(|f| f.tokens);
    found.chunks.sort_by_key(|f| f.context);
    if found == PrefillFunctions::default() {
        let path = facts.path.display();
        return Err(if facts.metadata.contains_key(FUNCTIONS_KEY) {
            Error::new(ErrorKind::Package, format!("no function of `{path}` prefills"))
                .hint("a decode package goes to --decode; export one that prefills with --kind prefill")
        } else {
            let message =
                format!("no function of `{path}` has an input `{tokens_input}` of shape (1, length)");
            Error::new(ErrorKind::Package, message)
        });
    }
    if !found.chunks.is_empty() && !facts.metadata.contains_key(PAST_KEY) {
        let path = facts.path.display();
        let message = format!(
            "`{path}` has functions that take a past, and does not state its layout: the metadata key \
                 `{PAST_KEY}` is missing"
        );
        return Err(Error::new(ErrorKind::Layout, message).field("key", PAST_KEY));
    }
    Ok(found)
}

/// Refuses a package that declares its functions and has a program of which that is not true. `whole`: it has all layers
/// of its model, and so one that keeps the whole context. `inputs_of` are the names and shapes of a function's inputs.
pub(crate) fn check_declared(
    facts: &Facts<'_>,
    functions: &PrefillFunctions,
    inputs: &Inputs,
    whole: bool,
    inputs_of: impl Fn(&str) -> Vec<(String, Vec<usize>)>,
) -> Result<(), Error> {
    if !facts.metadata.contains_key(FUNCTIONS_KEY) {
        return Ok(());
    }
    let single = functions.whole.iter().map(|f| (&f.name, f.tokens, None));
    let chunks = functions.chunks.iter().map(|f| (&f.name, f.tokens, Some(f.context).filter(|_| whole)));
    single.chain(chunks).try_for_each(|(name, tokens, context)| {
        check_shapes(tokens, context, inputs, &inputs_of(name)).map_err(|what| {
            let message = format!("function `{name}` of `{}` {what}", facts.path.display());
            Error::new(ErrorKind::Package, message).field("key", FUNCTIONS_KEY)
        })
    })
}

/// Refuses a function that is not what it is declared to be: another number of tokens, or no tensor of the context.
fn check_shapes(
    tokens: usize,
    context: Option<usize>,
    inputs: &Inputs,
    shapes: &[(String, Vec<usize>)],
) -> Result<(), String> {
    let own = function_length(inputs, shapes);
    if own != Some(tokens) {
        let own = own.map_or_else(|| "no input of tokens".to_owned(), |own| format!("{own} in the program"));
        return Err(format!("is declared to take {tokens} tokens, and has {own}"));
    }
    match context {
        Some(context) if !shapes.iter().any(|(_, shape)| shape.contains(&context)) => {
            Err(format!("is declared to take a past of {context} rows, and has no input of as many"))
        }
        _ => Ok(()),
    }
}

fn shape(function: &Function, id: ValueId) -> Vec<usize> {
    function.tensor(id).and_then(TensorType::fixed_shape).unwrap_or_default()
}

/// S, when a function with inputs of these shapes has tokens of shape (1, S), or hidden states of shape (1, S, hidden).
pub(crate) fn function_length(inputs: &Inputs, shapes: &[(String, Vec<usize>)]) -> Option<usize> {
    let of = |name: &Option<String>| {
        let found = shapes.iter().find(|(input, _)| Some(input) == name.as_ref());
        found.map(|(_, shape)| shape.as_slice())
    };
    match (of(&inputs.tokens), of(&inputs.hidden)) {
        (Some([1, length]), _) | (None, Some([1, length, _])) => Some(*length),
        _ => None,
    }
}

/// The function of a package that decodes a token at a time: its name, and the rows of its context. `states` are the names
/// and shapes of a function's states.
pub(crate) fn decode_function(
    facts: &Facts<'_>,
    layout: &Layout,
    cache: &CacheSpec,
    states: impl Fn(&str) -> Vec<(String, Vec<usize>)>,
) -> Result<(String, usize), Error> {
    let path = facts.path.display();
    let found = declared(facts)?.into_iter().flatten().find(|f| f.kind == Purpose::Decode);
    let Some(Declared { name, tokens: 1, context: Some(context), .. }) = found else {
        let message = format!("no function of `{path}` decodes a token at a time");
        return Err(Error::new(ErrorKind::Package, message)
            .hint("export one with --kind decode; a package that prefills goes to --prefill"));
    };
    let states = states(&name);
    if !states.iter().any(|(_, shape)| shape.contains(&context)) {
        let message = format!(
            "function `{name}` of `{path}` is declared to have a context of {context} rows, and has no state of as \
             many"
        );
        return Err(Error::new(ErrorKind::Package, message).field("key", FUNCTIONS_KEY));
    }
    for wanted in layout.tensor_names(cache)? {
        if !states.iter().any(|(state, _)| *state == wanted) {
            let message = format!("layout `{}` names a state `{wanted}` that `{name}` lacks", layout.name);
            return Err(Error::new(ErrorKind::Layout, message).field("state", wanted));
        }
    }
    Ok((name, context))
}

/// Names and shapes of the inputs of a package's function.
pub(crate) fn program_inputs(package: &Package, function: &str) -> Vec<(String, Vec<usize>)> {
    named_shapes(package, function, |f| &f.inputs)
}

/// Names and shapes of the states of a package's function.
pub(crate) fn program_states(package: &Package, function: &str) -> Vec<(String, Vec<usize>)> {
    named_shapes(package, function, |f| &f.states)
}

fn named_shapes(
    package: &Package,
    function: &str,
    values: fn(&Function) -> &[ValueId],
) -> Vec<(String, Vec<usize>)> {
    let Some(function) = package.program().functions.get(function) else { return Vec::new() };
    values(function).iter().map(|&id| (function.value(id).name.clone(), shape(function, id))).collect()
}
