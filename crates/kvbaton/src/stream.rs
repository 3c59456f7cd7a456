//! A hand-off that runs beside the prefill: rows move as soon as they are final.
//!
//! The caller's thread prefills and tells of rows; one worker copies them, and touches the target's pages while it waits
//! for the next. What is left to do once the last rows are final is the exposed cost.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Instant;

use kvbaton_copy::{CopyOptions, CopyStats, Threads, run, zero};
use kvbaton_layout::{CacheSpec, LayerSpec, Resolved, TensorInfo};
use kvbaton_memory::populate;
use kvbaton_plan::plan;

use crate::handoff::{self, Target, Wanted};
use crate::{CacheView, Error, ErrorKind, OnOverflow, Prefill, Prefilled};

/// Bytes that the worker touches or zeroes before it looks for rows again: well below a millisecond.
const CHORE_BYTES: usize = 1 << 20;

/// How to stream.
#[derive(Clone, Copy)]
pub struct StreamOptions<'a> {
    /// What to do with values that the target's type cannot hold.
    pub on_overflow: OnOverflow,
    /// Pieces that may wait to be copied, at least 1. The prefill waits when one more comes.
    pub waiting: usize,
    /// Asked at every piece whether to stop.
    pub cancelled: &'a dyn Fn() -> bool,
}

impl Default for StreamOptions<'_> {
    fn default() -> Self {
        StreamOptions { on_overflow: OnOverflow::default(), waiting: 2, cancelled: &|| false }
    }
}

/// What a streamed hand-off did.
#[derive(Debug)]
pub struct Streamed {
    /// What the prefill left.
    pub prefilled: Prefilled,
    /// Counts of all copies, and the sum of their seconds.
    pub stats: CopyStats,
    /// Whether elements changed their type.
    pub converted: bool,
    /// Pieces that were copied one by one.
    pub pieces: usize,
    /// Seconds of touching the target's pages and zeroing its free rows.
    pub prepare_seconds: f64,
    /// Seconds of planning, of all pieces.
    pub plan_seconds: f64,
    /// Seconds of the longest copy of a piece.
    pub longest_copy_seconds: f64,
    /// Seconds that the prefill waited because too many pieces did.
    pub blocked_seconds: f64,
    /// Seconds from the moment the prefill told of its last rows until every row was in its place.
    pub tail_seconds: f64,
}

impl Streamed {
    /// Seconds that the hand-off added to the prefill.
    pub fn exposed_seconds(&self) -> f64 {
        self.blocked_seconds + self.tail_seconds
    }

    /// Seconds of all that the hand-off did.
    pub fn busy_seconds(&self) -> f64 {
        self.prepare_seconds + self.plan_seconds + self.stats.seconds
    }
}

