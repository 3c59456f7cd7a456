//! Prompts longer than any function takes at once: chunks, each of which is given the cache so far.
//!
//! The cache is one set of buffers that holds the whole context, laid out as the chunk functions take it. A chunk
//! reads them where they are and leaves its own rows as outputs; those are copied to their place, and told of,
//! before the next chunk runs. What a sink is shown are the outputs, so it may keep them while later chunks run.

use std::time::Instant;

use kvbaton_exec::Array;
use kvbaton_layout::{CacheSpec, Layout, LiveRows, ModelSpec, TensorInfo};
use kvbaton_memory::{Buffer, Bytes, Leased};
use serde::{Deserialize, Serialize};

use crate::functions::PrefillFunctions;
use crate::prefill::{ChunkSink, too_long};
use crate::tensors::{data_type, tensor};
use crate::{
    CacheView, Error, ErrorKind, HandoffOptions, Logits, Target, Tensor, Threads, Wanted, hand_off_to,
};

/// One run of one function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) function: String,
    /// Tokens the function takes at once; the last chunk may have fewer.
    pub(crate) length: usize,
    /// Rows of the past that it takes, if it takes one.
    pub(crate) context: Option<usize>,
    /// The position of its first token.
    pub(crate) first: usize,
    /// Its tokens.
    pub(crate) tokens: usize,
}

/// What one chunk cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChunkTime {
    /// The function.
    pub function: String,
    /// Tokens before it.
    pub position: usize,
    /// Its own tokens.
    pub tokens: usize,
    /// Seconds of the program.
    pub seconds: f64,
    /// Seconds of copying its rows to their place.
    pub copy_seconds: f64,
}

/// The runs that a prompt of `tokens` tokens takes: one of the shortest function that takes all of it, or a chain.
///
/// A chain begins with the longest function that needs no past, where one is at least as long as a chunk, and goes
/// on with the functions of the smallest contexts that hold what has been seen.
pub(crate) fn steps(functions: &PrefillFunctions, tokens: usize) -> Result<Vec<Step>, Error> {
    if tokens == 0 {
        return Err(Error::new(ErrorKind::EmptyPrompt, "the prompt has no tokens"));
    }
    let whole = |f: &crate::FunctionInfo, tokens: usize| Step {
        function: f.name.clone(),
        length: f.tokens,
        context: None,
        first: 0,
        tokens,
    };
    if let Some(function) = functions.whole.iter().find(|f| f.tokens >= tokens) {
        return Ok(vec![whole(function, tokens)]);
    }
    let Some(largest) = functions.chunks.last().filter(|f| f.context >= tokens) else {
        let context = functions.chunks.last().map(|f| f.context);
        let longest = functions.whole.last().map_or(0, |f| f.tokens);
        return Err(too_long(tokens, longest, context));
    };
    let mut steps = Vec::new();
    let mut seen = 0;
    if let Some(first) = functions.whole.last().filter(|f| f.tokens >= largest.tokens) {
        steps.push(whole(first, first.tokens.min(tokens)));
        seen = first.tokens;
    }
    while seen < tokens {
        let fits = |f: &&crate::functions::ChunkFunction| f.context >= (seen + f.tokens).min(tokens);
        let function = functions.chunks.iter().find(fits).unwrap_or(largest);
        let count = function.tokens.min(tokens - seen);
        steps.push(Step {
            function: function.name.clone(),
            length: function.tokens,
            context: Some(function.context),
            first: seen,
            tokens: count,
        });
        seen += count;
    }
    Ok(steps)
}

/// What runs the steps: one package, or a chain of them.
pub(crate) trait RunStep {
    /// The inputs of `function` that hold the cache so far.
    fn past_inputs(&mut self, function: &str, names: &[String]) -> Result<Vec<TensorInfo>, Error>;

    /// Runs one step over its tokens and returns the named outputs.
    fn run_step(
        &mut self,
        step: &Step,
        tokens: &[u32],
        past: &[(String, Array)],
    ) -> Result<Vec<(String, Array)>, Error>;
}

/// What a chain of chunks is about.
pub(crate) struct Chain<'a> {
    /// The layout of a function's outputs.
    pub(crate) rows: &'a Layout,
    /// The layout of the cache so far.
    pub(crate) past: &'a Layout,
    pub(crate) model: &'a ModelSpec,
    pub(crate) threads: usize,
}

