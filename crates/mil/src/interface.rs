//! The cache interface of a function: what the package declares, and what names and shapes suggest.
//!
//! A hand-off takes a layout from what is **declared**, by the package or by the caller. What is **discovered**
//! here helps a person to write that declaration; it is a guess, and nothing may copy rows on its word.

use serde::Serialize;

use crate::error::MilError;
use crate::package::Package;
use crate::program::{DataType, Function, TensorType, ValueId};

/// User metadata with the cache layout, as TOML text.
pub const LAYOUT_KEY: &str = "kvbaton.layout";
/// User metadata with the model's facts, as JSON text.
pub const MODEL_KEY: &str = "kvbaton.model";
/// The metadata key under which a package says what its functions are, as a JSON list.
pub const FUNCTIONS_KEY: &str = "kvbaton.functions";
/// The metadata key under which a package declares the layout of the cache so far, where functions take one, as TOML.
pub const PAST_KEY: &str = "kvbaton.past";

/// What is known about where a function takes tokens and leaves keys and values.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CacheInterface {
    /// The function.
    pub function: String,
    /// What the package says, for all its functions.
    pub declared: Declared,
    /// What names and shapes suggest.
    pub discovered: Discovered,
}

/// Texts of the package's user metadata, not parsed here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Declared {
    /// The value of [`LAYOUT_KEY`].
    pub layout: Option<String>,
    /// The value of [`MODEL_KEY`].
    pub model: Option<String>,
}

/// Guesses from names, element types and shapes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Discovered {
    /// Inputs that look like token ids.
    pub tokens: Vec<String>,
    /// Inputs that look like embedded tokens.
    pub embeddings: Vec<String>,
    /// Inputs that look like positions, offsets, lengths or indices of rows.
    pub positions: Vec<String>,
    /// Inputs that look like attention masks.
    pub masks: Vec<String>,
    /// Outputs that look like logits.
    pub logits: Vec<String>,
    /// Inputs, outputs and states that look like key or value caches.
    pub caches: Vec<CacheArray>,
    /// Rows that the caches seem to hold.
    pub capacity: Option<CapacityGuess>,
}

/// An array that looks like a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheArray {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub port: Port,
    /// What it seems to hold.
    pub part: Part,
    /// Element type.
    pub dtype: DataType,
    /// Shape, outermost dimension first; `null` is unknown until the program runs.
    pub shape: Vec<Option<usize>>,
    /// The last number in the name, often the layer.
    pub number: Option<usize>,
    /// The value cache that goes with this key cache, and the other way round.
    pub pair: Option<String>,
    /// Why it looks like a cache.
    pub because: &'static str,
}

/// Where an array enters or leaves a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Port {
    /// An input.
    Input,
    /// An output.
    Output,
    /// A state.
    State,
}

/// What a cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// Keys.
    Key,
    /// Values.
    Value,
    /// Keys and values in one array.
    KeyValue,
    /// A recurrent or convolution state: no rows of tokens.
    Recurrent,
    /// The name does not say.
    Unknown,
}

/// A guess at the rows of the caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CapacityGuess {
    /// Rows.
    pub rows: usize,
    /// The dimension of the caches that counts them.
    pub dimension: usize,
    /// Why.
    pub because: &'static str,
}

impl Package {
    /// The cache interface of the function `function`.
    ///
    /// # Errors
    ///
    /// When there is no such function.
    pub fn cache_interface(&self, function: &str) -> Result<CacheInterface, MilError> {
        let function = self.function(Some(function))?;
        Ok(CacheInterface {
            function: function.name.clone(),
            declared: Declared {
                layout: self.metadata().get(LAYOUT_KEY).cloned(),
                model: self.metadata().get(MODEL_KEY).cloned(),
            },
            discovered: discover(function),
        })
    }
}

fn discover(function: &Function) -> Discovered {
    let mut found = Discovered::default();
    let mut shapes = Shapes::default();
    for &id in &function.inputs {
        let (name, Some(ty)) = (&function.value(id).name, function.tensor(id)) else { continue };
        match input_role(name, ty) {
            Role::Mask => {
                shapes.mask_widths.extend(last_dim(ty));
                found.masks.push(name.clone());
            }
            Role::Tokens => {
                shapes.token_counts.extend(last_dim(ty));
                found.tokens.push(name.clone());
            }
            Role::Embeddings => found.embeddings.push(name.clone()),
            Role::Positions => found.positions.push(name.clone()),
            Role::Other => found.caches.extend(cache(function, id, Port::Input)),
        }
    }
    found.caches.extend(function.states.iter().filter_map(|&id| cache(function, id, Port::State)));
    for &id in &function.block.outputs {
        let name = &function.value(id).name;
        if words(name).iter().any(|word| word == "logits") {
            found.logits.push(name.clone());
        } else {
            found.caches.extend(cache(function, id, Port::Output));
        }
    }
    pair(&mut found.caches);
    // An array nobody named is a cache only in company.
    found
        .caches
        .retain(|array| array.part != Part::Unknown || array.port == Port::State || array.pair.is_some());
    found.capacity = capacity(&found.caches, &shapes);
    found
}

enum Role {
    Tokens,
    Embeddings,
    Positions,
    Mask,
    Other,
}

fn input_role(name: &str, ty: &TensorType) -> Role {
    let words = words(name);
    let has = |candidates: &[&str]| words.iter().any(|word| candidates.contains(&word.as_str()));
    let integer = matches!(ty.dtype, DataType::Int32 | DataType::Int16 | DataType::UInt16);
    if has(&["mask", "masks"]) {
        Role::Mask
    } else if integer && has(&["position", "positions", "pos", "offset", "start", "index", "length", "len"]) {
        Role::Positions
    } else if integer && (has(&["token", "tokens", "ids", "id"]) || ty.shape.len() == 2) {
        Role::Tokens
    } else if integer {
        Role::Positions
    } else if is_float(ty) && has(&["embeds", "embeddings", "embedding", "hidden"]) {
        Role::Embeddings
    } else {
        Role::Other
    }
}

