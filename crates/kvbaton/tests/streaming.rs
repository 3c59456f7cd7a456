//! Streamed hand-offs against unstreamed ones, and what is left when the producer fails.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::cell::Cell;
use std::ops::Range;

use kvbaton::fake::{FakePrefill, Habits};
use kvbaton::layout::{CacheSpec, DType, LayerSpec, Layout, LiveRows, Sizes, TensorInfo, Window, presets};
use kvbaton::{
    CacheView, ChunkSink, Error, ErrorKind, FunctionInfo, HandoffOptions, Prefill, Prefilled, StreamOptions,
    Streamed, Target, Threads, Wanted, hand_off_to, prefill_into,
};

const LAYERS: usize = 3;
const CAPACITY: usize = 64;

fn cache() -> CacheSpec {
    CacheSpec::full(LAYERS, 2, 8)
}

fn engine(habits: Habits) -> FakePrefill {
    FakePrefill::new(cache(), &[CAPACITY], habits).unwrap()
}

fn prompt(count: usize) -> Vec<u32> {
    (0..count).map(|i| u32::try_from(i * 37 % 501).unwrap()).collect()
}

/// Targets of a layout, full of what was in the memory before.
struct Targets {
    layout: Layout,
    cache: CacheSpec,
    live: LiveRows,
    infos: Vec<TensorInfo>,
    bytes: Vec<Vec<u8>>,
}

impl Targets {
    fn new(name: &str, cache: CacheSpec, dtype: DType, tokens: usize) -> Targets {
        let layout = presets::get(name).unwrap();
        let sizes = Sizes { capacity: CAPACITY, dtype, block_rows: 16, row_stride_bytes: None };
        let infos = layout.tensors(&cache, &sizes).unwrap();
        // Rings start behind the rows that stay.
        let live = LiveRows { ring_start: None, ..LiveRows::made_for(&layout, &sizes, tokens) };
        let bytes = infos.iter().map(|i| vec![0xA5; i.len_bytes]).collect();
        Targets { layout, cache, live, infos, bytes }
    }

    fn parts(&mut self) -> (Wanted<'_>, Vec<Target<'_>>) {
        let wanted =
            Wanted { layout: &self.layout, cache: &self.cache, live: &self.live, rows: None, whole: &[] };
        let targets = self.infos.iter().zip(&mut self.bytes);
        (wanted, targets.map(|(i, bytes)| Target { info: i.clone(), bytes }).collect())
    }

    fn stream(
        &mut self,
        engine: &mut dyn Prefill,
        tokens: &[u32],
        options: StreamOptions<'_>,
    ) -> Result<Streamed, Error> {
        let (wanted, mut targets) = self.parts();
        prefill_into(engine, tokens, &wanted, &mut targets, &Threads::new(2), options)
    }

    fn fill(&mut self, view: &CacheView) {
        let (wanted, mut targets) = self.parts();
        let options = HandoffOptions { fresh: true, ..HandoffOptions::default() };
        hand_off_to(view, &wanted, &mut targets, &Threads::new(2), options).unwrap();
    }
}

#[test]
fn streamed_targets_hold_the_bytes_that_unstreamed_ones_do() {
    let sliding = CacheSpec {
        layers: (0..LAYERS)
            .map(|l| match l {
                1 => LayerSpec::Sliding {
                    kv_heads: 2,
                    key_dim: 8,
                    value_dim: 8,
                    window: Window { size: 10, keep: 2 },
                },
                _ => cache().layers[0],
            })
            .collect(),
    };
    for (name, spec) in [
        ("mlx-lm", cache()),
        ("mlx-lm", sliding),
        ("mlx-lm-8bit", CacheSpec::full(LAYERS, 2, 64)),
        ("vllm-nhd", cache()),
    ] {
        for dtype in [DType::Float16, DType::Float32] {
            for (tokens, chunk) in [(1, 4), (12, 4), (13, 5), (40, 64), (64, 1), (7, 0)] {
                let ids = prompt(tokens);
                let (heads, dim, _) = spec.layers[0].attention().unwrap();
                let source = |habits| {
                    FakePrefill::new(CacheSpec::full(LAYERS, heads, dim), &[CAPACITY], habits).unwrap()
                };
                let mut plain = Targets::new(name, spec.clone(), dtype, tokens);
                plain.fill(&source(Habits::default()).prefill(&ids).unwrap().cache);
                for by_layer in [false, true] {
                    let habits =
                        Habits { chunk_tokens: chunk, by_layer, row_align_bytes: 32, ..Habits::default() };
                    let mut streamed = Targets::new(name, spec.clone(), dtype, tokens);
                    let done = streamed.stream(&mut source(habits), &ids, StreamOptions::default()).unwrap();
                    assert_eq!(streamed.bytes, plain.bytes, "{name}, {tokens} tokens by {chunk}");
                    let chunks = if chunk == 0 { 1 } else { tokens.div_ceil(chunk) };
                    let layers = if by_layer && chunk > 0 { LAYERS } else { 1 };
                    assert_eq!(done.pieces, chunks * layers);
                }
            }
        }
    }
}