/// What a chain left.
pub(crate) struct Chained {
    pub(crate) cache: CacheView,
    pub(crate) logits: Option<Logits>,
    pub(crate) seconds: f64,
    pub(crate) times: Vec<ChunkTime>,
}

impl Chain<'_> {
    /// Runs `steps` over `tokens` and tells `sink` of each step's rows.
    pub(crate) fn run(
        &self,
        engine: &mut dyn RunStep,
        steps: &[Step],
        tokens: &[u32],
        sink: &mut ChunkSink<'_>,
    ) -> Result<Chained, Error> {
        let cache = &self.model.cache;
        let names = self.past.tensor_names(cache)?;
        let threads = Threads::new(self.threads);
        let start = Instant::now();
        let mut held: Option<Held> = None;
        let (mut logits, mut times) = (None, Vec::new());
        for (i, step) in steps.iter().enumerate() {
            let end = step.first + step.tokens;
            // The buffers of the context that this step, or the first one after it that has a past, reads.
            let next = steps[i..].iter().find(|s| s.context.is_some());
            if let Some(next) = next.filter(|s| held.as_ref().is_none_or(|h| Some(h.context) != s.context)) {
                let infos = engine.past_inputs(&next.function, &names)?;
                let larger = Held::new(next.context.unwrap_or(0), infos);
                if let Some(old) = held.take() {
                    let view = old.view(self.past, cache, step.first)?;
                    larger.copy(self.past, &view, cache, 0..step.first, step.first, &threads)?;
                }
                held = Some(larger);
            }
            let past = match (&held, step.context) {
                (Some(held), Some(_)) => held.arrays()?,
                _ => Vec::new(),
            };
            let run = Instant::now();
            let outputs = engine.run_step(step, &tokens[step.first..end], &past)?;
            drop(past);
            let seconds = run.elapsed().as_secs_f64();
            let mut tensors = Vec::new();
            for (name, array) in outputs {
                if Some(&name) == self.rows.outputs.logits.as_ref() {
                    logits = array.to_f32().map(|values| Logits { values });
                } else {
                    tensors.extend(tensor(name, &array));
                }
            }
            let live = LiveRows { live: Some(step.tokens), ..LiveRows::seen(end) };
            let view = CacheView::new(self.rows.clone(), cache.clone(), tensors, live)?
                .with_model(Some(self.model.clone()))
                .with_tokens(tokens[..end].to_vec());
            let copy = Instant::now();
            if let Some(held) = &held {
                held.copy(self.past, &view, cache, step.first..end, end, &threads)?;
            }
            times.push(ChunkTime {
                function: step.function.clone(),
                position: step.first,
                tokens: step.tokens,
                seconds,
                copy_seconds: copy.elapsed().as_secs_f64(),
            });
            sink(&view, signed(step.first)..signed(end))?;
        }
        let held = held.expect("a chain has a step with a past");
        let cache = held
            .view(self.past, cache, tokens.len())?
            .with_model(Some(self.model.clone()))
            .with_tokens(tokens.to_vec());
        Ok(Chained { cache, logits, seconds: start.elapsed().as_secs_f64(), times })
    }
}

/// The cache so far: a buffer for each input that takes it.
struct Held {
    context: usize,
    tensors: Vec<(TensorInfo, Leased)>,
}

impl Held {
    fn new(context: usize, infos: Vec<TensorInfo>) -> Held {
        let tensors = infos.into_iter().map(|info| {
            // Zeros that nobody has written take no memory yet.
            let buffer = Leased::new(Box::new(Buffer::zeroed(info.len_bytes)));
            (info, buffer)
        });
        Held { context, tensors: tensors.collect() }
    }

    /// The buffers as a program's inputs; while these live, nobody writes.
    fn arrays(&self) -> Result<Vec<(String, Array)>, Error> {
        let mut arrays = Vec::new();
        for (info, buffer) in &self.tensors {
            let dtype = data_type(info.dtype).ok_or_else(|| {
                let message = format!("a program's input cannot have elements of type {}", info.dtype);
                Error::new(ErrorKind::Layout, message)
            })?;
            let array = Array::new(dtype, info.shape.clone(), Bytes::new(buffer.read()?))?;
            arrays.push((info.name.clone(), array));
        }
        Ok(arrays)
    }

