//! Every ordered pair of presets, over random geometry: what arrives is what was there.
//!
//! Sources are filled, and targets read, by the words of the layout (`oracle`), never by the code that plans. Every
//! byte of the source that holds no row is 0xFF, a NaN in every float type; every byte of the target that should not
//! be written must stay as it was.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod oracle;
mod random;
mod scalar;
mod side;

use std::sync::LazyLock;

use kvbaton_copy::{CopyOptions, Threads, run};
use kvbaton_layout::{CacheSpec, DType, Encoding, LayerSpec, Layout, Part, Window, presets};
use kvbaton_plan::{PlanError, plan};

use random::Random;
use side::Side;

const FLOATS: [DType; 3] = [DType::Float16, DType::BFloat16, DType::Float32];
const UNTOUCHED: u8 = 0xA5;

static THREADS: LazyLock<[Threads; 2]> = LazyLock::new(|| [Threads::new(1), Threads::new(2)]);

/// Models of six kinds; `lanes` is the head_dim, or a choice of them.
fn model(random: &mut Random, kind: usize, lanes: &[usize]) -> CacheSpec {
    let kv_heads = random.within(1, 3);
    let dim = random.pick(lanes);
    let full = LayerSpec::Full { kv_heads, key_dim: dim, value_dim: dim };
    let keep = if kind == 4 { random.within(1, 2) } else { 0 };
    let window = Window { size: random.within(keep + 2, 8), keep };
    let sliding = LayerSpec::Sliding { kv_heads, key_dim: dim, value_dim: dim, window };
    let recurrent = LayerSpec::Recurrent {
        conv_steps: random.within(2, 3),
        conv_channels: random.within(1, 6),
        heads: random.within(1, 3),
        value_dim: random.within(1, 5),
        key_dim: random.within(1, 5),
    };
    let layers = match kind {
        0 => vec![full; random.within(1, 4)],
        1 | 4 => vec![sliding, full, sliding],
        2 => vec![recurrent, full, recurrent, full],
        5 => vec![recurrent; random.within(1, 4)],
        _ => vec![full, LayerSpec::Shared { with: 0 }, full, LayerSpec::Shared { with: 2 }],
    };
    CacheSpec { layers }
}

/// Hands random rows over from `source` to `target`; `None` where one of them cannot hold such a model.
fn hand_over(source: &Layout, target: &Layout, kind: usize, seed: u64) -> Option<()> {
    let random = &mut Random::new(seed);
    let coded =
        source.tensors.iter().chain(&target.tensors).any(|r| matches!(r.encoding, Encoding::Affine { .. }));
    let cache = model(random, kind, if coded { &[64, 128] } else { &[1, 3, 4, 8] });
    let n = random.within(1, 14);
    // A hand-off often leaves the last token to the decoder.
    let wanted = if matches!(kind, 2 | 5) { n } else { n - random.within(0, 1) };
    let (from, to) = (random.pick(&FLOATS), random.pick(&FLOATS));
    let source = Side::random(random, source, &cache, n, from)?;
    let target = Side::random(random, target, &cache, wanted, to)?;

    let mut sources = source.buffers(0xFF);
    let (content, stored) = source.fill(random, &cache, &mut sources);
    let plan = match plan(&source.resolved(&cache), &target.resolved(&cache), &cache) {
        Err(PlanError::NoSource { .. }) if source.layout.partial => return None,
        other => other.unwrap_or_else(|e| panic!("{e}")),
    };
    let mut targets = target.buffers(UNTOUCHED);
    let threads = &THREADS[random.within(0, 1)];
    let read: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
    let mut written: Vec<&mut [u8]> = targets.iter_mut().map(Vec::as_mut_slice).collect();
    run(&plan, &read, &mut written, threads, CopyOptions::default()).unwrap();

    let encodings = |layout: &Layout, part: Part, sliding: bool| {
        layout
            .tensors
            .iter()
            .find(|r| {
                r.parts().contains(&part)
                    && match r.layers {
                        kvbaton_layout::LayerSet::Full => !sliding,
                        kvbaton_layout::LayerSet::Sliding => sliding,
                        _ => true,
                    }
            })
            .map(|r| r.encoding)
    };
    let mut expected = target.buffers(UNTOUCHED);
    target.expect(&cache, &content, &mut expected, |key, encoding| {
        let sliding = cache.layers[key.0].window().is_some();
        let same = encodings(&source.layout, key.1, sliding) == Some(encoding);
        same.then(|| &stored[&key])
    });
    for (info, (have, want)) in target.infos.iter().zip(targets.iter().zip(&expected)) {
        if let Some(at) = (0..have.len()).find(|&i| have[i] != want[i]) {
            panic!(
                "tensor `{}` byte {at}: {} instead of {}\n{}",
                info.name,
                have[at],
                want[at],
                plan.explain()
            );
        }
    }
    canonical(&target, &targets, &cache, &content);
    Some(())
}