/// `id` as a cache, if its type and name allow it.
fn cache(function: &Function, id: ValueId, port: Port) -> Option<CacheArray> {
    let ty = function.tensor(id)?;
    if !is_float(ty) || ty.shape.len() < 3 {
        return None;
    }
    let name = &function.value(id).name;
    let part = part(name);
    let because = match (part, port) {
        (Part::Unknown, Port::State) => "a state of rank 3 or more",
        (Part::Unknown, _) => "one of two arrays of the same type",
        (Part::Recurrent, _) => "the name speaks of a recurrent state",
        _ => "the name speaks of keys, values or a cache",
    };
    let shape = ty.shape.iter().map(|dim| dim.fixed()).collect();
    let number = words(name).iter().rev().find_map(|word| word.parse().ok());
    Some(CacheArray { name: name.clone(), port, part, dtype: ty.dtype, shape, number, pair: None, because })
}

fn part(name: &str) -> Part {
    let words = words(name);
    let has = |candidates: &[&str]| words.iter().any(|word| candidates.contains(&word.as_str()));
    if has(&["conv", "rec", "recurrent", "ssm"]) {
        return Part::Recurrent;
    }
    // `past_key_values_3_key` is a key: only a word outside the phrase decides.
    let phrase = |i: usize| {
        (is_key(&words[i]) && words.get(i + 1).is_some_and(|next| is_value(next)))
            || (is_value(&words[i]) && i > 0 && is_key(&words[i - 1]))
    };
    let decisive = (0..words.len()).rev().find(|&i| (is_key(&words[i]) || is_value(&words[i])) && !phrase(i));
    match decisive {
        Some(i) if is_key(&words[i]) => Part::Key,
        Some(_) => Part::Value,
        None if (0..words.len()).any(phrase) || has(&["kv", "cache", "caches", "past", "present"]) => {
            Part::KeyValue
        }
        None => Part::Unknown,
    }
}

fn is_key(word: &str) -> bool {
    matches!(word, "k" | "key" | "keys")
}

fn is_value(word: &str) -> bool {
    matches!(word, "v" | "value" | "values")
}

/// Gives each key cache the value cache of the same name otherwise, and arrays without a part the only other
/// array of their type.
fn pair(caches: &mut [CacheArray]) {
    let stem = |array: &CacheArray| -> Vec<String> {
        let neutral = |word: String| if is_key(&word) || is_value(&word) { "?".to_owned() } else { word };
        words(&array.name).into_iter().map(neutral).collect()
    };
    let partners: Vec<Option<String>> = caches
        .iter()
        .map(|array| {
            let wanted = match array.part {
                Part::Key => Part::Value,
                Part::Value => Part::Key,
                Part::Unknown => Part::Unknown,
                Part::KeyValue | Part::Recurrent => return None,
            };
            let mut others = caches.iter().filter(|other| {
                other.name != array.name
                    && (other.part, other.port, other.dtype) == (wanted, array.port, array.dtype)
                    && match array.part {
                        Part::Unknown => other.shape == array.shape && array.shape.len() >= 4,
                        _ => stem(other) == stem(array),
                    }
            });
            others.next().filter(|_| others.next().is_none()).map(|other| other.name.clone())
        })
        .collect();
    for (array, partner) in caches.iter_mut().zip(partners) {
        array.pair = partner;
    }
}

#[derive(Default)]
struct Shapes {
    mask_widths: Vec<usize>,
    token_counts: Vec<usize>,
}

/// Rows of the caches: a dimension they share with a mask or with the tokens, else the last but one.
fn capacity(caches: &[CacheArray], shapes: &Shapes) -> Option<CapacityGuess> {
    let cache = caches.iter().find(|array| array.part != Part::Recurrent && array.shape.len() >= 3)?;
    // Rows are the last dimension but one in most layouts, the last where channels come first.
    let rank = cache.shape.len();
    let order = [rank - 2, rank - 1].into_iter().chain((1..rank - 2).rev());
    let axis_of =
        |sizes: &[usize]| sizes.iter().find_map(|&n| order.clone().find(|&i| cache.shape[i] == Some(n)));
    let guess = |dimension: usize, because| {
        cache.shape[dimension].map(|rows| CapacityGuess { rows, dimension, because })
    };
    if let Some(dimension) = axis_of(&shapes.mask_widths) {
        guess(dimension, "as long as a mask's rows")
    } else if let Some(dimension) = axis_of(&shapes.token_counts) {
        guess(dimension, "as many as there are tokens")
    } else {
        guess(rank - 2, "the last dimension but one")
    }
}

fn is_float(ty: &TensorType) -> bool {
    matches!(ty.dtype, DataType::Float16 | DataType::Float32)
}

fn last_dim(ty: &TensorType) -> Option<usize> {
    ty.shape.last().and_then(|dim| dim.fixed())
}

/// The words of a name in lower case: split at punctuation, between letters and digits, and at `camelCase`.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut last: Option<char> = None;
    for c in name.chars() {
        if c.is_alphanumeric() {
            let starts = match last {
                Some(l) if l.is_alphanumeric() => {
                    l.is_numeric() != c.is_numeric() || (l.is_lowercase() && c.is_uppercase())
                }
                _ => true,
            };
            if starts {
                words.push(String::new());
            }
            if let Some(word) = words.last_mut() {
                word.extend(c.to_lowercase());
            }
        }
        last = Some(c);
    }
    words
}

#[cfg(test)]
mod tests;
