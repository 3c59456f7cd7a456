//! Probes of a runtime: the same for Core ML and for the fake of it.

use std::path::Path;
use std::time::Instant;

use half::f16;
use kvbaton_layout::TensorInfo;
use kvbaton_memory::WritableBytes;
use kvbaton_runtime::{
    ArrayInfo, Call, Compiled, Element, LoadConfig, Memory, PlanSummary, Runtime, RuntimeError, Session,
    SurfaceLimits, Units, choose_memory,
};
use serde_json::{Map, Value, json};

use super::packages::{Miniature, Packages};
use super::{Found, Probes, Selftest, failed, found};
use crate::bench::resident_bytes;
use crate::{
    ChainPrefill, CpuDecode, CpuOptions, CpuPrefill, Decode, Logits, Prefill, Prefilled, RuntimeDecode,
    RuntimePrefill, Stated, Threads, chain_file,
};

/// The probes, in order.
pub(super) const NAMES: [&str; 14] = [
    "system and limits",
    "load and predict: all",
    "load and predict: cpu-and-ne",
    "load and predict: cpu-and-gpu",
    "load and predict: cpu",
    "surface sizes",
    "strides",
    "locked and input buffers",
    "state",
    "sides of states",
    "decode with states",
    "a chain of packages",
    "hand-offs in a row",
    "memory of large outputs",
];

/// Runs all of them on sessions that `session` makes.
pub(super) fn probe<R: Runtime>(
    group: &str,
    session: impl Fn() -> Session<R>,
    what: &Selftest,
    packages: &Packages,
    probes: &mut Probes<'_>,
) {
    let [system, all, ne, gpu, cpu, sizes, strides, locks, state, sides, decode, chain, rounds, large] =
        NAMES;
    let mut own = session();
    let mut limits = SurfaceLimits::GUARANTEED;
    probes.run(group, system, || {
        let (system, reported) = own.with_runtime(Call::Plan, |r| Ok((r.system(), r.surface_limits())))?;
        limits = reported;
        Ok(found! {"system": system, "surface": reported})
    });
    for (name, units) in
        [(all, Units::All), (ne, Units::CpuAndNe), (gpu, Units::CpuAndGpu), (cpu, Units::Cpu)]
    {
        probes.run(group, name, || load_and_predict(session(), units, what, packages));
    }
    probes.run(group, sizes, || surface_sizes(&mut own, limits));
    let double = packages.double.clone();
    probes.run(group, strides, || {
        let found = own.with_runtime(Call::Predict, move |r| row_strides(r, &double))?;
        if found.values().any(|v| v["correct"] == json!(false)) {
            return failed("an array read through its strides holds other values", found);
        }
        Ok(found)
    });
    let double = packages.double.clone();
    probes.run(group, locks, || {
        let found = own.with_runtime(Call::Predict, move |r| locked_and_input(r, &double))?;
        match found.values().any(|v| v.as_str().is_some_and(|v| v.contains("wrong values"))) {
            true => failed("a prediction reported success and left wrong values", found),
            false => Ok(found),
        }
    });
    let sum = packages.sum.clone();
    match own.with_runtime(Call::Plan, |r| Ok(r.system().has((15, 0)))) {
        Ok(false) => {
            for name in [state, sides, decode] {
                probes.not_run(group, name, "states need macOS 15");
            }
            probes.not_run(group, chain, "packages of several functions need macOS 15");
        }
        _ => {
            probes.run(group, state, || {
                let found = own.with_runtime(Call::Predict, move |r| states(r, &sum))?;
                match found.values().any(|v| *v == json!(false)) {
                    true => failed("a state does not hold what was written to it", found),
                    false => Ok(found),
                }
            });
            let package = packages.sides.clone();
            probes.run(group, sides, || {
                let found = own.with_runtime(Call::Predict, move |r| sides_of_states(r, &package))?;
                match found.values().any(|v| v["outcome"] == json!("wrong values")) {
                    true => failed("a prediction reported success and left wrong values", found),
                    false => Ok(found),
                }
            });
            probes.run(group, decode, || decode_with_states(&session, packages));
            probes.run(group, chain, || chain_of_packages(&session, what, packages));
        }
    }
    probes.run(group, rounds, || hand_offs_in_a_row(session(), what, packages));
    probes.run(group, large, || large_outputs(&mut own, limits));
}

