//! `bench handoff`: a synthetic cache through real copies.

use std::time::Instant;

use kvbaton_copy::{Memcpy, Threads, run};
use kvbaton_layout::{Block, CacheSpec, DType, Encoding, Layout, LiveRows, Resolved, Sizes, TensorInfo};
use kvbaton_memory::Buffer;
use kvbaton_plan::plan;
use serde::Serialize;

use super::Machine;
use crate::report::rate;
use crate::{CopyOptions, Error, ErrorKind, Range, memcpy_share};

/// What to measure.
#[derive(Clone, Debug)]
pub struct HandoffBench {
    /// Name of the model's shape, for the report.
    pub shape: String,
    /// The model's cache.
    pub cache: CacheSpec,
    /// The source's layout.
    pub source: Layout,
    /// The target's layout.
    pub target: Layout,
    /// Capacities, in rows.
    pub contexts: Vec<usize>,
    /// Live rows as a share of the capacity.
    pub live_fraction: f64,
    /// The target's element type. The source's is float16 unless its layout says otherwise.
    pub dtype: DType,
    /// Row stride of the source's tensors; packed when absent.
    pub row_stride_bytes: Option<usize>,
    /// Threads; 0 takes all cores.
    pub threads: usize,
    /// Measurements of each figure.
    pub repeats: usize,
}

/// A memcpy of as many bytes as the largest hand-off moves.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MemcpyRow {
    /// Bytes copied; as many are read as written.
    pub bytes: usize,
    /// Seconds.
    pub seconds: Range,
    /// Bytes read and written a nanosecond, at the median.
    pub gigabytes_per_second: f64,
}

/// Both states of a destination.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MemcpyRows {
    /// Its pages were written before.
    pub warm: MemcpyRow,
    /// Its pages are touched for the first time.
    pub cold: MemcpyRow,
}

/// One hand-off.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffRow {
    /// The model's shape.
    pub shape: String,
    /// The source's layout.
    pub source: String,
    /// The target's layout.
    pub target: String,
    /// The target's element type.
    pub dtype: String,
    /// Capacity of source and target, in rows.
    pub context: usize,
    /// Live rows.
    pub live_rows: usize,
    /// Live bytes written to the target.
    pub bytes: usize,
    /// Boxes copied.
    pub operations: usize,
    /// Threads.
    pub threads: usize,
    /// Seconds of planning.
    pub plan_seconds: Range,
    /// Seconds of planning and copying into touched memory.
    pub seconds: Range,
    /// Seconds of the copy alone, into touched memory.
    pub copy_seconds: Range,
    /// Bytes read and written a nanosecond, at the median.
    pub gigabytes_per_second: Option<f64>,
    /// Seconds of a memcpy of as many bytes into touched memory, over `copy_seconds`, medians of one run.
    pub memcpy_ratio: Option<f64>,
    /// Seconds of allocating the target; its pages come with the first write.
    pub allocate_seconds: Range,
    /// Seconds of the copy into memory that was never touched.
    pub cold_copy_seconds: Range,
    /// The same share for untouched memory.
    pub cold_memcpy_ratio: Option<f64>,
    /// Why a figure is missing or doubtful.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct HandoffBenchReport {
    /// The machine.
    pub machine: Machine,
    /// The yardstick.
    pub memcpy: MemcpyRows,
    /// The hand-offs.
    pub rows: Vec<HandoffRow>,
}

/// Measures hand-offs of a synthetic cache.
///
/// # Errors
///
/// When a layout does not fit the shape, or a copy's answer is wrong.
pub fn bench_handoff(
    bench: &HandoffBench,
    mut progress: impl FnMut(&HandoffRow),
) -> Result<HandoffBenchReport, Error> {
    if !(bench.live_fraction > 0.0 && bench.live_fraction <= 1.0) {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("a live fraction of {} is not above 0 and at most 1", bench.live_fraction),
        ));
    }
    let threads = Threads::new(bench.threads);
    let mut rows: Vec<HandoffRow> = Vec::new();
    let mut yardstick = None;
    for &context in &bench.contexts {
        let mut case = Case::new(bench, context)?;
        let (row, memcpy) = case.measure(bench, &threads)?;
        progress(&row);
        if yardstick.is_none_or(|m: MemcpyRows| m.warm.bytes < memcpy.warm.bytes) {
            yardstick = Some(memcpy);
        }
        rows.push(row);
    }
    let memcpy = yardstick.ok_or_else(|| Error::new(ErrorKind::Usage, "no context lengths were given"))?;
    Ok(HandoffBenchReport { machine: Machine::here(), memcpy, rows })
}

/// Rounds in which the machine's own limit is looked for.
const LIMIT_ROUNDS: usize = 5;

/// One capacity: its tensors, resolved.
struct Case {
    context: usize,
    live_rows: usize,
    sources: Vec<Buffer>,
    source: Resolved,
    targets: Vec<TensorInfo>,
    target: Resolved,
}