/// Prefills `tokens` and fills `targets`, which hold nothing yet, on the way.
///
/// `wanted.live` are the rows when all tokens are there; its `rows` and `whole` are not looked at. Pieces are copied
/// on one thread while the prefill runs, the last on all of `threads`.
///
/// # Errors
///
/// When the prefill fails or panics, a row is missing or told of twice, the rows do not fit the targets, or the
/// options say to stop. The targets are then partly written and must be dropped.
pub fn prefill_into(
    engine: &mut dyn Prefill,
    tokens: &[u32],
    wanted: &Wanted<'_>,
    targets: &mut [Target<'_>],
    threads: &Threads,
    options: StreamOptions<'_>,
) -> Result<Streamed, Error> {
    let infos: Vec<TensorInfo> = targets.iter().map(|t| t.info.clone()).collect();
    let target = wanted.layout.resolve(wanted.cache, &infos, wanted.live)?;
    let mut ledger = Ledger::new(&target, wanted.cache);
    let (abandoned, mut blocked_seconds) = (&AtomicBool::new(false), 0.0);
    let mut told = Instant::now();
    let filler = Filler { target, targets, cache: wanted.cache, threads, options: copy_options(options) };
    std::thread::scope(|scope| {
        let (send, receive) = sync_channel(options.waiting.max(1));
        let worker = scope.spawn(move || filler.work(&receive, abandoned));
        let mut sink = |view: &CacheView, rows: Range<i64>| {
            if (options.cancelled)() {
                return Err(Error::new(ErrorKind::Interrupted, "interrupted during the prefill"));
            }
            let last = ledger.enter(view, &rows)?;
            let ends = rows.end >= ledger.end;
            let piece = Piece { view: view.clone(), rows, ends, last };
            if last {
                told = Instant::now();
                // A wait of the last piece is part of the tail.
                return send.send(piece).map_err(|_| gone());
            }
            blocked_seconds += hand(&send, piece)?;
            Ok(())
        };
        let run = AssertUnwindSafe(|| engine.prefill_streamed(tokens, &mut sink));
        let done = catch_unwind(run).unwrap_or_else(|panic| Err(panicked("the prefill", &*panic)));
        abandoned.store(done.is_err(), Ordering::Relaxed);
        drop(send);
        let filled = worker.join().unwrap_or_else(|panic| Err(panicked("the copy", &*panic)));
        // The worker's own failure is the cause when both failed: the prefill ended because nobody took its rows.
        let (filled, prefilled) = (filled?, done?);
        ledger.complete()?;
        Ok(Streamed {
            prefilled,
            stats: filled.stats,
            converted: filled.converted,
            pieces: filled.pieces,
            prepare_seconds: filled.prepare_seconds,
            plan_seconds: filled.plan_seconds,
            longest_copy_seconds: filled.longest_copy_seconds,
            blocked_seconds,
            tail_seconds: told.elapsed().as_secs_f64(),
        })
    })
}

fn copy_options(options: StreamOptions<'_>) -> CopyOptions {
    CopyOptions { on_overflow: options.on_overflow }
}

fn panicked(what: &str, panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    Error::new(ErrorKind::Internal, format!("{what} panicked: {text}"))
}

/// Rows on their way to the worker.
struct Piece {
    view: CacheView,
    rows: Range<i64>,
    /// They are the newest of their layers, whose states are final with them.
    ends: bool,
    /// Nothing comes after it.
    last: bool,
}

fn gone() -> Error {
    Error::new(ErrorKind::Internal, "the copy ended before the prefill")
}

/// Gives a piece to the worker; returns the seconds that it was not taken.
fn hand(send: &SyncSender<Piece>, piece: Piece) -> Result<f64, Error> {
    use std::sync::mpsc::TrySendError;
    match send.try_send(piece) {
        Ok(()) => Ok(0.0),
        Err(TrySendError::Disconnected(_)) => Err(gone()),
        Err(TrySendError::Full(piece)) => {
            let start = Instant::now();
            send.send(piece).map_err(|_| gone())?;
            Ok(start.elapsed().as_secs_f64())
        }
    }
}

/// Which rows have come, layer by layer.
struct Ledger {
    /// The next position of each layer that the target wants rows or states of.
    next: Vec<Option<i64>>,
    end: i64,
}

impl Ledger {
    fn new(target: &Resolved, cache: &CacheSpec) -> Ledger {
        let wanted = |layer| target.blocks.iter().any(|b| b.layer == layer).then_some(0);
        let end = i64::try_from(target.tokens_seen).unwrap_or(i64::MAX);
        Ledger { next: (0..cache.layers.len()).map(wanted).collect(), end }
    }

    /// Takes note of a piece, and says whether it is the last.
    fn enter(&mut self, view: &CacheView, rows: &Range<i64>) -> Result<bool, Error> {
        for (layer, spec) in view.cache().layers.iter().enumerate() {
            let Some(Some(next)) = self.next.get_mut(layer) else { continue };
            if matches!(spec, LayerSpec::Shared { .. }) {
                continue;
            }
            if rows.start != *next || rows.end <= rows.start {
                let (start, end) = (rows.start, rows.end);
                let message =
                    format!("the prefill told of rows {start}..{end} of layer {layer} after {next} rows");
                return Err(Error::new(ErrorKind::Internal, message).field("layer", layer));
            }
            *next = rows.end;
        }
        Ok(self.next.iter().flatten().all(|next| *next >= self.end))
    }

    fn complete(&self) -> Result<(), Error> {
        let short =
            self.next.iter().enumerate().find_map(|(l, next)| next.filter(|n| *n < self.end).map(|n| (l, n)));
        let Some((layer, next)) = short else { return Ok(()) };
        let message = format!("the prefill told of {next} rows of layer {layer}, {} are wanted", self.end);
        Err(Error::new(ErrorKind::Internal, message).field("layer", layer).field("rows", next))
    }
}

/// A stretch of a target that is to be zeroed, or whose pages are to be touched.
struct Chore {
    tensor: usize,
    range: Range<usize>,
    zero: bool,
}

/// A stretch in pieces of [`CHORE_BYTES`].
fn cut(tensor: usize, range: Range<usize>, zero: bool) -> impl Iterator<Item = Chore> {
    let end = range.end;
    range.step_by(CHORE_BYTES).map(move |at| Chore { tensor, range: at..end.min(at + CHORE_BYTES), zero })
}

/// The worker and what it fills.
struct Filler<'a, 't> {
    target: Resolved,
    targets: &'a mut [Target<'t>],
    cache: &'a CacheSpec,
    threads: &'a Threads,
    options: CopyOptions,
}

