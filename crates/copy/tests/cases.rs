//! Failures that hand-offs have had elsewhere, and what a run refuses.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use half::{bf16, f16};
use kvbaton_copy::{CopyError, CopyOptions, CopyStats, OnOverflow, Threads, run};
use kvbaton_layout::{
    CacheSpec, DType, LayerSpec, Layout, LiveRows, Part, Resolved, Sizes, TensorInfo, Window, presets,
};
use kvbaton_plan::{CopyPlan, plan};

const F16: DType = DType::Float16;

fn named(name: &str) -> Layout {
    presets::get(name).unwrap()
}

fn infos(layout: &Layout, cache: &CacheSpec, capacity: usize, dtype: DType) -> Vec<TensorInfo> {
    layout.tensors(cache, &Sizes { capacity, dtype, block_rows: 16, row_stride_bytes: None }).unwrap()
}

fn bits(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn halves(bytes: &[u8]) -> Vec<u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
}

fn copy(plan: &CopyPlan, sources: &[Vec<u8>], targets: &mut [Vec<u8>]) -> Result<CopyStats, CopyError> {
    copy_with(plan, sources, targets, OnOverflow::Error)
}

fn copy_with(
    plan: &CopyPlan,
    sources: &[Vec<u8>],
    targets: &mut [Vec<u8>],
    on_overflow: OnOverflow,
) -> Result<CopyStats, CopyError> {
    let sources: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
    let mut targets: Vec<&mut [u8]> = targets.iter_mut().map(Vec::as_mut_slice).collect();
    run(plan, &sources, &mut targets, &Threads::new(1), CopyOptions { on_overflow })
}

/// Keys and values of one layer, `(1, H, S, D)` here and `[S, H, D]` there.
fn pair(cache: &CacheSpec, capacity: usize, n: usize) -> (Resolved, Resolved) {
    let side = |name| {
        let layout = named(name);
        layout.resolve(cache, &infos(&layout, cache, capacity, F16), &LiveRows::seen(n)).unwrap()
    };
    (side("mlx-lm"), side("exo"))
}

/// vllm #52617, TensorRT-LLM #6507: rows written tokens first and read heads first.
#[test]
fn d22_tokens_first_and_heads_first_are_told_apart() {
    let cache = CacheSpec::full(1, 2, 4);
    let (heads_first, tokens_first) = pair(&cache, 3, 3);
    let hnd: Vec<u16> = (0..24).collect();
    let nhd = [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 16, 17, 18, 19, 8, 9, 10, 11, 20, 21, 22, 23];
    let there = plan(&heads_first, &tokens_first, &cache).unwrap();
    let mut targets = vec![vec![0; 48]; 2];
    copy(&there, &[bits(&hnd), bits(&hnd)], &mut targets).unwrap();
    assert_eq!(halves(&targets[0]), nhd);
    let back = plan(&tokens_first, &heads_first, &cache).unwrap();
    copy(&back, &[bits(&nhd), bits(&nhd)], &mut targets).unwrap();
    assert_eq!(halves(&targets[1]), hnd);
}

/// coremltools #1893: 13 columns stored with a stride of 32, read as if packed.
#[test]
fn d23_padded_rows_keep_their_padding_to_themselves() {
    let cache = CacheSpec::full(1, 1, 13);
    let layout = named("aneforge");
    let nan = f16::NAN.to_bits();
    let mut padded = infos(&layout, &cache, 5, F16);
    for info in &mut padded {
        info.strides_bytes = vec![5 * 64, 64, 2];
        info.len_bytes = 5 * 64;
    }
    let rows: Vec<u16> =
        (0..160).map(|i| if i % 32 < 13 { f16::from_f32(i as f32).to_bits() } else { nan }).collect();
    let source = layout.resolve(&cache, &padded, &LiveRows::seen(5)).unwrap();
    let target = layout.resolve(&cache, &infos(&layout, &cache, 5, F16), &LiveRows::seen(5)).unwrap();
    let plan = plan(&source, &target, &cache).unwrap();
    let mut targets = vec![vec![0; 5 * 13 * 2]; 2];
    copy(&plan, &[bits(&rows), bits(&rows)], &mut targets).unwrap();
    let want: Vec<u16> = (0..65).map(|i| f16::from_f32((i / 13 * 32 + i % 13) as f32).to_bits()).collect();
    assert_eq!(halves(&targets[0]), want);
    assert_eq!(halves(&targets[1]), want);
}