/// Whether the package loads for these units, what would run where, and how far its outputs are from the executor's.
fn load_and_predict<R: Runtime>(
    session: Session<R>,
    units: Units,
    what: &Selftest,
    packages: &Packages,
) -> Found {
    let path = what.package.as_ref().unwrap_or(&packages.prefill);
    let stated = what.stated.clone();
    let session = if what.package.is_none() { packages.session(session) } else { session };
    let mut engine = RuntimePrefill::open(session, path, Some(units), stated.clone())?;
    let tokens = prompt(&engine);
    let start = Instant::now();
    engine.prepare(tokens.len())?;
    let load_seconds = start.elapsed().as_secs_f64();
    let done = engine.prefill(&tokens)?;
    let mut found = found! {
        "load_seconds": load_seconds, "prefill_seconds": done.report.seconds, "tokens": tokens.len(),
        "notes": done.report.notes,
        "plan": engine.loaded().values().next().and_then(|l| l.plan.clone()),
    };
    let mut executor = CpuPrefill::open_stated(path, what.threads, stated)?;
    found.append(&mut compared(&done, &executor.prefill(&tokens)?));
    judged(found)
}

/// How far what an engine left is from what the executor left.
fn compared(own: &Prefilled, expected: &Prefilled) -> Map<String, Value> {
    let rows = own.report.tokens;
    let (mut largest, mut dot, mut left_square, mut right_square) = (0f64, 0f64, 0f64, 0f64);
    for (left, right) in own.cache.tensors().iter().zip(expected.cache.tensors()) {
        if left.info.name != right.info.name || left.info.shape != right.info.shape {
            return found! {"unlike": format!("`{}` is not the executor's `{}`", left.info.name, right.info.name)};
        }
        for (a, b) in live(left, rows).zip(live(right, rows)) {
            let (a, b) = (f64::from(a), f64::from(b));
            largest = largest.max((a - b).abs());
            (dot, left_square, right_square) = (dot + a * b, left_square + a * a, right_square + b * b);
        }
    }
    let argmax = |l: &Option<Logits>| {
        l.as_ref().and_then(|l| l.values.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i))
    };
    found! {
        "cache_largest_difference": largest,
        "cache_cosine": dot / (left_square * right_square).sqrt().max(f64::MIN_POSITIVE),
        "same_next_token": argmax(&own.logits) == argmax(&expected.logits),
    }
}

/// Whether an engine's cache points where the executor's does, and leads to the same token.
fn judged(found: Map<String, Value>) -> Found {
    let close = found.get("cache_cosine").and_then(Value::as_f64).is_some_and(|cosine| cosine >= 0.999);
    if !close || found.get("same_next_token") != Some(&json!(true)) {
        return failed("the outputs are not the executor's", found);
    }
    Ok(found)
}

/// A prompt in chunks through both packages of a chain.
fn chain_of_packages<R: Runtime>(
    session: &impl Fn() -> Session<R>,
    what: &Selftest,
    packages: &Packages,
) -> Found {
    const TOKENS: u32 = 20;
    let file = chain_file(&packages.chain).unwrap_or_else(|| packages.chain.clone());
    let session = |_: &Path| packages.session(session());
    let mut engine = ChainPrefill::open_on(&file, session, None, Stated::default())?;
    let mut executor = ChainPrefill::open(&file, CpuOptions::with_threads(what.threads), Stated::default())?;
    let tokens: Vec<u32> = (0..TOKENS).map(|i| (i * 7919 + 13) % 48).collect();
    let done = engine.prefill(&tokens)?;
    let mut found = found! {
        "tokens": tokens.len(), "prefill_seconds": done.report.seconds, "notes": done.report.notes,
        "compute_units": done.report.compute_units,
    };
    found.append(&mut compared(&done, &executor.prefill(&tokens)?));
    judged(found)
}

/// The live rows of a cache tensor whose last two axes are rows and lanes, as float32.
fn live(tensor: &crate::Tensor, rows: usize) -> impl Iterator<Item = f32> {
    let TensorInfo { shape, strides_bytes, .. } = &tensor.info;
    let row_axis = shape.len().saturating_sub(2);
    (0..shape.iter().product::<usize>()).filter_map(move |mut index| {
        let mut at = 0;
        for axis in (0..shape.len()).rev() {
            let i = index % shape[axis];
            if axis == row_axis && i >= rows {
                return None;
            }
            at += i * strides_bytes[axis];
            index /= shape[axis];
        }
        let bytes = tensor.bytes.get(at..at + 2)?;
        Some(f16::from_le_bytes([bytes[0], bytes[1]]).to_f32())
    })
}