#[derive(Default)]
struct Totals {
    stats: CopyStats,
    converted: bool,
    pieces: usize,
    prepare_seconds: f64,
    plan_seconds: f64,
    longest_copy_seconds: f64,
}

impl Filler<'_, '_> {
    fn work(mut self, pieces: &Receiver<Piece>, abandoned: &AtomicBool) -> Result<Totals, Error> {
        let mut totals = Totals::default();
        let start = Instant::now();
        let mut chores = self.chores().into_iter();
        totals.prepare_seconds = start.elapsed().as_secs_f64();
        // The prefill has the other cores until its last rows are out.
        let alone = Threads::new(1);
        loop {
            let piece = match pieces.try_recv() {
                Ok(piece) => piece,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => {
                    if let Some(chore) = chores.next() {
                        let start = Instant::now();
                        self.perform(&chore);
                        totals.prepare_seconds += start.elapsed().as_secs_f64();
                        continue;
                    }
                    let Ok(piece) = pieces.recv() else { break };
                    piece
                }
            };
            if abandoned.load(Ordering::Relaxed) {
                break;
            }
            let threads = if piece.last { self.threads } else { &alone };
            if piece.last {
                let start = Instant::now();
                self.zero_rest(chores.as_slice());
                totals.prepare_seconds += start.elapsed().as_secs_f64();
            }
            self.copy(&piece, threads, &mut totals)?;
        }
        Ok(totals)
    }

    /// What there is to do until rows come: zeroing what no row fills, and making the pages of the rest exist. Tensors
    /// whose rows are apart are zeroed at once, before rows are copied over the zeros.
    fn chores(&mut self) -> Vec<Chore> {
        let (mut apart, mut chores) = (Vec::new(), Vec::new());
        for (tensor, bytes) in self.targets.iter_mut().map(|t| &mut *t.bytes).enumerate() {
            let Some(free) = handoff::free_ranges(&self.target, tensor, bytes.len()) else {
                apart.push(bytes);
                continue;
            };
            let mut at = 0;
            for gap in free {
                chores.extend(cut(tensor, at..gap.start, false));
                at = gap.end;
                chores.extend(cut(tensor, gap, true));
            }
            chores.extend(cut(tensor, at..bytes.len(), false));
        }
        zero(apart, &Threads::new(1));
        chores
    }

    fn perform(&mut self, chore: &Chore) {
        let bytes = &mut self.targets[chore.tensor].bytes[chore.range.clone()];
        if chore.zero {
            bytes.fill(0);
        } else {
            // Rows may have come meanwhile: the bytes stay.
            populate(bytes);
        }
    }

    /// Zeroes what of `chores` is to be zeroed, on all threads. Pages that no one touched are left to the copy.
    fn zero_rest(&mut self, chores: &[Chore]) {
        let mut rest = Vec::new();
        for (tensor, mut bytes) in self.targets.iter_mut().map(|t| &mut *t.bytes).enumerate() {
            let mut at = 0;
            for Chore { range, .. } in chores.iter().filter(|c| c.tensor == tensor && c.zero) {
                let (gap, after) = bytes[range.start - at..].split_at_mut(range.len());
                rest.push(gap);
                bytes = after;
                at = range.end;
            }
        }
        zero(rest, self.threads);
    }

    fn copy(&mut self, piece: &Piece, threads: &Threads, totals: &mut Totals) -> Result<(), Error> {
        let start = Instant::now();
        let source = piece.view.resolve()?;
        let mut target = self.target.only_rows(&piece.rows, piece.ends);
        // A piece may hold some layers alone.
        let elsewhere =
            |layer: usize| matches!(piece.view.cache().layers.get(layer), Some(LayerSpec::Shared { .. }));
        target.blocks.retain(|b| !elsewhere(b.layer));
        let plan = plan(&source, &target, self.cache)?;
        totals.plan_seconds += start.elapsed().as_secs_f64();
        let mut buffers: Vec<&mut [u8]> = self.targets.iter_mut().map(|t| &mut *t.bytes).collect();
        let stats = run(&plan, &piece.view.bytes(), &mut buffers, threads, self.options)?;
        totals.pieces += 1;
        totals.converted |= plan.converts();
        totals.longest_copy_seconds = totals.longest_copy_seconds.max(stats.seconds);
        handoff::add_stats(&mut totals.stats, stats);
        Ok(())
    }
}
