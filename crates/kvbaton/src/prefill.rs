//! Engines that run a package over a prompt.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use kvbaton_layout::{CacheSpec, Layout, ModelSpec};

use crate::{Activations, CacheView, ChunkTime, Error, ErrorKind, PrefillReport};

/// A function of a package that prefills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Its name.
    pub name: String,
    /// Tokens it takes at once; shorter prompts are padded.
    pub tokens: usize,
}

/// Logits of the last token.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// One a token of the vocabulary.
    pub values: Vec<f32>,
}

/// What a prefill leaves behind.
#[derive(Debug)]
pub struct Prefilled {
    /// The cache, one row a token.
    pub cache: CacheView,
    /// Logits after the last token, where the program computes them.
    pub logits: Option<Logits>,
    /// What it cost.
    pub report: PrefillReport,
}

/// Told of rows that are final, while a prefill runs: a view that holds them, and their positions.
///
/// Every row of every layer is told of once, each layer's in order. The view may hold more rows than those; where it
/// holds only some layers, its cache spec says that the others keep nothing ([`CacheSpec::only`]). It may be cloned
/// and kept beyond the call: an engine that reuses its buffers leaves those alone that a view still holds. An error
/// ends the prefill, and is what it returns.
pub type ChunkSink<'a> = dyn FnMut(&CacheView, Range<i64>) -> Result<(), Error> + 'a;

/// An engine that runs one package.
///
/// Outputs may be leased: while a [`CacheView`] of an earlier prefill lives, an engine that reuses its buffers
/// refuses the next one.
pub trait Prefill: Send {
    /// `cpu`, `coreml` or `fake`.
    fn engine(&self) -> &'static str;

    /// The functions that prefill, shortest first.
    fn functions(&self) -> &[FunctionInfo];

    /// What the package says of its model.
    fn model(&self) -> Option<&ModelSpec>;

    /// What each layer of the cache keeps, where that is known before a prefill.
    fn cache(&self) -> Option<&CacheSpec> {
        self.model().map(|model| &model.cache)
    }

    /// The layout of the cache it leaves.
    fn layout(&self) -> &Layout;

    /// Loads what a prompt of `tokens` tokens needs, so that the prefill itself is only the prefill.
    ///
    /// # Errors
    ///
    /// When no function takes so many tokens, or its program cannot be run.
    fn prepare(&mut self, tokens: usize) -> Result<(), Error>;

    /// All work on GPUs that reads or writes earlier caches' memory is done: what its consumers gave back may be
    /// written again.
    fn settle(&mut self) {}

    /// Runs the prompt and leaves its cache.
    ///
    /// # Errors
    ///
    /// When the prompt is empty or too long, a token is not in the vocabulary, the program fails, or an earlier
    /// cache still holds the buffers.
    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error>;

    /// Bytes that the functions that ran take, computed when they were loaded; `None` for engines that do not
    /// compute it.
    fn computed_bytes(&self) -> Option<u64> {
        None
    }

    /// What each chunk of the last prefill cost; nothing if it took one function.
    fn chunk_times(&self) -> &[ChunkTime] {
        &[]
    }

    /// Runs the prompt and tells `sink` of rows as soon as they are final: of all rows at once at the end, unless the
    /// engine works in chunks.
    ///
    /// The cache that is returned holds all rows where the engine keeps them, and otherwise those of its last chunk:
    /// its live rows say which.
    ///
    /// # Errors
    ///
    /// As [`Prefill::prefill`], and whatever `sink` returns.
    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        let done = self.prefill(tokens)?;
        sink(&done.cache, 0..i64::try_from(done.cache.tokens_seen()).unwrap_or(i64::MAX))?;
        Ok(done)
    }

    /// Runs the prompt one operation at a time and reports the largest activation that it reaches, and every value
    /// that is infinite, no number, or beyond fp16.
    ///
    /// # Errors
    ///
    /// As [`Prefill::prefill`], and on engines that do not show what happens inside.
    fn activations(&mut self, _tokens: &[u32]) -> Result<Activations, Error> {
        let message = format!("the engine `{}` does not show activations", self.engine());
        Err(Error::new(ErrorKind::Unavailable, message).hint("the CPU executor does"))
    }
}

/// An engine that several owners use in turn.
pub type SharedPrefill = Arc<Mutex<Box<dyn Prefill>>>;

/// The shortest function that takes `tokens` tokens.
///
/// # Errors
///
/// When there are no tokens, or more than the longest function takes; the message names both lengths.
pub fn choose_function(functions: &[FunctionInfo], tokens: usize) -> Result<&FunctionInfo, Error> {
    if tokens == 0 {
        return Err(Error::new(ErrorKind::EmptyPrompt, "the prompt has no tokens"));
    }
    functions
        .iter()
        .find(|f| f.tokens >= tokens)
        .ok_or_else(|| too_long(tokens, functions.last().map_or(0, |f| f.tokens), None))
}

/// What to do about so many tokens.
fn shorter(tokens: usize) -> String {
    let longer = tokens.checked_next_power_of_two();
    let export = longer.map_or_else(String::new, |n| format!(", or export with --context {n}"));
    format!("shorten the prompt{export}")
}

/// More tokens than the longest function takes, and than the largest context holds.
pub(crate) fn too_long(tokens: usize, longest: usize, context: Option<usize>) -> Error {
    let error = |limit: String| {
        Error::new(
            ErrorKind::PromptTooLong,
            format!("{tokens} tokens are to be prefilled, the package's {limit}"),
        )
        .field("tokens", tokens)
    };
    match context {
        None => error(format!("longest function takes {longest}"))
            .hint(shorter(tokens))
            .field("longest_function", longest),
        Some(context) => {
            error(format!("largest context holds {context}")).hint(shorter(tokens)).field("context", context)
        }
    }
}
