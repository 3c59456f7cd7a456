//! An engine for tests that behaves as Core ML is known to.
//!
//! It is the fake runtime behind its session, without a package: every element says where it is, so a hand-off that mixes
//! up heads, rows or lanes is caught by its values, and the habits that break callers are the runtime's. What is its own
//! is how it streams: in chunks, each in buffers that nobody reads any more, layer by layer, and at a pace.

mod executed;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbaton_layout::{CacheSpec, Layout, LiveRows, ModelSpec, TensorInfo, presets};
use kvbaton_runtime::fake::{self, FakeRuntime, Tally};
use kvbaton_runtime::{ArrayInfo, CompiledFeature, Element, Output, RuntimeError, Session, SurfaceLimits};

use crate::prefill::{ChunkSink, choose_function};
use crate::{
    Bytes, CacheView, Error, ErrorKind, FunctionInfo, Logits, Prefill, PrefillReport, Prefilled, Tensor,
};

pub use executed::{executed, open_on_runtime};
pub use kvbaton_runtime::fake::element;

/// How the engine misbehaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Habits {
    /// The runtime's: every row starts on a multiple of so many bytes; 0 packs them.
    pub row_align_bytes: usize,
    /// The runtime's: fresh buffers at every prediction, whatever was proposed.
    pub ignores_backings: bool,
    /// The runtime's: fails at these predictions, counted from 0. A chunk is a prediction.
    pub fails_at: Vec<usize>,
    /// Tokens of a chunk when rows are streamed; 0 streams nothing before the end.
    pub chunk_tokens: usize,
    /// Shows layers one by one: its cache has a pair of tensors a layer.
    pub by_layer: bool,
    /// Fails once it has shown so many pieces of one prefill: chunks, or layers of chunks.
    pub fails_after_pieces: Option<usize>,
    /// Fails by a panic, as a bug in an engine does.
    pub panics: bool,
    /// Seconds that a token takes at least; 0 leaves no wait.
    pub token_seconds: f64,
}

impl Habits {
    fn of_runtime(&self) -> fake::Habits {
        fake::Habits {
            row_align_bytes: self.row_align_bytes,
            ignores_backings: self.ignores_backings,
            fails_at: self.fails_at.clone(),
            // Rows are padded as asked for, however many there are.
            limits: SurfaceLimits { width: usize::MAX, height: usize::MAX },
            ..fake::Habits::default()
        }
    }
}

/// The engine.
pub struct FakePrefill {
    cache: CacheSpec,
    layout: Layout,
    functions: Vec<FunctionInfo>,
    habits: Habits,
    session: Session<FakeRuntime>,
    /// How many sets of buffers predictions of so many rows have needed at once.
    sets: BTreeMap<usize, usize>,
}

impl FakePrefill {
    /// An engine whose cache is stacked as `kvbaton export` stacks it (or a pair of tensors a layer, where the habits
    /// say so), with one function a length.
    ///
    /// # Errors
    ///
    /// When the layers are not all of one shape.
    pub fn new(cache: CacheSpec, lengths: &[usize], habits: Habits) -> Result<FakePrefill, Error> {
        let uniform = cache.layers.iter().all(|l| l.attention().is_some() && *l == cache.layers[0]);
        if !uniform || cache.layers.is_empty() {
            return Err(Error::new(ErrorKind::Usage, "the fake engine stacks layers of one shape"));
        }
        if !(habits.token_seconds >= 0.0 && habits.token_seconds.is_finite()) {
            let message = format!("a token cannot take {} seconds", habits.token_seconds);
            return Err(Error::new(ErrorKind::Usage, message));
        }
        let layout = presets::get(if habits.by_layer { "kvbaton-per-layer" } else { "kvbaton-stacked" })?;
        let mut functions: Vec<FunctionInfo> = lengths
            .iter()
            .map(|&tokens| FunctionInfo { name: format!("prefill_{tokens}"), tokens })
            .collect();
        functions.sort_by_key(|f| f.tokens);
        let (runtime, tally) = (habits.of_runtime(), Arc::new(Tally::default()));
        let session = Session::new(move || FakeRuntime::new(runtime.clone(), tally.clone()));
        Ok(FakePrefill { cache, layout, functions, habits, session, sets: BTreeMap::new() })
    }

