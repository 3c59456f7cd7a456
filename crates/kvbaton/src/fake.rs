//! An engine for tests that behaves as Core ML is known to.
//!
//! It computes nothing: every element says where it is, so a hand-off that mixes up heads, rows or lanes is
//! caught by its values. What it takes from Core ML are the habits that break callers: it writes into the same
//! buffers at every prediction, pads rows, ignores the buffers it was offered, and fails.

use std::ops::Range;
use std::time::{Duration, Instant};

use kvbaton_layout::{CacheSpec, DType, Layout, LiveRows, ModelSpec, Part, TensorInfo, presets};
use kvbaton_memory::{Buffer, Bytes, Leased, WriteLease};
pub use kvbaton_runtime::fake::element;

use crate::prefill::{ChunkSink, choose_function};
use crate::{CacheView, Error, ErrorKind, FunctionInfo, Logits, Prefill, PrefillReport, Prefilled, Tensor};

/// How the engine misbehaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Habits {
    /// Every row starts on a multiple of so many bytes; 0 packs them.
    pub row_align_bytes: usize,
    /// Fresh buffers at every prediction, whatever the last one used. Core ML does so when it refuses an output
    /// backing; otherwise the buffers of the last prediction are written again.
    pub ignores_backings: bool,
    /// Fails at these predictions, counted from 0. A chunk is a prediction.
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

/// The engine.
pub struct FakePrefill {
    cache: CacheSpec,
    layout: Layout,
    functions: Vec<FunctionInfo>,
    habits: Habits,
    /// Sets of buffers, one buffer a tensor; a set is written again once no view holds it.
    pool: Vec<Vec<Leased>>,
    predictions: usize,
}

/// Values are whole numbers below this, which float16 holds exactly.
const VALUES: usize = 2039;