/// Ids that fill most of the shortest function.
fn prompt(engine: &dyn Prefill) -> Vec<u32> {
    let length = engine.functions().first().map_or(1, |f| f.tokens);
    let vocab = engine.model().map_or(1, |m| m.vocab_size).max(1);
    let count = (length * 3 / 4).max(1);
    (0..count).map(|i| u32::try_from((i * 7919 + 13) % vocab).unwrap_or(0)).collect()
}

/// Which surfaces the system makes: around the published limits, around its own, and with odd sides.
fn surface_sizes<R: Runtime>(session: &mut Session<R>, limits: SurfaceLimits) -> Found {
    let heights = [16_384, 16_385, 32_768, 46_080, limits.height, limits.height.saturating_add(1)];
    let widths = [100, 200, 270, limits.width, limits.width.saturating_add(1)];
    let shapes = heights.iter().map(|&h| [h, 64]).chain(widths.iter().map(|&w| [8, w]));
    let mut found = Map::new();
    for shape in shapes {
        // A system without a limit is not asked for surfaces of its size.
        if shape.iter().product::<usize>() > 1 << 28 {
            continue;
        }
        let made = session.with_runtime(Call::Backing, move |r| {
            let array = r.backing(Element::Float16, &shape, Memory::Surface)?;
            Ok(r.describe(&array)?.strides_bytes[0])
        });
        let outcome = match made {
            Ok(stride) => format!("made, rows {stride} bytes apart"),
            Err(error) => format!("refused: {error}"),
        };
        found.insert(format!("{} x {}", shape[0], shape[1]), json!(outcome));
    }
    Ok(found)
}

/// Loads a package of one function, on the CPU and whatever the system prefers. What it was loaded from stays at least as
/// long as the handle beside it.
fn open<R: Runtime>(r: &mut R, package: &Miniature) -> Result<(Compiled, R::Model), RuntimeError> {
    let compiled = package.compiled(r)?;
    let config = LoadConfig::for_system(Units::All, None, &r.system())?;
    let model = r.load(compiled.path(), &config)?;
    Ok((compiled, model))
}

/// The shapes of `double`'s arrays.
const SHAPES: [(&str, [usize; 2]); 3] = [("64", [4, 64]), ("100", [6, 100]), ("200", [5, 200])];

fn values(shape: [usize; 2], factor: f32) -> Vec<u8> {
    let count = shape[0] * shape[1];
    (0..count).flat_map(|i| f16::from_f32(factor * (i % 512) as f32).to_le_bytes()).collect()
}

fn inputs<R: Runtime>(r: &mut R) -> Result<Vec<(String, R::Array)>, RuntimeError> {
    let mut inputs = Vec::new();
    for (name, shape) in SHAPES {
        let info = ArrayInfo::packed(Element::Float16, &shape);
        inputs.push((format!("in_{name}"), r.input(&info, &values(shape, 1.0))?));
    }
    Ok(inputs)
}

fn backings<R: Runtime>(r: &mut R, memory: Memory) -> Result<Vec<(String, R::Array)>, RuntimeError> {
    SHAPES
        .iter()
        .map(|(name, shape)| Ok((format!("out_{name}"), r.backing(Element::Float16, shape, memory)?)))
        .collect()
}

/// How rows are padded: of surfaces, of heap memory, and of what a prediction returns into each.
fn row_strides<R: Runtime>(r: &mut R, double: &Miniature) -> Result<Map<String, Value>, RuntimeError> {
    let (_compiled, mut model) = open(r, double)?;
    let mut found = Map::new();
    for memory in [Memory::Surface, Memory::Heap] {
        let inputs = inputs(r)?;
        let proposed = backings(r, memory)?;
        let results = r.predict(&mut model, &inputs, &proposed, None)?;
        for ((name, shape), (label, backing)) in SHAPES.into_iter().zip(&proposed) {
            let Some((_, result)) = results.iter().find(|(n, _)| n == label) else {
                return Err(RuntimeError::MissingOutput { name: label.clone() });
            };
            let (offered, info) = (r.describe(backing)?, r.describe(result)?);
            let used = r.is_same(backing, result);
            let correct = info.gather(&r.lock(result, &info)?) == values(shape, 2.0);
            let memory = if memory == Memory::Surface { "surface" } else { "heap" };
            found.insert(
                format!("{memory}, rows of {name}"),
                json!({"offered_bytes": offered.strides_bytes[0], "result_bytes": info.strides_bytes[0],
                       "used": used, "correct": correct}),
            );
        }
    }
    Ok(found)
}