/// mlx-examples #977: of a buffer of 256 rows, 3 are live.
#[test]
fn d01_rows_after_the_live_ones_are_never_data() {
    let cache = CacheSpec::full(1, 2, 4);
    let layout = named("mlx-lm");
    let source = layout.resolve(&cache, &infos(&layout, &cache, 256, F16), &LiveRows::seen(3)).unwrap();
    let target = layout.resolve(&cache, &infos(&layout, &cache, 4, F16), &LiveRows::seen(3)).unwrap();
    let plan = plan(&source, &target, &cache).unwrap();
    let rows =
        bits(&(0..2 * 256 * 4).map(|i| if i / 4 % 256 < 3 { 7 } else { u16::MAX }).collect::<Vec<_>>());
    let mut targets = vec![bits(&[5; 2 * 4 * 4]); 2];
    let stats = copy(&plan, &[rows.clone(), rows], &mut targets).unwrap();
    assert_eq!(stats.bytes_written, 2 * 2 * 3 * 4 * 2);
    let want: Vec<u16> = (0..32).map(|i| if i / 4 % 4 < 3 { 7 } else { 5 }).collect();
    assert_eq!(halves(&targets[0]), want);
}

/// mlx-vlm PR #1748: a ring whose oldest row is in slot 4, unrolled.
#[test]
fn d09_a_ring_arrives_in_the_order_of_time() {
    let window = Window { size: 8, keep: 0 };
    let spec = LayerSpec::Sliding { kv_heads: 1, key_dim: 1, value_dim: 1, window };
    let cache = CacheSpec { layers: vec![spec] };
    let layout = named("mlx-lm");
    let tensors = infos(&layout, &cache, 8, F16);
    let live = LiveRows { ring_start: Some(4), ..LiveRows::seen(20) };
    let source = layout.resolve(&cache, &tensors, &live).unwrap();
    let (target, info) = source.canonical(0, Part::Key, F16).unwrap();
    assert_eq!(target.blocks[0].rows, 12..20);
    let ring = bits(&[16, 17, 18, 19, 12, 13, 14, 15]);
    let mut targets = vec![vec![0; info.len_bytes]];
    let plan = plan(&source, &target, &cache).unwrap();
    copy(&plan, &[ring.clone(), ring], &mut targets).unwrap();
    assert_eq!(halves(&targets[0]), [12, 13, 14, 15, 16, 17, 18, 19]);
}

/// kvpress #250, #268: what fp16 cannot hold became infinite, and nobody was told.
#[test]
fn d19_values_that_do_not_fit_are_an_error_with_their_place() {
    let cache = CacheSpec::full(2, 2, 4);
    let layout = named("mlx-lm");
    let wide =
        layout.resolve(&cache, &infos(&layout, &cache, 4, DType::BFloat16), &LiveRows::seen(3)).unwrap();
    let narrow = layout.resolve(&cache, &infos(&layout, &cache, 4, F16), &LiveRows::seen(3)).unwrap();
    let plan = plan(&wide, &narrow, &cache).unwrap();
    let one = bf16::from_f32(1.0).to_bits();
    let mut sources = vec![bits(&[one; 32]); 4];
    // Layer 1's values: head 1, row 2, lane 3; and one more after the live rows, which does not count.
    let large = bf16::from_f32(70_000.0).to_le_bytes();
    for at in [(4 + 2) * 4 + 3, 31] {
        sources[3][2 * at..2 * at + 2].copy_from_slice(&large);
    }
    let mut targets = vec![vec![0; 64]; 4];
    let error = copy(&plan, &sources, &mut targets).unwrap_err();
    assert_eq!(
        error.to_string(),
        "1 values do not fit float16, the first in the values of layer 1, head 1, row 2, lane 3"
    );
    let stats = copy_with(&plan, &sources, &mut targets, OnOverflow::Clamp).unwrap();
    assert_eq!((stats.overflow, halves(&targets[3])[27]), (1, f16::MAX.to_bits()));
    let stats = copy_with(&plan, &sources, &mut targets, OnOverflow::Count).unwrap();
    assert_eq!((stats.overflow, halves(&targets[3])[27]), (1, f16::INFINITY.to_bits()));
}

