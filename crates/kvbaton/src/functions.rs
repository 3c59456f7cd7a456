//! What the functions of a package are: said by the package itself, or told from the shape of their inputs.

use kvbaton_layout::Inputs;
use kvbaton_mil::program::{Function, ValueId, ValueType};
use kvbaton_mil::{FUNCTIONS_KEY, PAST_KEY, Package};
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

/// What the package declares of its functions, if it does.
pub(crate) fn declared(package: &Package) -> Result<Option<Vec<Declared>>, Error> {
    let Some(text) = package.metadata().get(FUNCTIONS_KEY) else { return Ok(None) };
    let unreadable = |what: String| {
        let path = package.path().display();
        let message = format!("the metadata key `{FUNCTIONS_KEY}` of `{path}` cannot be used: {what}");
        Error::new(ErrorKind::Package, message).field("key", FUNCTIONS_KEY)
    };
    let declared: Vec<Declared> = serde_json::from_str(text).map_err(|e| unreadable(e.to_string()))?;
    for function in &declared {
        if !package.program().functions.contains_key(&function.name) {
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

/// The functions of `package` that prefill; `inputs` names what they take.
pub(crate) fn prefill_functions(package: &Package, inputs: &Inputs) -> Result<PrefillFunctions, Error> {
    let mut found = PrefillFunctions::default();
    match declared(package)? {
        Some(declared) => {
            for function in declared.into_iter().filter(|f| f.kind == Purpose::Prefill) {
                let Declared { name, tokens, context, .. } = function;
                check_shapes(package, &name, tokens, context, inputs)?;
                match context {
                    Some(context) => found.chunks.push(ChunkFunction { name, tokens, context }),
                    None => found.whole.push(FunctionInfo { name, tokens }),
                }
            }
        }
        None => {
            for function in package.program().functions.values() {
                if let Some(tokens) = function_length(function, inputs) {
                    found.whole.push(FunctionInfo { name: function.name.clone(), tokens });
                }
            }
        }
    }
    found.whole.sort_by_key(|f| f.tokens);
    found.chunks.sort_by_key(|f| f.context);
    if found == PrefillFunctions::default() {
        let path = package.path().display();
        return Err(if package.metadata().contains_key(FUNCTIONS_KEY) {
            Error::new(ErrorKind::Package, format!("no function of `{path}` prefills"))
                .hint("a decode package goes to --decode; export one that prefills with --kind prefill")
        } else {
            let name = inputs.tokens.as_deref().unwrap_or_default();
            let message = format!("no function of `{path}` has an input `{name}` of shape (1, length)");
            Error::new(ErrorKind::Package, message)
        });
    }
    if !found.chunks.is_empty() && !package.metadata().contains_key(PAST_KEY) {
        let path = package.path().display();
        let message = format!(
            "`{path}` has functions that take a past, and does not state its layout: the metadata key \
                 `{PAST_KEY}` is missing"
        );
        return Err(Error::new(ErrorKind::Layout, message).field("key", PAST_KEY));
    }
    Ok(found)
}

/// Refuses a function that is not what it is declared to be: another number of tokens, or no tensor of the context.
fn check_shapes(
    package: &Package,
    name: &str,
    tokens: usize,
    context: Option<usize>,
    inputs: &Inputs,
) -> Result<(), Error> {
    let function = package.function(Some(name))?;
    let wrong = |what: String| {
        let message = format!("function `{name}` of `{}` {what}", package.path().display());
        Error::new(ErrorKind::Package, message).field("key", FUNCTIONS_KEY)
    };
    let own = function_length(function, inputs);
    if own != Some(tokens) {
        let own = own.map_or_else(|| "no input of tokens".to_owned(), |own| format!("{own} in the program"));
        return Err(wrong(format!("is declared to take {tokens} tokens, and has {own}")));
    }
    let holds = |rows: usize| function.inputs.iter().any(|&id| shape(function, id).contains(&rows));
    match context {
        Some(context) if !holds(context) => {
            Err(wrong(format!("is declared to take a past of {context} rows, and has no input of as many")))
        }
        _ => Ok(()),
    }
}

fn shape(function: &Function, id: ValueId) -> Vec<usize> {
    match &function.value(id).ty {
        ValueType::Tensor(ty) | ValueType::State(ty) => ty.fixed_shape().unwrap_or_default(),
        _ => Vec::new(),
    }
}

/// S, when the function has tokens of shape (1, S), or hidden states of shape (1, S, hidden).
fn function_length(function: &Function, inputs: &Inputs) -> Option<usize> {
    let of = |name: &Option<String>| {
        let name = name.as_ref()?;
        let id = function.inputs.iter().copied().find(|&id| function.value(id).name == *name)?;
        Some(shape(function, id))
    };
    match (of(&inputs.tokens).as_deref(), of(&inputs.hidden).as_deref()) {
        (Some([1, length]), _) | (None, Some([1, length, _])) => Some(*length),
        _ => None,
    }
}

/// Whether a state of `function` has as many slots as the context that it is declared to have.
pub(crate) fn check_states(package: &Package, declared: &Declared) -> Result<(), Error> {
    let function = package.function(Some(&declared.name))?;
    let context = declared.context.unwrap_or(0);
    if function.states.iter().any(|&id| shape(function, id).contains(&context)) {
        return Ok(());
    }
    let (name, path) = (&declared.name, package.path().display());
    let message = format!(
        "function `{name}` of `{path}` is declared to have a context of {context} rows, and has no state of as many"
    );
    Err(Error::new(ErrorKind::Package, message).field("key", FUNCTIONS_KEY))
}