    /// Whether no view holds a buffer.
    pub fn is_idle(&self) -> bool {
        let counts = self.session.counts();
        counts.lent == 0 && counts.unsettled == 0
    }

    /// Sets of buffers that predictions have needed at once.
    pub fn buffer_sets(&self) -> usize {
        self.sets.values().sum()
    }

    /// The outputs of a prediction that holds `rows` rows: keys, then values, of each of its groups of layers.
    fn outputs(&self, rows: usize) -> Vec<CompiledFeature> {
        let (heads, key_dim, value_dim) =
            self.cache.layers[0].attention().expect("attention layers, checked in `new`");
        let pair = |suffix: &str, count: usize| {
            [("key", key_dim), ("value", value_dim)].map(|(part, dim)| CompiledFeature {
                name: format!("{part}_cache{suffix}"),
                element: Element::Float16,
                shape: vec![count, heads, rows, dim],
            })
        };
        let count = self.cache.layers.len();
        if self.habits.by_layer {
            (0..count).flat_map(|layer| pair(&format!("_{layer}"), 1)).collect()
        } else {
            pair("", count).into()
        }
    }

    /// Predicts the rows of `tokens`, of which the first is at position `first`, into `slots` slots: into the first set of
    /// buffers that nobody reads. Where all are read, that is refused, or a further set is made if there may be `more`.
    fn predict(
        &mut self,
        tokens: &[u32],
        first: usize,
        slots: usize,
        more: bool,
    ) -> Result<Vec<Tensor>, Error> {
        let outputs = self.outputs(slots);
        let mut set = 0;
        loop {
            // Buffers belong to a function: a further set is that of a further function.
            let function = format!("{slots} rows, set {set}");
            if set == self.sets.get(&slots).copied().unwrap_or(0) {
                self.session.load(Path::new("fake.mlmodelc"), Some(&function), None)?;
                self.sets.insert(slots, set + 1);
            }
            match self.session.predict(Some(&function), inputs(tokens, first, slots), &outputs) {
                Ok(done) => return Ok(done.into_iter().map(tensor).collect()),
                Err(RuntimeError::Custody(_)) if more => set += 1,
                Err(error) => {
                    assert!(!self.habits.panics, "{error}");
                    return Err(error.into());
                }
            }
        }
    }

    fn fail(&self, message: &str) -> Result<(), Error> {
        assert!(!self.habits.panics, "{message}");
        Err(Error::new(ErrorKind::Program, message))
    }

    /// One chunk of a streamed prefill: predicts rows `rows` of all layers and shows them.
    fn chunk(
        &mut self,
        tokens: &[u32],
        rows: Range<usize>,
        pieces: &mut usize,
        sink: &mut ChunkSink<'_>,
    ) -> Result<CacheView, Error> {
        let start = Instant::now();
        let tensors = self.predict(&tokens[rows.clone()], rows.start, self.habits.chunk_tokens, true)?;
        // The rows are all there by now: what is left of the chunk's time is shared by the groups that are shown.
        let computed = start.elapsed().as_secs_f64();
        let left = (self.habits.token_seconds * rows.len() as f64 - computed).max(0.0);
        let groups = tensors.len() / 2;
        let layers = self.cache.layers.len() / groups;
        for (group, pair) in tensors.chunks(2).enumerate() {
            wait_until(start, computed + left * (group + 1) as f64 / groups as f64);
            if self.habits.fails_after_pieces == Some(*pieces) {
                self.fail(&format!("failed after {pieces} pieces, as it was told to"))?;
            }
            let shown = self.cache.only(&(group * layers..(group + 1) * layers));
            let view = self.view(&shown, pair.to_vec(), &rows, tokens)?;
            sink(&view, signed(rows.start)..signed(rows.end))?;
            *pieces += 1;
        }
        self.view(&self.cache, tensors, &rows, tokens)
    }

    /// A view of the newest rows of the first `rows.end` tokens.
    fn view(
        &self,
        cache: &CacheSpec,
        tensors: Vec<Tensor>,
        rows: &Range<usize>,
        tokens: &[u32],
    ) -> Result<CacheView, Error> {
        let live = LiveRows { live: Some(rows.len()), ..LiveRows::seen(rows.end) };
        let view = CacheView::new(self.layout.clone(), cache.clone(), tensors, live)?;
        Ok(view.with_tokens(tokens[..rows.end].to_vec()))
    }