/// What the runtime does with a backing that is locked, and with one that it has read: sources disagree.
fn locked_and_input<R: Runtime>(r: &mut R, double: &Miniature) -> Result<Map<String, Value>, RuntimeError> {
    let (_compiled, mut model) = open(r, double)?;
    let mut found = Map::new();
    for memory in [Memory::Surface, Memory::Heap] {
        let label = if memory == Memory::Surface { "surface" } else { "heap" };
        let mut outcome = |what: &str, text: String| found.insert(format!("{label}, {what}"), json!(text));

        let proposed = backings(r, memory)?;
        outcome("fresh", attempt(r, &mut model, &proposed)?);
        outcome("used before", attempt(r, &mut model, &proposed)?);

        let info = r.describe(&proposed[0].1)?;
        let held = r.lock(&proposed[0].1, &info)?;
        outcome("locked", attempt(r, &mut model, &proposed)?);
        drop(held);
        outcome("unlocked again", attempt(r, &mut model, &proposed)?);

        // The same array as an input first, then as a backing.
        let mut feeds = inputs(r)?;
        feeds[0].1 = proposed[0].1.clone();
        let other = backings(r, memory)?;
        match r.predict(&mut model, &feeds, &other, None) {
            Err(error) => drop(outcome("as an input", format!("refused: {error}"))),
            Ok(_) => {
                outcome("as an input", "taken".to_owned());
                outcome("after it was an input", attempt(r, &mut model, &proposed)?);
            }
        }
    }
    Ok(found)
}

/// Predicts into `proposed` and says what became of the first of them.
fn attempt<R: Runtime>(
    r: &mut R,
    model: &mut R::Model,
    proposed: &[(String, R::Array)],
) -> Result<String, RuntimeError> {
    let inputs = inputs(r)?;
    let results = match r.predict(model, &inputs, proposed, None) {
        Ok(results) => results,
        Err(error) => return Ok(format!("refused: {error}")),
    };
    let (name, backing) = &proposed[0];
    let Some((_, result)) = results.iter().find(|(n, _)| n == name) else {
        return Err(RuntimeError::MissingOutput { name: name.clone() });
    };
    let place = if r.is_same(backing, result) { "written in place" } else { "written elsewhere" };
    let info = r.describe(result)?;
    let correct = info.gather(&r.lock(result, &info)?) == values(SHAPES[0].1, 2.0);
    Ok(format!("{place}{}", if correct { "" } else { ", wrong values" }))
}

/// Elements of the output that [`doubled_into`] has written.
pub(super) const WRITTEN: usize = SHAPES[0].1[0] * SHAPES[0].1[1];

/// Proposes `memory` as the backing of `double`'s first output, and says whether that is what came back. By the time that
/// this returns, the runtime has let go of the memory.
pub(super) fn doubled_into<R: Runtime>(
    r: &mut R,
    double: &Miniature,
    memory: WritableBytes,
) -> Result<bool, RuntimeError> {
    let (_compiled, mut model) = open(r, double)?;
    let mut proposed = backings(r, Memory::Heap)?;
    let shape = SHAPES[0].1;
    proposed[0].1 = r.backing_on(Element::Float16, &shape, memory)?;
    let mut inputs = inputs(r)?;
    let ones = f16::ONE.to_le_bytes().repeat(WRITTEN);
    inputs[0].1 = r.input(&ArrayInfo::packed(Element::Float16, &shape), &ones)?;
    let results = r.predict(&mut model, &inputs, &proposed, None)?;
    let (name, backing) = &proposed[0];
    let result = results.iter().find(|(n, _)| n == name);
    let (_, result) = result.ok_or_else(|| RuntimeError::MissingOutput { name: name.clone() })?;
    Ok(r.is_same(backing, result))
}