/// The target's rows in canonical order are the source's, as the target's type holds them.
fn canonical(target: &Side, buffers: &[Vec<u8>], cache: &CacheSpec, content: &side::Content) {
    let resolved = target.resolved(cache);
    let read: Vec<&[u8]> = buffers.iter().map(Vec::as_slice).collect();
    for layer in 0..cache.layers.len() {
        for part in [Part::Key, Part::Value, Part::Conv, Part::State] {
            let Some((packed, info)) = resolved.canonical(layer, part, DType::Float32) else { continue };
            let block = &packed.blocks[0];
            let coded = resolved.part(layer, part).any(|b| b.encoding != Encoding::Plain);
            let dtype = resolved.part(layer, part).next().expect("a canonical part has blocks").dtype;
            if coded {
                continue; // Compared code by code above.
            }
            let mut bytes = vec![0; info.len_bytes];
            let plan = plan(&resolved, &packed, cache).unwrap();
            run(&plan, &read, &mut [&mut bytes], &THREADS[0], CopyOptions::default()).unwrap();
            let mut values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            for head in block.heads.clone() {
                for row in packed.blocks.iter().flat_map(|b| b.rows.clone()) {
                    for lane in block.lanes.clone() {
                        let have = values.next().expect("the packed tensor holds all rows");
                        let Some(want) = content.get(&(layer, part, head, row)) else { continue };
                        assert_eq!(
                            have.to_bits(),
                            scalar::round(want[lane], dtype).to_bits(),
                            "layer {layer}, {part}, head {head}, row {row}, lane {lane}"
                        );
                    }
                }
            }
        }
    }
}

/// How often each pair is tried with each kind of model; `KVBATON_ROUNDS` changes it.
fn rounds() -> u64 {
    std::env::var("KVBATON_ROUNDS").ok().and_then(|r| r.parse().ok()).unwrap_or(1)
}

/// Tries all pairs of `layouts` and counts, for each layout, how often it was a source and a target.
#[expect(clippy::print_stderr, reason = "names the case that failed")]
fn all_pairs(layouts: &[Layout], kinds: &[usize]) -> Vec<(usize, usize)> {
    let mut held = vec![(0, 0); layouts.len()];
    for (i, source) in layouts.iter().enumerate() {
        for (j, target) in layouts.iter().enumerate() {
            for &kind in kinds {
                for round in 0..rounds() {
                    let seed = ((round * 8 + kind as u64) << 32) | (i as u64) << 16 | j as u64;
                    let case = std::panic::catch_unwind(|| hand_over(source, target, kind, seed));
                    let case = case.unwrap_or_else(|panic| {
                        eprintln!("{} -> {}, kind {kind}, seed {seed:#x}", source.name, target.name);
                        std::panic::resume_unwind(panic)
                    });
                    if case.is_some() {
                        held[i].0 += 1;
                        held[j].1 += 1;
                    }
                }
            }
        }
    }
    held
}

#[test]
fn every_pair_of_presets_hands_over_what_was_there() {
    let layouts: Vec<Layout> = presets::names().map(|n| presets::get(n).unwrap()).collect();
    let held = all_pairs(&layouts, &[0, 1, 2, 3, 5]);
    let holds = |layout: &Layout, part| layout.tensors.iter().any(|rule| rule.parts().contains(&part));
    for (layout, (as_source, as_target)) in layouts.iter().zip(held) {
        // Every other layout that holds the whole of such a model meets it both ways.
        let part = if holds(layout, Part::Key) { Part::Key } else { Part::State };
        let partners = layouts.iter().filter(|other| !other.partial && holds(other, part)).count();
        if !layout.partial {
            assert!(partners > 1, "{}: nothing else holds a {part}", layout.name);
            assert!(as_source >= partners, "{}: a source {as_source} times", layout.name);
            assert!(as_target >= partners, "{}: a target {as_target} times", layout.name);
        }
    }
}

/// Attention sinks: rows at the start of the context that stay in a window.
#[test]
fn rows_that_stay_in_a_window_arrive_with_the_newest() {
    let names =
        ["mlx-lm", "mlx-swift-lm", "kvbaton-per-layer", "coreml-llm-litert", "vllm-hnd", "mlx-lm-batch"];
    let layouts = names.map(|n| presets::get(n).unwrap());
    let every = names.len() * rounds() as usize;
    let held = all_pairs(&layouts, &[4]);
    assert!(held.iter().all(|held| *held == (every, every)), "{held:?}");
}

fn coded_layout(
    name: &str,
    encoding: &str,
    companions: &[(&str, &str)],
    axes: &str,
    row_axes: &str,
) -> Layout {
    let mut text = format!("name = \"{name}\"\n");
    let mut rule = |suffix: &str, role: &str, axes: &str| {
        text += &format!(
            "[[tensor]]\nname = \"{{k|v}}{suffix}_{{layer}}\"\nholds = \"key-and-value\"\naxes = \"{axes}\"\n\
             encoding = {encoding}\n{role}\n"
        );
    };
    rule("", "", axes);
    for (suffix, role) in companions {
        rule(suffix, &format!("role = \"{role}\""), row_axes);
    }
    Layout::from_toml(&text).unwrap()
}

#[test]
fn every_encoding_is_written_as_its_definition_says() {
    let mut layouts = vec![presets::get("mlx-lm").unwrap(), presets::get("coreai-ios").unwrap()];
    let both = [("s", "scale"), ("b", "bias")];
    for bits in [2, 3, 4, 5, 6, 8] {
        for group in [32, 64] {
            let encoding = format!("{{ bits = {bits}, group_size = {group} }}");
            let name = format!("affine-{bits}-{group}");
            layouts.push(coded_layout(
                &name,
                &encoding,
                &both,
                "kv_head row head_dim",
                "kv_head row head_dim",
            ));
        }
    }
    let scale = [("s", "scale")];
    for (name, axes) in [("per-head", "kv_head row head_dim"), ("per-head-first", "row kv_head head_dim")] {
        layouts.push(coded_layout(name, "\"int8-per-token-head\"", &scale, axes, "kv_head row"));
    }
    layouts.push(coded_layout("per-token", "\"int8-per-token\"", &scale, "kv_head row head_dim", "row"));
    let held = all_pairs(&layouts, &[0, 1, 2, 3]);
    assert!(held.iter().all(|(s, t)| *s >= layouts.len() - 1 && *t >= layouts.len() - 1), "{held:?}");
}