    /// The buffers as a cache that has seen so many tokens.
    fn view(&self, layout: &Layout, cache: &CacheSpec, seen: usize) -> Result<CacheView, Error> {
        let mut tensors = Vec::new();
        for (info, buffer) in &self.tensors {
            tensors.push(Tensor { info: info.clone(), bytes: Bytes::new(buffer.read()?) });
        }
        CacheView::new(layout.clone(), cache.clone(), tensors, LiveRows::seen(seen))
    }

    /// Copies rows of a view to their place.
    fn copy(
        &self,
        layout: &Layout,
        view: &CacheView,
        cache: &CacheSpec,
        rows: std::ops::Range<usize>,
        seen: usize,
        threads: &Threads,
    ) -> Result<(), Error> {
        let mut leases = Vec::new();
        for (_, buffer) in &self.tensors {
            leases.push(buffer.write()?);
        }
        let mut targets: Vec<Target<'_>> = self
            .tensors
            .iter()
            .zip(&mut leases)
            .map(|((info, _), bytes)| Target { info: info.clone(), bytes })
            .collect();
        let live = LiveRows::seen(seen);
        let rows = Some(signed(rows.start)..signed(rows.end));
        let wanted = Wanted { layout, cache, live: &live, rows, whole: &[] };
        hand_off_to(view, &wanted, &mut targets, threads, HandoffOptions::default()).map(|_| ())
    }
}

fn signed(position: usize) -> i64 {
    i64::try_from(position).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FunctionInfo;
    use crate::functions::ChunkFunction;

    fn functions(whole: &[usize], chunks: &[(usize, usize)]) -> PrefillFunctions {
        let whole = whole.iter().map(|&tokens| FunctionInfo { name: format!("w{tokens}"), tokens });
        let chunk = |&(tokens, context)| ChunkFunction { name: format!("c{context}"), tokens, context };
        PrefillFunctions { whole: whole.collect(), chunks: chunks.iter().map(chunk).collect() }
    }

    /// `function first+tokens` of every step.
    fn plan(functions: &PrefillFunctions, tokens: usize) -> String {
        let steps = steps(functions, tokens).unwrap();
        let text: Vec<String> =
            steps.iter().map(|s| format!("{} {}+{}", s.function, s.first, s.tokens)).collect();
        text.join(", ")
    }

    #[test]
    fn a_prompt_that_one_function_takes_is_one_step() {
        let f = functions(&[8, 16], &[(16, 64)]);
        assert_eq!(plan(&f, 1), "w8 0+1");
        assert_eq!(plan(&f, 9), "w16 0+9");
        assert_eq!(plan(&f, 16), "w16 0+16");
    }

    #[test]
    fn longer_prompts_go_on_in_the_smallest_context_that_holds_them() {
        let f = functions(&[8, 16], &[(16, 32), (16, 64)]);
        assert_eq!(plan(&f, 17), "w16 0+16, c32 16+1");
        assert_eq!(plan(&f, 32), "w16 0+16, c32 16+16");
        assert_eq!(plan(&f, 33), "w16 0+16, c32 16+16, c64 32+1");
        assert_eq!(plan(&f, 64), "w16 0+16, c32 16+16, c64 32+16, c64 48+16");
    }

    #[test]
    fn whole_functions_shorter_than_a_chunk_are_not_worth_a_step() {
        assert_eq!(plan(&functions(&[8], &[(16, 64)]), 20), "c64 0+16, c64 16+4");
        assert_eq!(plan(&functions(&[], &[(16, 64)]), 3), "c64 0+3");
    }

    #[test]
    fn a_first_function_longer_than_a_chunk_may_leave_an_odd_place() {
        let f = functions(&[24], &[(16, 30), (16, 64)]);
        // 24 + 16 rows are more than 30, the six that are left are not.
        assert_eq!(plan(&f, 30), "w24 0+24, c30 24+6");
        assert_eq!(plan(&f, 45), "w24 0+24, c64 24+16, c64 40+5");
    }

    #[test]
    fn too_many_tokens_and_none_are_refused_with_both_numbers() {
        let f = functions(&[16], &[(16, 64)]);
        assert_eq!(steps(&f, 0).unwrap_err().kind(), ErrorKind::EmptyPrompt);
        let error = steps(&f, 65).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PromptTooLong);
        assert!(error.to_string().contains("65 tokens") && error.to_string().contains("64"), "{error}");
        let error = steps(&functions(&[16], &[]), 17).unwrap_err();
        assert!(error.to_string().contains("longest function takes 16"), "{error}");
    }
}