/// Whether a state starts at zero, adds up, shows what was written to it, and where it lies.
fn states<R: Runtime>(r: &mut R, sum: &Miniature) -> Result<Map<String, Value>, RuntimeError> {
    let (_compiled, mut model) = open(r, sum)?;
    let mut state = r.new_state(&mut model)?;
    let shape = SHAPES[0].1;
    let read = |r: &mut R, state: &mut R::State| {
        let (mut packed, mut row, mut at) = (Vec::new(), 0, 0);
        r.read_state(state, "total", &mut |info, bytes| {
            (packed, row, at) = (info.gather(bytes), info.strides_bytes[0], bytes.as_ptr() as usize);
        })?;
        Ok::<_, RuntimeError>((packed, row, at))
    };
    let (start, row, first) = read(r, &mut state)?;
    let feed = |r: &mut R| {
        let info = ArrayInfo::packed(Element::Float16, &shape);
        Ok::<_, RuntimeError>(vec![("in_64".to_owned(), r.input(&info, &values(shape, 1.0))?)])
    };
    for _ in 0..2 {
        let (inputs, out) = (feed(r)?, r.backing(Element::Float16, &shape, Memory::Heap)?);
        r.predict(&mut model, &inputs, &[("out_64".to_owned(), out)], Some(&mut state))?;
    }
    let (twice, _, second) = read(r, &mut state)?;
    r.write_state(&mut state, "total", &mut |info, bytes| info.scatter(&values(shape, 0.5), bytes))?;
    let (inputs, out) = (feed(r)?, r.backing(Element::Float16, &shape, Memory::Heap)?);
    r.predict(&mut model, &inputs, &[("out_64".to_owned(), out)], Some(&mut state))?;
    let (written, _, _) = read(r, &mut state)?;
    Ok(found! {
        "row_bytes": row, "starts_at_zero": start.iter().all(|b| *b == 0), "adds_up": twice == values(shape, 2.0),
        "takes_what_is_written": written == values(shape, 1.5),
        "address": if first == second { "stayed" } else { "moved" },
    })
}

/// What becomes of states whose rows are a power of two, a multiple of 32, and neither, where the Neural Engine may run
/// them; sources disagree on what it takes.
fn sides_of_states<R: Runtime>(r: &mut R, package: &Miniature) -> Result<Map<String, Value>, RuntimeError> {
    let compiled = package.compiled(r)?;
    let mut found = Map::new();
    for side in [64, 96, 100] {
        let config = LoadConfig::for_system(Units::CpuAndNe, Some(&format!("rows_of_{side}")), &r.system())?;
        let outcome = sums_twice(r, compiled.path(), &config, [4, side]);
        let share = r.plan(compiled.path(), &config).ok().map(|plan| PlanSummary::of(&plan).share("ne"));
        let outcome = match outcome {
            Ok(true) => "works".to_owned(),
            Ok(false) => "wrong values".to_owned(),
            Err(error) => format!("refused: {error}"),
        };
        found.insert(format!("rows of {side}"), json!({"outcome": outcome, "share_on_neural_engine": share}));
    }
    Ok(found)
}

/// Adds an array of `shape` to a fresh state twice, and says whether the state then holds the sum.
fn sums_twice<R: Runtime>(
    r: &mut R,
    compiled: &Path,
    config: &LoadConfig,
    shape: [usize; 2],
) -> Result<bool, RuntimeError> {
    let mut model = r.load(compiled, config)?;
    let mut state = r.new_state(&mut model)?;
    for _ in 0..2 {
        let input = r.input(&ArrayInfo::packed(Element::Float16, &shape), &values(shape, 1.0))?;
        let out = r.backing(Element::Float16, &shape, Memory::Heap)?;
        r.predict(&mut model, &[("in".to_owned(), input)], &[("out".to_owned(), out)], Some(&mut state))?;
    }
    let mut held = Vec::new();
    r.read_state(&mut state, "total", &mut |info, bytes| held = info.gather(bytes))?;
    Ok(held == values(shape, 2.0))
}