impl Case {
    fn new(bench: &HandoffBench, context: usize) -> Result<Case, Error> {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a share of a row count")]
        let live_rows = ((context as f64 * bench.live_fraction).round() as usize).clamp(1, context.max(1));
        let sizes = Sizes {
            capacity: context,
            dtype: DType::Float16,
            block_rows: 16,
            row_stride_bytes: bench.row_stride_bytes,
        };
        let infos = bench.source.tensors(&bench.cache, &sizes)?;
        let target_sizes = Sizes { dtype: bench.dtype, row_stride_bytes: None, ..sizes };
        let targets = bench.target.tensors(&bench.cache, &target_sizes)?;
        check_memory(context, live_rows, &infos, &targets)?;
        let live = LiveRows::made_for(&bench.source, &sizes, live_rows);
        let source = bench.source.resolve(&bench.cache, &infos, &live)?;
        let mut sources: Vec<Buffer> = infos.iter().map(|i| Buffer::zeroed(i.len_bytes)).collect();
        for (n, buffer) in sources.iter_mut().enumerate() {
            pattern(buffer, n);
        }
        let live = LiveRows::made_for(&bench.target, &target_sizes, live_rows);
        let target = bench.target.resolve(&bench.cache, &targets, &live)?;
        Ok(Case { context, live_rows, sources, source, targets, target })
    }

    fn measure(
        &mut self,
        bench: &HandoffBench,
        threads: &Threads,
    ) -> Result<(HandoffRow, MemcpyRows), Error> {
        let sources: Vec<&[u8]> = self.sources.iter().map(|b| &**b).collect();
        let first = plan(&self.source, &self.target, &bench.cache)?;
        let half = (first.bytes_read() + first.bytes_written()) / 2;
        let mut memcpy = Memcpy::new(half);
        let mut times = Times::default();
        let mut targets = allocate(&self.targets);
        for round in 0..=bench.repeats {
            let start = Instant::now();
            let plan = plan(&self.source, &self.target, &bench.cache)?;
            let planned = start.elapsed().as_secs_f64();
            let stats = copy(&plan, &sources, &mut targets, threads)?;
            let seconds = start.elapsed().as_secs_f64();
            let memcpy_seconds = memcpy.seconds(threads);
            // The first round touches the pages of both; what follows is warm.
            if round > 0 {
                times.plan.push(planned);
                times.seconds.push(seconds);
                times.copy.push(stats.seconds);
                times.memcpy.push(memcpy_seconds);
            }
        }
        self.check(bench, &targets)?;
        for _ in 0..bench.repeats {
            drop(std::mem::take(&mut targets));
            let start = Instant::now();
            targets = allocate(&self.targets);
            times.allocate.push(start.elapsed().as_secs_f64());
            times.cold_copy.push(copy(&first, &sources, &mut targets, threads)?.seconds);
            times.cold_memcpy.push(memcpy.cold_seconds(threads));
        }
        let row = |seconds: &[f64]| {
            let seconds = range(seconds);
            MemcpyRow { bytes: half, seconds, gigabytes_per_second: rate(2 * half, seconds.median) }
        };
        let yardstick = MemcpyRows { warm: row(&times.memcpy), cold: row(&times.cold_memcpy) };
        times.fastest = memcpy.fastest(threads, LIMIT_ROUNDS);
        Ok((self.row(bench, threads, &first, &times), yardstick))
    }

    fn row(
        &self,
        bench: &HandoffBench,
        threads: &Threads,
        plan: &kvbaton_plan::CopyPlan,
        times: &Times,
    ) -> HandoffRow {
        let bytes = plan.bytes_written();
        let moved = bytes + plan.bytes_read();
        let copy_seconds = range(&times.copy);
        let memcpy = range(&times.memcpy);
        let speed = rate(moved, copy_seconds.median);
        let limit = (times.fastest / 1e9).max(rate(moved, memcpy.min));
        let mut warnings = Vec::new();
        if copy_seconds.max > 1.5 * copy_seconds.min || memcpy.max > 1.5 * memcpy.min {
            warnings
                .push("the machine was noisy: the slowest run took over 1.5 times the fastest".to_owned());
        }
        let believable = speed <= 1.05 * limit;
        if !believable {
            warnings.push(format!(
                "{speed:.1} GB/s is above the {limit:.1} GB/s that this machine reads and writes: not reported"
            ));
        }
        HandoffRow {
            shape: bench.shape.clone(),
            source: bench.source.name.clone(),
            target: bench.target.name.clone(),
            dtype: bench.dtype.to_string(),
            context: self.context,
            live_rows: self.live_rows,
            bytes,
            operations: plan.operations(),
            threads: threads.count(),
            plan_seconds: range(&times.plan),
            seconds: range(&times.seconds),
            copy_seconds,
            gigabytes_per_second: believable.then_some(speed),
            memcpy_ratio: memcpy_share(bytes, memcpy.median, copy_seconds.median),
            allocate_seconds: range(&times.allocate),
            cold_copy_seconds: range(&times.cold_copy),
            cold_memcpy_ratio: memcpy_share(
                bytes,
                range(&times.cold_memcpy).median,
                range(&times.cold_copy).median,
            ),
            warnings,
        }
    }