    fn done(&self, function: String, tokens: usize, start: Instant, cache: CacheView) -> Prefilled {
        let seconds = start.elapsed().as_secs_f64();
        let report = PrefillReport::new(self.engine(), function, tokens, seconds);
        Prefilled { cache, logits: Some(Logits { values: vec![0.0] }), report }
    }
}

impl Prefill for FakePrefill {
    fn engine(&self) -> &'static str {
        "fake"
    }

    fn functions(&self) -> &[FunctionInfo] {
        &self.functions
    }

    fn model(&self) -> Option<&ModelSpec> {
        None
    }

    fn cache(&self) -> Option<&CacheSpec> {
        Some(&self.cache)
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn prepare(&mut self, tokens: usize) -> Result<(), Error> {
        choose_function(&self.functions, tokens).map(|_| ())
    }

    fn settle(&mut self) {
        self.session.settle();
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        let start = Instant::now();
        let function = choose_function(&self.functions, tokens.len())?.clone();
        let tensors = self.predict(tokens, 0, function.tokens, false)?;
        let cache = self.view(&self.cache, tensors, &(0..tokens.len()), tokens)?;
        wait_until(start, self.habits.token_seconds * tokens.len() as f64);
        Ok(self.done(function.name, tokens.len(), start, cache))
    }

    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        if self.habits.chunk_tokens == 0 {
            let done = self.prefill(tokens)?;
            sink(&done.cache, 0..signed(tokens.len()))?;
            return Ok(done);
        }
        let start = Instant::now();
        let function = choose_function(&self.functions, tokens.len())?.name.clone();
        let (mut pieces, mut last) = (0, None);
        for first in (0..tokens.len()).step_by(self.habits.chunk_tokens) {
            let rows = first..tokens.len().min(first + self.habits.chunk_tokens);
            // A view of the chunk before, which nobody asked for any longer, holds buffers back.
            drop(last.take());
            last = Some(self.chunk(tokens, rows, &mut pieces, sink)?);
        }
        let cache = last.expect("a prompt has tokens: a function was chosen for it");
        Ok(self.done(function, tokens.len(), start, cache))
    }
}

/// What the runtime's program takes: ids, the index of the last of them, and the position of the first.
fn inputs(tokens: &[u32], first: usize, slots: usize) -> Vec<(String, ArrayInfo, Bytes)> {
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let input = |name: &str, shape: &[usize], values: &[u32]| {
        let mut bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let info = ArrayInfo::packed(Element::Int32, shape);
        bytes.resize(info.len_bytes, 0);
        (name.to_owned(), info, Bytes::new(bytes))
    };
    vec![
        input("input_ids", &[1, slots], tokens),
        input("last_index", &[1], &[number(tokens.len().saturating_sub(1))]),
        input("position", &[1], &[number(first)]),
    ]
}

fn tensor(output: Output) -> Tensor {
    let Output { name, info, bytes, .. } = output;
    let info = TensorInfo {
        name,
        dtype: info.element.dtype().expect("outputs are float16"),
        shape: info.shape,
        strides_bytes: info.strides_bytes,
        len_bytes: info.len_bytes,
    };
    Tensor { info, bytes }
}

/// Sleeps until `seconds` have passed since `start`.
fn wait_until(start: Instant, seconds: f64) {
    let rest = Duration::from_secs_f64(seconds).saturating_sub(start.elapsed());
    if !rest.is_zero() {
        std::thread::sleep(rest);
    }
}