/// Both legs on the runtime: a prefill's cache goes into states, and the tokens after it are the executor's.
fn decode_with_states<R: Runtime>(session: &impl Fn() -> Session<R>, packages: &Packages) -> Found {
    const STEPS: usize = 12;
    let session = || packages.session(session());
    let mut prefill = RuntimePrefill::open(session(), &packages.prefill, None, Stated::default())?;
    let mut engine = RuntimeDecode::open(session(), &packages.decode, None)?;
    let mut executor = CpuDecode::open(&packages.decode, &CpuOptions::with_threads(1))?;
    let (tokens, threads) = (prompt(&prefill), Threads::new(1));
    let cache = prefill.prefill(&tokens)?.cache;
    let report = engine.receive(&cache, &threads)?;
    executor.receive(&cache, &threads)?;
    drop(cache);
    let (mut token, mut same, mut largest) = (1, 0usize, 0f32);
    let start = Instant::now();
    for _ in 0..STEPS {
        let (own, expected) = (engine.step(token)?, executor.step(token)?);
        let differences = own.values.iter().zip(&expected.values).map(|(a, b)| (a - b).abs());
        largest = differences.fold(largest, f32::max);
        let best = |l: &Logits| l.values.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(i, _)| i);
        same += usize::from(best(&own) == best(&expected));
        // The executor's token goes into both: one that differs would make all that follow differ.
        token = best(&expected).and_then(|id| u32::try_from(id).ok()).unwrap_or(0);
    }
    let seconds = start.elapsed().as_secs_f64();
    let found = found! {
        "compute_units": engine.compute_units().map(Units::name), "notes": engine.notes(),
        "rows": report.rows, "bytes": report.bytes, "steps": STEPS, "same_tokens": same,
        "logits_largest_difference": largest, "seconds": seconds, "buffers": prefill.counts(),
    };
    if same < STEPS {
        return failed("the tokens after the hand-off are not the executor's", found);
    }
    Ok(found)
}

/// Prefill after prefill, each cache read and dropped: buffers, memory and values stay as they were.
fn hand_offs_in_a_row<R: Runtime>(session: Session<R>, what: &Selftest, packages: &Packages) -> Found {
    let session = packages.session(session);
    let mut engine = RuntimePrefill::open(session, &packages.prefill, None, Stated::default())?;
    let tokens = prompt(&engine);
    let first = engine.prefill(&tokens)?;
    let expected: Vec<f32> = first.cache.tensors().iter().flat_map(|t| live(t, tokens.len())).collect();
    drop(first);
    let before = (engine.counts(), resident_bytes());
    let mut different = 0usize;
    for _ in 0..what.rounds {
        let cache = engine.prefill(&tokens)?.cache;
        let now = cache.tensors().iter().flat_map(|t| live(t, tokens.len()));
        different += usize::from(!now.eq(expected.iter().copied()));
    }
    let after = (engine.counts(), resident_bytes());
    let grown = match (before.1, after.1) {
        (Some(before), Some(after)) => Some(after.saturating_sub(before)),
        _ => None,
    };
    let found = found! {
        "rounds": what.rounds, "buffers_before": before.0, "buffers_after": after.0,
        "resident_bytes_grown": grown, "rounds_with_other_values": different,
    };
    if before.0 != after.0 {
        return failed("buffers were left behind", found);
    }
    if different > 0 {
        return failed("equal prompts left different caches", found);
    }
    // A kilobyte a round is noise; a buffer a round is not.
    if grown.is_some_and(|g| g > (64 << 20)) {
        return failed("resident memory grew", found);
    }
    Ok(found)
}

/// Which memory the outputs of real models get: keys of SmolLM2-135M and Qwen3-0.6B at 512 tokens.
fn large_outputs<R: Runtime>(session: &mut Session<R>, limits: SurfaceLimits) -> Found {
    let mut found = Map::new();
    for (name, shape) in [
        ("smollm2-135m, stacked", [30, 3, 512, 64]),
        ("smollm2-135m, ten layers", [10, 3, 512, 64]),
        ("qwen3-0.6b, stacked", [28, 8, 512, 128]),
        ("qwen3-0.6b, a layer", [1, 8, 512, 128]),
    ] {
        let choice = choose_memory(Element::Float16, &shape, limits);
        let memory = choice.memory;
        let made = session
            .with_runtime(Call::Backing, move |r| r.backing(Element::Float16, &shape, memory).map(|_| ()));
        let kind = if memory == Memory::Surface { "surface" } else { "heap" };
        let outcome = match (made, choice.because) {
            (Ok(()), None) => kind.to_owned(),
            (Ok(()), Some(because)) => format!("{kind}: {because}"),
            (Err(error), _) => format!("{kind}, refused: {error}"),
        };
        found.insert(name.to_owned(), json!(outcome));
    }
    Ok(found)
}