    /// Compares elements of every target block with the source, address by address, by the definition of a
    /// block and without a plan.
    fn check(&self, bench: &HandoffBench, targets: &[Buffer]) -> Result<(), Error> {
        // Codes have no element that a source element could be compared with.
        for want in self.target.blocks.iter().filter(|b| b.encoding == Encoding::Plain) {
            let [heads, rows, lanes] = want.extents();
            for step in 0..64usize {
                let at = [step * 7 % heads, step * 31 % rows, step * 13 % lanes];
                let row = want.rows.start + i64::try_from(at[1]).unwrap_or(0);
                let Some((have, place)) =
                    self.locate(want, want.heads.start + at[0], row, want.lanes.start + at[2])
                else {
                    continue;
                };
                let got = read(&targets[want.tensor], address(want, at), want.dtype);
                let wanted = round(read(&self.sources[have.tensor], place, have.dtype), want.dtype);
                if got.to_bits() != wanted.to_bits() {
                    return Err(Error::new(
                        ErrorKind::Internal,
                        format!(
                            "{} to {}: layer {}, {}, row {row}: {got} was written for {wanted}",
                            bench.source.name, bench.target.name, want.layer, want.part
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    fn locate(&self, want: &Block, head: usize, row: i64, lane: usize) -> Option<(&Block, usize)> {
        let have = self.source.blocks.iter().find(|b| {
            (b.layer, b.part, b.encoding) == (want.layer, want.part, Encoding::Plain)
                && b.heads.contains(&head)
                && b.rows.contains(&row)
                && b.lanes.contains(&lane)
        })?;
        let down = usize::try_from(row - have.rows.start).ok()?;
        Some((have, address(have, [head - have.heads.start, down, lane - have.lanes.start])))
    }
}

#[derive(Default)]
struct Times {
    plan: Vec<f64>,
    seconds: Vec<f64>,
    copy: Vec<f64>,
    memcpy: Vec<f64>,
    allocate: Vec<f64>,
    cold_copy: Vec<f64>,
    cold_memcpy: Vec<f64>,
    /// Bytes a second that the machine reads and writes at most.
    fastest: f64,
}

fn range(seconds: &[f64]) -> Range {
    Range::of(seconds).unwrap_or(Range { min: 0.0, median: 0.0, max: 0.0 })
}

/// A cache that does not fit the memory that is left would end the process, or the machine.
fn check_memory(
    context: usize,
    live_rows: usize,
    sources: &[TensorInfo],
    targets: &[TensorInfo],
) -> Result<(), Error> {
    let bytes = |infos: &[TensorInfo]| infos.iter().map(|i| i.len_bytes as u128).sum::<u128>();
    let (source, target) = (bytes(sources), bytes(targets));
    // The memcpy that the copy is compared with has two buffers of its own, as large as what is copied.
    let copied = (source + target) * live_rows as u128 / context.max(1) as u128;
    let needed = source + target + copied;
    match kvbaton_exec::available_bytes() {
        Some(available) if needed > u128::from(available) => Err(Error::new(
            ErrorKind::Usage,
            format!(
                "a context of {context} rows needs {needed} bytes of memory: a source of {source}, a target of \
                 {target} and {copied} for memcpy; {available} are available"
            ),
        )
        .hint("name fewer rows with --context, or a smaller --shape")
        .field("needed_bytes", u64::try_from(needed).unwrap_or(u64::MAX))
        .field("available_bytes", available)),
        _ => Ok(()),
    }
}

fn allocate(infos: &[TensorInfo]) -> Vec<Buffer> {
    infos.iter().map(|i| Buffer::zeroed(i.len_bytes)).collect()
}

fn copy(
    plan: &kvbaton_plan::CopyPlan,
    sources: &[&[u8]],
    targets: &mut [Buffer],
    threads: &Threads,
) -> Result<kvbaton_copy::CopyStats, Error> {
    let mut targets: Vec<&mut [u8]> = targets.iter_mut().map(|b| &mut **b).collect();
    Ok(run(plan, sources, &mut targets, threads, CopyOptions::default())?)
}

/// Finite values that differ from element to element, as float16.
fn pattern(buffer: &mut [u8], tensor: usize) {
    let mut state = 0x9E37_79B9_u32.wrapping_mul(u32::try_from(tensor).unwrap_or(0) + 1);
    for pair in buffer.chunks_exact_mut(2) {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Exponents from 2⁻⁷ to 1: finite in every type.
        let bits = 0x2000 | ((state >> 16) as u16 & 0x9FFF);
        pair.copy_from_slice(&bits.to_le_bytes());
    }
}

fn address(block: &Block, at: [usize; 3]) -> usize {
    block.offset_bytes + at.iter().zip(block.strides_bytes).map(|(i, s)| i * s).sum::<usize>()
}

fn read(bytes: &[u8], at: usize, dtype: DType) -> f32 {
    let two = || u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    match dtype {
        DType::Float16 => half::f16::from_bits(two()).to_f32(),
        DType::BFloat16 => half::bf16::from_bits(two()).to_f32(),
        DType::Float32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
        _ => f32::from(bytes[at]),
    }
}

fn round(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Float16 => half::f16::from_f32(value).to_f32(),
        DType::BFloat16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    }
}
