//! Engines that run a package over a prompt.

use kvbaton_layout::{Layout, ModelSpec};

use crate::{Activations, CacheView, Error, ErrorKind, PrefillReport};

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

    /// The layout of the cache it leaves.
    fn layout(&self) -> &Layout;

    /// Loads what a prompt of `tokens` tokens needs, so that the prefill itself is only the prefill.
    ///
    /// # Errors
    ///
    /// When no function takes so many tokens, or its program cannot be run.
    fn prepare(&mut self, tokens: usize) -> Result<(), Error>;

    /// Runs the prompt and leaves its cache.
    ///
    /// # Errors
    ///
    /// When the prompt is empty or too long, a token is not in the vocabulary, the program fails, or an earlier
    /// cache still holds the buffers.
    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error>;

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

/// The shortest function that takes `tokens` tokens.
///
/// # Errors
///
/// When there are no tokens, or more than the longest function takes; the message names both lengths.
pub fn choose_function(functions: &[FunctionInfo], tokens: usize) -> Result<&FunctionInfo, Error> {
    if tokens == 0 {
        return Err(Error::new(ErrorKind::EmptyPrompt, "the prompt has no tokens"));
    }
    functions.iter().find(|f| f.tokens >= tokens).ok_or_else(|| {
        let longest = functions.last().map_or(0, |f| f.tokens);
        Error::new(
            ErrorKind::PromptTooLong,
            format!("{tokens} tokens are to be prefilled, the package's longest function takes {longest}"),
        )
        .hint(format!("shorten the prompt, or export with --buckets {}", tokens.next_power_of_two()))
        .field("tokens", tokens)
        .field("longest_function", longest)
    })
}