fn signed(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use kvbaton_layout::Part;

    use super::*;

    fn engine(habits: Habits) -> FakePrefill {
        FakePrefill::new(CacheSpec::full(2, 2, 4), &[8], habits).unwrap()
    }

    #[test]
    fn a_second_prediction_is_refused_while_the_first_cache_is_held() {
        let mut engine = engine(Habits::default());
        let first = engine.prefill(&[1, 2, 3]).unwrap();
        assert_eq!(engine.prefill(&[4]).unwrap_err().kind(), ErrorKind::Lease);
        drop(first);
        assert!(engine.prefill(&[4]).is_ok());
    }

    #[test]
    fn an_engine_that_ignores_backings_never_touches_a_held_cache() {
        let mut engine = engine(Habits { ignores_backings: true, ..Habits::default() });
        let first = engine.prefill(&[1, 2, 3]).unwrap();
        let before = first.cache.bytes()[0].to_vec();
        engine.prefill(&[9, 9, 9]).unwrap();
        assert_eq!(first.cache.bytes()[0], before);
    }

    #[test]
    fn a_failed_prediction_leaves_the_engine_usable() {
        let mut engine = engine(Habits { fails_at: vec![0], ..Habits::default() });
        assert_eq!(engine.prefill(&[1]).unwrap_err().kind(), ErrorKind::Program);
        assert!(engine.prefill(&[1]).is_ok());
    }

    fn streamed(habits: Habits, tokens: &[u32]) -> Result<Vec<(CacheView, Range<i64>)>, Error> {
        let mut shown = Vec::new();
        engine(habits).prefill_streamed(tokens, &mut |view, rows| {
            shown.push((view.clone(), rows));
            Ok(())
        })?;
        Ok(shown)
    }

    #[test]
    fn chunks_show_every_row_once_and_hold_what_a_whole_prefill_holds() {
        let tokens = [5, 6, 7, 8, 9, 10, 11];
        let whole = engine(Habits::default()).prefill(&tokens).unwrap().cache;
        for by_layer in [false, true] {
            let habits = Habits { chunk_tokens: 3, by_layer, row_align_bytes: 64, ..Habits::default() };
            let shown = streamed(habits, &tokens).unwrap();
            assert_eq!(shown.len(), if by_layer { 6 } else { 3 });
            for (number, (view, rows)) in shown.iter().enumerate() {
                let chunk = if by_layer { number / 2 } else { number };
                assert_eq!(*rows, signed(chunk * 3)..signed(tokens.len().min(chunk * 3 + 3)));
                for layer in if by_layer { number % 2..number % 2 + 1 } else { 0..2 } {
                    for part in [Part::Key, Part::Value] {
                        assert_eq!(view.rows(layer, part).unwrap(), std::slice::from_ref(rows));
                        let (bytes, _, [heads, count, lanes], first) = view.canonical(layer, part).unwrap();
                        let (all, _, [_, total, _], _) = whole.canonical(layer, part).unwrap();
                        assert_eq!(first, rows.start);
                        let (row, skipped) = (lanes * 2, usize::try_from(first).unwrap());
                        for head in 0..heads {
                            let at = (head * total + skipped) * row;
                            let own = head * count * row;
                            assert_eq!(bytes[own..own + count * row], all[at..at + count * row]);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_held_chunk_is_never_written_again_and_a_free_one_is() {
        let mut engine = engine(Habits { chunk_tokens: 1, ..Habits::default() });
        let mut first: Option<(CacheView, Vec<u8>)> = None;
        engine
            .prefill_streamed(&[1, 2, 3, 4, 5, 6], &mut |view, _| {
                first.get_or_insert_with(|| (view.clone(), view.bytes()[0].to_vec()));
                Ok(())
            })
            .unwrap();
        let (view, before) = first.unwrap();
        assert_eq!(view.bytes()[0], before);
        assert_eq!(engine.buffer_sets(), 2);
    }

    #[test]
    fn a_streamed_prefill_fails_where_it_is_told_to_and_where_its_sink_does() {
        let tokens = [1, 2, 3, 4];
        let habits = Habits { chunk_tokens: 2, fails_after_pieces: Some(1), ..Habits::default() };
        let mut shown = 0;
        let mut engine = engine(habits);
        let mut count = |_: &CacheView, _| {
            shown += 1;
            Ok(())
        };
        assert_eq!(engine.prefill_streamed(&tokens, &mut count).unwrap_err().kind(), ErrorKind::Program);
        assert_eq!(shown, 1);
        let refused =
            engine.prefill_streamed(&tokens, &mut |_, _| Err(Error::new(ErrorKind::Interrupted, "enough")));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Interrupted);
    }
}