const LANE_STEP: usize = 3;

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
        Ok(FakePrefill { cache, layout, functions, habits, pool: Vec::new(), predictions: 0 })
    }

    /// Whether no view holds a buffer.
    pub fn is_idle(&self) -> bool {
        self.pool.iter().flatten().all(|buffer| buffer.write().is_ok())
    }

    /// Sets of buffers that predictions have needed at once.
    pub fn buffer_sets(&self) -> usize {
        self.pool.len()
    }

    /// The tensors of a prediction that holds `rows` rows: keys, then values, of each of its groups of layers.
    fn tensors(&self, rows: usize) -> Vec<Output> {
        let (heads, key_dim, value_dim) =
            self.cache.layers[0].attention().expect("attention layers, checked in `new`");
        let align = self.habits.row_align_bytes;
        let pair = |layers: Range<usize>, suffix: &str, count: usize| {
            [("key", Part::Key, key_dim), ("value", Part::Value, value_dim)].map(|(name, part, dim)| {
                let info = padded(&format!("{name}_cache{suffix}"), &[count, heads, rows, dim], align);
                Output { part, layers: layers.clone(), info }
            })
        };
        let count = self.cache.layers.len();
        if self.habits.by_layer {
            (0..count).flat_map(|l| pair(l..l + 1, &format!("_{l}"), 1)).collect()
        } else {
            pair(0..count, "", count).into()
        }
    }

    /// Counts a prediction, and fails it if it was told to.
    fn predict(&mut self) -> Result<(), Error> {
        let prediction = self.predictions;
        self.predictions += 1;
        if self.habits.fails_at.contains(&prediction) {
            return self.fail(&format!("prediction {prediction} failed, as it was told to"));
        }
        Ok(())
    }

    fn fail(&self, message: &str) -> Result<(), Error> {
        assert!(!self.habits.panics, "{message}");
        Err(Error::new(ErrorKind::Program, message))
    }

    /// One chunk of a streamed prefill: writes rows `rows` of all layers and shows them.
    fn chunk(
        &mut self,
        tokens: &[u32],
        rows: Range<usize>,
        pieces: &mut usize,
        sink: &mut ChunkSink<'_>,
    ) -> Result<CacheView, Error> {
        let start = Instant::now();
        self.predict()?;
        let outputs = self.tensors(self.habits.chunk_tokens);
        let set = self.free_set(&outputs);
        let seconds = self.habits.token_seconds * rows.len() as f64;
        let layers = self.cache.layers.len();
        let mut tensors: Vec<Tensor> = Vec::new();
        for (pair, buffers) in outputs.chunks(2).zip(set.chunks(2)) {
            for (output, buffer) in pair.iter().zip(buffers) {
                fill(&mut buffer.write()?, output, tokens, &rows);
                tensors.push(Tensor { info: output.info.clone(), bytes: Bytes::new(buffer.read()?) });
            }
            let done = pair[0].layers.end as f64 / layers as f64;
            wait_until(start, seconds * done);
            if self.habits.fails_after_pieces == Some(*pieces) {
                self.fail(&format!("failed after {pieces} pieces, as it was told to"))?;
            }
            let shown = tensors[tensors.len() - 2..].to_vec();
            let view = self.view(&self.cache.only(&pair[0].layers), shown, &rows, tokens)?;
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

    /// A set of buffers for `outputs` that no view holds; a new one where all are held.
    fn free_set(&mut self, outputs: &[Output]) -> Vec<Leased> {
        let fits = |set: &Vec<Leased>| {
            set.len() == outputs.len()
                && set.iter().zip(outputs).all(|(buffer, output)| {
                    buffer.write().is_ok_and(|lease| lease.len() == output.info.len_bytes)
                })
        };
        if let Some(set) = self.pool.iter().find(|set| fits(set)).filter(|_| !self.habits.ignores_backings) {
            return set.clone();
        }
        let set: Vec<Leased> = outputs.iter().map(Output::buffer).collect();
        self.pool.push(set.clone());
        set
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

    fn prefill(&mut self, tokens: &[u32]) -> Result<Prefilled, Error> {
        let start = Instant::now();
        let function = choose_function(&self.functions, tokens.len())?.clone();
        self.predict()?;
        let outputs = self.tensors(function.tokens);
        let last = self.pool.first().filter(|set| {
            let fits = |(b, o): (&Leased, &Output)| b.read().is_ok_and(|b| b.len() == o.info.len_bytes);
            set.len() == outputs.len() && set.iter().zip(&outputs).all(fits)
        });
        if self.habits.ignores_backings || last.is_none() {
            self.pool = vec![outputs.iter().map(Output::buffer).collect()];
        }
        let set = self.pool[0].clone();
        let mut leases = set.iter().map(Leased::write).collect::<Result<Vec<WriteLease>, _>>()?;
        for (lease, output) in leases.iter_mut().zip(&outputs) {
            fill(lease, output, tokens, &(0..tokens.len()));
        }
        drop(leases);
        let mut tensors = Vec::new();
        for (output, buffer) in outputs.into_iter().zip(&set) {
            tensors.push(Tensor { info: output.info, bytes: Bytes::new(buffer.read()?) });
        }
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

/// A tensor that a prediction leaves.
struct Output {
    part: Part,
    layers: Range<usize>,
    info: TensorInfo,
}

impl Output {
    fn buffer(&self) -> Leased {
        Leased::new(Buffer::zeroed(self.info.len_bytes))
    }
}

/// A float16 tensor whose rows start on multiples of `row_align_bytes`.
fn padded(name: &str, shape: &[usize], row_align_bytes: usize) -> TensorInfo {
    let row = shape[3] * DType::Float16.size_bytes();
    let row = row.next_multiple_of(row_align_bytes.max(1));
    let strides_bytes = vec![shape[1] * shape[2] * row, shape[2] * row, row, DType::Float16.size_bytes()];
    let len_bytes = shape[0] * strides_bytes[0];
    TensorInfo {
        name: name.to_owned(),
        dtype: DType::Float16,
        shape: shape.to_vec(),
        strides_bytes,
        len_bytes,
    }
}

/// Writes the rows at positions `rows` into the first slots; padding and slots of no row are NaN.
fn fill(bytes: &mut [u8], output: &Output, tokens: &[u32], rows: &Range<usize>) {
    let Output { part, layers, info } = output;
    let values: Vec<[u8; 2]> = (0..VALUES)
        .map(|v| if *part == Part::Key { v as f32 } else { -(v as f32) - 1.0 })
        .map(|v| half::f16::from_f32(v).to_le_bytes())
        .collect();
    let nan = half::f16::NAN.to_le_bytes();
    let (shape, strides) = (&info.shape, &info.strides_bytes);
    let slots = bytes.chunks_exact_mut(strides[2]);
    for (slot, at) in slots.zip(0..) {
        let (layer, head, row) = (at / (shape[1] * shape[2]), at / shape[2] % shape[1], at % shape[2]);
        let (lanes, padding) = slot.split_at_mut(shape[3] * strides[3]);
        padding.as_chunks_mut().0.fill(nan);
        let lanes = lanes.as_chunks_mut().0;
        if row >= rows.len() {
            lanes.fill(nan);
            continue;
        }
        let position = rows.start + row;
        let first = element(Part::Key, layers.start + layer, head, position, 0, tokens[position]);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number below VALUES"
        )]
        let mut value = first as usize;
        for lane in lanes {
            *lane = values[value];
            value += LANE_STEP;
            value -= if value >= VALUES { VALUES } else { 0 };
        }
    }
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
        assert_eq!(engine.pool.len(), 2);
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