#[test]
fn a_producer_that_fails_anywhere_is_reported_and_holds_nothing() {
    let ids = prompt(CAPACITY);
    let mut state = 12345u32;
    let mut random = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    for round in 0..100 {
        let (chunk_tokens, by_layer) = (1 + random(20), random(2) == 1);
        let pieces = CAPACITY.div_ceil(chunk_tokens) * if by_layer { LAYERS } else { 1 };
        let (piece, panics) = (random(pieces), random(4) == 0);
        let habits =
            Habits { chunk_tokens, by_layer, panics, fails_after_pieces: Some(piece), ..Habits::default() };
        let mut engine = engine(habits);
        let mut targets = Targets::new("mlx-lm", cache(), DType::Float16, CAPACITY);
        let error = targets.stream(&mut engine, &ids, StreamOptions::default()).unwrap_err();
        let cause = format!("failed after {piece} pieces, as it was told to");
        assert!(error.to_string().contains(&cause), "round {round}: {error}");
        assert_eq!(error.kind(), if panics { ErrorKind::Internal } else { ErrorKind::Program });
        assert!(engine.is_idle(), "round {round}: a view of a failed prefill holds its buffers");
    }
}

#[test]
fn the_producer_waits_for_the_copies() {
    // The copies of a hundred chunks cannot keep up with an engine that only touches a row of each head.
    let mut engine = engine(Habits { chunk_tokens: 1, ..Habits::default() });
    let mut targets = Targets::new("mlx-lm", cache(), DType::Float32, CAPACITY);
    let options = StreamOptions { waiting: 1, ..StreamOptions::default() };
    targets.stream(&mut engine, &prompt(CAPACITY), options).unwrap();
    // One is written, one waits, one is copied, and one is kept by the engine until the next is asked for.
    assert!(engine.buffer_sets() <= 4, "{} sets of buffers", engine.buffer_sets());
}

#[test]
fn a_stop_is_seen_at_every_piece() {
    let asked = Cell::new(0);
    let cancelled = || {
        asked.set(asked.get() + 1);
        asked.get() == 3
    };
    let mut engine = engine(Habits { chunk_tokens: 8, ..Habits::default() });
    let mut targets = Targets::new("mlx-lm", cache(), DType::Float16, CAPACITY);
    let options = StreamOptions { cancelled: &cancelled, ..StreamOptions::default() };
    let error = targets.stream(&mut engine, &prompt(CAPACITY), options).unwrap_err();
    assert_eq!((error.kind(), asked.get()), (ErrorKind::Interrupted, 3));
    assert!(engine.is_idle());
}

#[test]
fn values_that_do_not_fit_end_the_prefill() {
    let mut engine = Scripted::new(vec![(0..4, true), (4..8, true), (8..12, true)]);
    engine.value = 1e6;
    let mut targets = Targets::new("mlx-lm", cache(), DType::Float16, 12);
    let error = targets.stream(&mut engine, &prompt(12), StreamOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overflow);
}

#[test]
fn rows_that_come_twice_or_not_at_all_are_an_error() {
    for script in [
        vec![(0..4, true), (8..12, true)],
        vec![(0..4, true), (0..4, true), (4..12, true)],
        vec![(0..4, true)],
        vec![],
        vec![(0..0, true), (0..12, true)],
        vec![(0..4, false), (4..12, true)],
    ] {
        let mut engine = Scripted::new(script.clone());
        let mut targets = Targets::new("mlx-lm", cache(), DType::Float32, 12);
        let error = targets.stream(&mut engine, &prompt(12), StreamOptions::default()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Internal | ErrorKind::Incompatible), "{script:?}: {error}");
    }
}

#[test]
fn targets_that_do_not_fit_are_refused_before_the_prefill() {
    let mut engine = engine(Habits::default());
    let mut targets = Targets::new("mlx-lm", CacheSpec::full(LAYERS, 2, 16), DType::Float16, 8);
    targets.cache = cache();
    let error = targets.stream(&mut engine, &prompt(8), StreamOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Layout);
    assert_eq!(engine.buffer_sets(), 0, "nothing was prefilled");
}

/// An engine that tells of the rows it is told to, in float32, and of which some were never written.
struct Scripted {
    layout: Layout,
    cache: CacheSpec,
    script: Vec<(Range<i64>, bool)>,
    value: f32,
}

impl Scripted {
    fn new(script: Vec<(Range<i64>, bool)>) -> Scripted {
        Scripted { layout: presets::get("kvbaton-stacked").unwrap(), cache: cache(), script, value: 1.0 }
    }

    /// All rows, or only the first.
    fn view(&self, tokens: usize) -> CacheView {
        let sizes =
            Sizes { capacity: CAPACITY, dtype: DType::Float32, block_rows: 16, row_stride_bytes: None };
        let tensors = self.layout.tensors(&self.cache, &sizes).unwrap().into_iter().map(|info| {
            let bytes = self.value.to_le_bytes().repeat(info.len_bytes / 4);
            kvbaton::Tensor { info, bytes: kvbaton::Bytes::new(bytes) }
        });
        let live = LiveRows::seen(tokens);
        CacheView::new(self.layout.clone(), self.cache.clone(), tensors.collect(), live).unwrap()
    }
}

impl Prefill for Scripted {
    fn engine(&self) -> &'static str {
        "scripted"
    }

    fn functions(&self) -> &[FunctionInfo] {
        &[]
    }

    fn model(&self) -> Option<&kvbaton::layout::ModelSpec> {
        None
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn prepare(&mut self, _: usize) -> Result<(), Error> {
        Ok(())
    }

    fn prefill(&mut self, _: &[u32]) -> Result<Prefilled, Error> {
        Err(Error::new(ErrorKind::Internal, "only streamed"))
    }

    fn prefill_streamed(&mut self, tokens: &[u32], sink: &mut ChunkSink<'_>) -> Result<Prefilled, Error> {
        for (rows, held) in &self.script {
            let seen = if *held { tokens.len() } else { 1 };
            sink(&self.view(seen), rows.clone())?;
        }
        let report = kvbaton::PrefillReport::new("scripted", String::new(), tokens.len(), 0.0);
        Ok(Prefilled { cache: self.view(tokens.len()), logits: None, report })
    }
}