/// mlx-vlm #1310: attention over a quantised cache still finds its needle.
#[test]
fn d15_attention_over_codes_finds_the_needle() {
    let (n, d) = (48_usize, 64_usize);
    let cache = CacheSpec::full(1, 1, d);
    let plain = named("mlx-lm");
    let resolve = |layout: &Layout| {
        layout.resolve(&cache, &infos(layout, &cache, n, DType::Float32), &LiveRows::seen(n)).unwrap()
    };
    let quantised = named("mlx-lm-8bit");
    let codes = resolve(&quantised);
    let value = |i: usize| ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * 0.5;
    let mut keys: Vec<f32> = (0..n * d).map(value).collect();
    let query: Vec<f32> = (0..d).map(|i| value(i * 31 + 5) * 4.0).collect();
    keys[17 * d..18 * d].iter_mut().zip(&query).for_each(|(k, q)| *k = *q);
    let values: Vec<f32> = (0..n * d).map(|i| value(i * 3 + 1)).collect();
    let raw = |v: &[f32]| v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let mut coded: Vec<Vec<u8>> =
        infos(&quantised, &cache, n, DType::Float32).iter().map(|t| vec![0; t.len_bytes]).collect();
    copy(&plan(&resolve(&plain), &codes, &cache).unwrap(), &[raw(&keys), raw(&values)], &mut coded).unwrap();
    let mut back = vec![vec![0; n * d * 4]; 2];
    copy(&plan(&codes, &resolve(&plain), &cache).unwrap(), &coded, &mut back).unwrap();
    let floats = |b: &[u8]| {
        b.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect::<Vec<f32>>()
    };
    let attend = |keys: &[f32], values: &[f32]| {
        let scores: Vec<f32> =
            keys.chunks(d).map(|k| k.iter().zip(&query).map(|(a, b)| a * b).sum::<f32>() / 8.0).collect();
        let top = scores.iter().copied().fold(f32::MIN, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
        let out: Vec<f32> = (0..d)
            .map(|l| weights.iter().zip(values.chunks(d)).map(|(w, v)| w * v[l]).sum::<f32>())
            .collect();
        let needle = (0..n).max_by(|&a, &b| weights[a].total_cmp(&weights[b])).unwrap();
        (out, needle)
    };
    let (want, needle) = attend(&keys, &values);
    let (have, found) = attend(&floats(&back[0]), &floats(&back[1]));
    assert_eq!((needle, found), (17, 17));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let cosine = dot(&want, &have) / (dot(&want, &want) * dot(&have, &have)).sqrt();
    assert!(cosine > 0.99, "cosine {cosine}");
}

/// llama.cpp #5648: bytes of quantised rows are counted by groups, not by elements.
#[test]
fn d17_bytes_of_codes_are_counted_by_groups() {
    let cache = CacheSpec::full(1, 2, 64);
    let layout = named("mlx-lm-4bit");
    let tensors = infos(&layout, &cache, 10, F16);
    // Keys: 4 bits for each of 64 lanes, a scale and a bias of two bytes for each group.
    let bytes: Vec<usize> = tensors.iter().map(|t| t.len_bytes).collect();
    assert_eq!(bytes, [640, 640, 40, 40, 40, 40]);
    let resolved = layout.resolve(&cache, &tensors, &LiveRows::seen(7)).unwrap();
    let plan = plan(&resolved, &resolved, &cache).unwrap();
    assert_eq!(plan.bytes_read(), 2 * 2 * 7 * (32 + 2 + 2));
    let odd = CacheSpec::full(1, 2, 80);
    let sizes = Sizes { capacity: 10, dtype: F16, block_rows: 16, row_stride_bytes: None };
    assert!(layout.tensors(&odd, &sizes).is_err());
    // A buffer one byte short of its codes.
    let mut short = tensors;
    short[0].len_bytes -= 1;
    let error = layout.resolve(&cache, &short, &LiveRows::seen(7)).unwrap_err().to_string();
    assert!(error.contains("reaches byte 640, its buffer holds 639"), "{error}");
}

/// mlx-lm #1573 and D13: full layers become codes, windows stay, in one hand-off.
#[test]
fn d13_a_hand_off_quantises_full_layers_alone() {
    let window = Window { size: 8, keep: 0 };
    let layers = (0..12)
        .map(|l| match l % 6 {
            5 => LayerSpec::Full { kv_heads: 1, key_dim: 64, value_dim: 64 },
            _ => LayerSpec::Sliding { kv_heads: 1, key_dim: 64, value_dim: 64, window },
        })
        .collect();
    let cache = CacheSpec { layers };
    let resolve = |name| {
        let layout = named(name);
        layout.resolve(&cache, &infos(&layout, &cache, 32, F16), &LiveRows::seen(20)).unwrap()
    };
    let plan = plan(&resolve("kvbaton-per-layer"), &resolve("mlx-lm-8bit"), &cache).unwrap();
    let coded: Vec<usize> = plan.coded().iter().map(|op| op.layer).collect();
    assert_eq!(coded, [5, 5, 11, 11]);
    assert!(plan.ops().iter().all(|op| op.layer % 6 != 5 && op.src.dtype == op.dst.dtype));
}

#[test]
fn values_that_are_not_finite_are_counted_before_they_are_coded() {
    let cache = CacheSpec::full(1, 2, 64);
    let plain = named("mlx-lm");
    for (target, dtype) in [("mlx-lm-8bit", F16), ("mlx-lm-8bit", DType::Float32), ("forge-v8", F16)] {
        let layout = named(target);
        let source = plain.resolve(&cache, &infos(&plain, &cache, 4, F16), &LiveRows::seen(3)).unwrap();
        let tensors = infos(&layout, &cache, 4, dtype);
        let live = LiveRows { pad: Some(0), ..LiveRows::seen(3) };
        let resolved = layout.resolve(&cache, &tensors, &live).unwrap();
        let mut rows = vec![f16::ONE.to_bits(); 2 * 4 * 64];
        rows[(4 + 2) * 64 + 9] = f16::NAN.to_bits();
        rows[(4 + 2) * 64 + 10] = f16::INFINITY.to_bits();
        let clean = bits(&[0; 2 * 4 * 64]);
        let mut targets: Vec<Vec<u8>> = tensors.iter().map(|t| vec![0; t.len_bytes]).collect();
        let plan = plan(&source, &resolved, &cache).unwrap();
        let stats = copy(&plan, &[clean, bits(&rows)], &mut targets).unwrap();
        assert_eq!((stats.nan, stats.infinity), (1, 1), "{target} {dtype}");
        let place = stats.first.expect("the first is kept");
        assert_eq!(
            (place.tensor, place.head, place.row, place.lane),
            (Part::Value, 1, 2, 9),
            "{target} {dtype}"
        );
    }
}

#[test]
fn buffers_that_do_not_fit_the_plan_are_refused_before_anything_is_written() {
    let cache = CacheSpec::full(1, 2, 4);
    let (from, to) = pair(&cache, 3, 3);
    let plan = plan(&from, &to, &cache).unwrap();
    let good = || vec![vec![0; 48]; 2];
    let error = copy(&plan, &[vec![0; 48]], &mut good()).unwrap_err();
    assert_eq!(error.to_string(), "the plan has 2 source tensors, 1 buffers were given");
    let error = copy(&plan, &good(), &mut [vec![0; 48]]).unwrap_err();
    assert_eq!(error.to_string(), "the plan has 2 target tensors, 1 buffers were given");
    let error = copy(&plan, &[vec![0; 48], vec![0; 47]], &mut good()).unwrap_err();
    assert_eq!(error.to_string(), "the plan needs 48 bytes of source tensor `values_0`, the buffer holds 47");
    let mut targets = vec![vec![1; 47], vec![1; 48]];
    let error = copy(&plan, &good(), &mut targets).unwrap_err();
    assert!(matches!(error, CopyError::Length { side: "target", want_bytes: 48, have_bytes: 47, .. }));
    assert!(targets.concat().iter().all(|&b| b == 1));
}
