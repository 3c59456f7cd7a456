use super::*;
use crate::{Sizes, Window, presets};

const F16: DType = DType::Float16;

fn layout(rules: &str) -> Layout {
    Layout::from_toml(&format!("name = \"t\"\n{rules}")).unwrap()
}

/// Rules of keys and values, `more` added to both.
fn pair(axes: &str, more: &str) -> Layout {
    layout(&format!("[[tensor]]\nname = \"{{k|v}}\"\nholds = \"key-and-value\"\naxes = \"{axes}\"\n{more}"))
}

fn tensors(names: &[&str], shape: &[usize]) -> Vec<TensorInfo> {
    names.iter().map(|n| TensorInfo::contiguous(*n, F16, shape)).collect()
}

fn full(layers: usize) -> CacheSpec {
    CacheSpec::full(layers, 2, 4)
}

const STACKED: &str = "layer kv_head row head_dim";

#[test]
fn a_block_is_affine_in_head_row_and_lane() {
    let infos = tensors(&["k", "v"], &[3, 2, 8, 4]);
    let resolved = pair(STACKED, "").resolve(&full(3), &infos, &LiveRows::seen(5)).unwrap();
    let block = resolved.part(1, Part::Value).next().unwrap();
    assert_eq!(block.extents(), [2, 5, 4]);
    assert_eq!(block.offset_bytes, 2 * 8 * 4 * 2);
    assert_eq!(block.strides_bytes, [64, 8, 2]);
    assert_eq!(resolved.tensors[block.tensor].name, "v");
}

#[test]
fn what_does_not_fit_the_layout_is_named() {
    let live = LiveRows::seen(5);
    let stacked = pair(STACKED, "");
    let cases: Vec<(&str, Layout, CacheSpec, Vec<TensorInfo>, &str)> = vec![
        (
            "missing",
            stacked.clone(),
            full(3),
            tensors(&["k"], &[3, 2, 8, 4]),
            "tensor `v` of layout `t` is missing",
        ),
        ("none", stacked.clone(), full(3), Vec::new(), "there are: none"),
        (
            "twice",
            stacked.clone(),
            full(3),
            tensors(&["k", "k", "v"], &[3, 2, 8, 4]),
            "two tensors are called `k`",
        ),
        ("rank", stacked.clone(), full(3), tensors(&["k", "v"], &[2, 8, 4]), "has 3 dimensions"),
        (
            "layers",
            stacked.clone(),
            full(3),
            tensors(&["k", "v"], &[4, 2, 8, 4]),
            "axis layer: the layout needs 3, the tensor has 4",
        ),
        (
            "heads",
            stacked.clone(),
            full(3),
            tensors(&["k", "v"], &[3, 3, 8, 4]),
            "axis kv_head: the layout needs 2",
        ),
        (
            "lanes",
            stacked.clone(),
            full(3),
            tensors(&["k", "v"], &[3, 2, 8, 5]),
            "axis head_dim: the layout needs 4",
        ),
        (
            "capacity",
            stacked.clone(),
            full(3),
            tensors(&["k", "v"], &[3, 2, 4, 4]),
            "5 live rows do not fit the capacity of 4",
        ),
        (
            "one",
            pair("layer 1 kv_head row head_dim", ""),
            full(3),
            tensors(&["k", "v"], &[3, 2, 2, 8, 4]),
            "axis 1: the layout needs 1, the tensor has 2",
        ),
        (
            "product",
            pair("layer (kv_head head_dim) row", ""),
            full(3),
            tensors(&["k", "v"], &[3, 9, 8]),
            "axis kv_head·head_dim: the layout needs 8, the tensor has 9",
        ),
        (
            "several open",
            layout(
                "placement = \"paged\"\n[[tensor]]\nname = \"{k|v}\"\nholds = \"key-and-value\"\naxes = \"layer kv_head (block row) head_dim\"",
            ),
            full(3),
            tensors(&["k", "v"], &[3, 2, 8, 4]),
            "leaves two sizes of one dimension open",
        ),
        (
            "dtype",
            pair(STACKED, "dtype = \"float32\""),
            full(3),
            tensors(&["k", "v"], &[3, 2, 8, 4]),
            "is declared float32, it holds float16",
        ),
        (
            "no heads",
            pair("layer row head_dim", ""),
            full(3),
            tensors(&["k", "v"], &[3, 8, 4]),
            "lacks the axis kv_head, for 2 heads",
        ),
        (
            "no layers",
            pair("kv_head row head_dim", ""),
            full(3),
            tensors(&["k", "v"], &[2, 8, 4]),
            "neither a layer axis nor {layer}",
        ),
        (
            "listed twice",
            pair(STACKED, "layers = [0, 1, 0]"),
            full(3),
            tensors(&["k", "v"], &[3, 2, 8, 4]),
            "lists layer 0 twice",
        ),
        (
            "listed wrongly",
            pair(STACKED, "layers = [0, 7]"),
            full(3),
            tensors(&["k", "v"], &[2, 2, 8, 4]),
            "lists layer 7, of which the model keeps no keys",
        ),
        (
            "uncovered",
            pair(STACKED, "layers = [0, 1]"),
            full(3),
            tensors(&["k", "v"], &[2, 2, 8, 4]),
            "layer 2: the layout has no tensor for its keys",
        ),
        (
            "padding",
            pair(STACKED, "padded_head_dim = 3"),
            full(3),
            tensors(&["k", "v"], &[3, 2, 8, 3]),
            "heads of 4 stored lanes do not fit the 3",
        ),
    ];
    for (case, layout, cache, infos, says) in cases {
        let error = layout.resolve(&cache, &infos, &live).unwrap_err().to_string();
        assert!(error.contains(says), "{case}: {error}");
    }
}

#[test]
fn what_several_rules_hold_is_refused() {
    let rule = |name: &str, more: &str| {
        format!("[[tensor]]\nname = \"{name}\"\nholds = \"key\"\naxes = \"{STACKED}\"\n{more}\n")
    };
    let infos = tensors(&["a", "b", "v"], &[1, 2, 8, 4]);
    let value = format!("[[tensor]]\nname = \"v\"\nholds = \"value\"\naxes = \"{STACKED}\"\n");
    for (rules, layers, says) in [
        (rule("a", "") + &rule("b", "") + &value, 1, "the keys of layer 0 are in `a` and in `b`"),
        (
            rule("a", "layers = [0]") + &rule("a", "layers = [1]") + &value,
            2,
            "the rules `a` and `a` both claim tensor `a`",
        ),
    ] {
        let error =
            layout(&rules).resolve(&full(layers), &infos, &LiveRows::seen(3)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

/// yolo-ios PR #303: an fp16 buffer was read as fp32, past its end.
#[test]
fn d25_a_buffer_of_the_other_width_is_refused() {
    let mut infos = tensors(&["k", "v"], &[1, 2, 8, 4]);
    infos[0].dtype = DType::Float32;
    infos[0].strides_bytes = crate::contiguous_strides(&[1, 2, 8, 4], DType::Float32);
    let error = pair(STACKED, "").resolve(&full(1), &infos, &LiveRows::seen(3)).unwrap_err();
    assert_eq!(error, LayoutError::OutOfBounds { tensor: "k".into(), end_bytes: 256, have_bytes: 128 });
    infos[0].len_bytes = 256;
    let error =
        pair(STACKED, "dtype = \"float16\"").resolve(&full(1), &infos, &LiveRows::seen(3)).unwrap_err();
    assert_eq!(error, LayoutError::DTypeMismatch { tensor: "k".into(), want: F16, have: DType::Float32 });
}

#[test]
fn sizes_beyond_the_address_space_are_refused() {
    let mut infos = tensors(&["k", "v"], &[1, 2, 8, 4]);
    infos[0].strides_bytes[1] = usize::MAX;
    infos[0].shape[1] = 3;
    let cache = CacheSpec::full(1, 3, 4);
    let error = pair(STACKED, "").resolve(&cache, &infos, &LiveRows::seen(3)).unwrap_err();
    assert_eq!(error, LayoutError::TooLarge { tensor: "k".into() });
    let sizes = Sizes { capacity: usize::MAX / 2, dtype: F16, block_rows: 1, row_stride_bytes: None };
    let error = pair(STACKED, "").tensors(&full(2), &sizes).unwrap_err();
    assert_eq!(error, LayoutError::TooLarge { tensor: "k".into() });
}

#[test]
fn a_row_stride_that_does_not_hold_a_row_is_refused() {
    let sizes = |pitch| Sizes { capacity: 8, dtype: F16, block_rows: 1, row_stride_bytes: Some(pitch) };
    for pitch in [6, 9] {
        let error = pair(STACKED, "").tensors(&full(1), &sizes(pitch)).unwrap_err().to_string();
        assert!(
            error.contains(&format!("a row stride of {pitch} bytes does not hold the 8 bytes")),
            "{error}"
        );
    }
    let padded = pair(STACKED, "").tensors(&full(1), &sizes(64)).unwrap();
    assert_eq!(padded[0].strides_bytes, [1024, 512, 64, 2]);
}

#[test]
fn codes_without_their_scales_are_refused() {
    let codes =
        "[[tensor]]\nname = \"{k|v}\"\nholds = \"key-and-value\"\naxes = \"layer kv_head row head_dim\"\n";
    let int8 = |role: &str, name: &str, encoding: &str| {
        format!(
            "[[tensor]]\nname = \"{{k|v}}{name}\"\nholds = \"key-and-value\"\naxes = \"layer kv_head row\"\n\
             encoding = \"{encoding}\"\nrole = \"{role}\"\n"
        )
    };
    let mut infos = tensors(&["k", "v"], &[1, 2, 8, 4]);
    for info in &mut infos {
        *info = TensorInfo::contiguous(info.name.clone(), DType::Int8, &[1, 2, 8, 4]);
    }
    infos.extend(tensors(&["ks", "vs"], &[1, 2, 8]));
    let resolve = |rules: &str| layout(rules).resolve(&full(1), &infos, &LiveRows::seen(3));
    let coded = format!("{codes}encoding = \"int8-per-token-head\"\n");
    let error = resolve(&coded).unwrap_err().to_string();
    assert!(error.contains("the scales of the keys need int8 per token and head, there are none"), "{error}");
    assert!(resolve(&(coded.clone() + &int8("scale", "s", "int8-per-token-head"))).is_ok());
    let error = resolve(&(coded + &int8("scale", "s", "int8-per-token"))).unwrap_err().to_string();
    assert!(error.contains("tells heads apart, which share its scales"), "{error}");
    let error = resolve(codes).unwrap_err();
    assert_eq!(error, LayoutError::NotFloats { tensor: "k".into(), have: DType::Int8 });
}

#[test]
fn scales_beside_plain_elements_are_refused() {
    let rules = "[[tensor]]\nname = \"{k|v}\"\nholds = \"key-and-value\"\naxes = \"layer kv_head row head_dim\"\n\
                 [[tensor]]\nname = \"s\"\nholds = \"key\"\naxes = \"layer kv_head row\"\n\
                 encoding = \"int8-per-token-head\"\nrole = \"scale\"\n";
    let mut infos = tensors(&["k", "v"], &[1, 2, 8, 4]);
    infos.extend(tensors(&["s"], &[1, 2, 8]));
    let error = layout(rules).resolve(&full(1), &infos, &LiveRows::seen(3)).unwrap_err().to_string();
    assert!(error.contains("the scales of the keys need none"), "{error}");
}

/// mlx-vlm #2061, Rapid-MLX #1294: Phi-3's head_dim of 96 is no multiple of MLX's default group.
#[test]
fn d14_a_head_that_does_not_fill_groups_is_refused_up_front() {
    let layout = presets::get("mlx-lm-8bit").unwrap();
    let sizes = Sizes { capacity: 256, dtype: F16, block_rows: 16, row_stride_bytes: None };
    let error = layout.tensors(&CacheSpec::full(2, 4, 96), &sizes).unwrap_err().to_string();
    assert!(error.contains("groups of 64 do not divide 96 lanes; groups of 32 would"), "{error}");
    let fits = layout.with_affine(8, 32).unwrap().tensors(&CacheSpec::full(2, 4, 96), &sizes).unwrap();
    assert_eq!(fits[0].shape, [1, 4, 256, 96 * 8 / 32]);
}

/// mlx-lm #1573: rotating caches cannot be quantised.
#[test]
fn d13_full_layers_are_quantised_and_windows_stay_as_they_are() {
    let full = LayerSpec::Full { kv_heads: 2, key_dim: 64, value_dim: 64 };
    let window = Window { size: 8, keep: 0 };
    let sliding = LayerSpec::Sliding { kv_heads: 2, key_dim: 64, value_dim: 64, window };
    let layers = (0..12).map(|l| if l % 6 == 5 { full } else { sliding }).collect();
    let cache = CacheSpec { layers };
    let sizes = Sizes { capacity: 32, dtype: F16, block_rows: 16, row_stride_bytes: None };
    let layout = presets::get("mlx-lm-8bit").unwrap();
    let infos = layout.tensors(&cache, &sizes).unwrap();
    let resolved = layout.resolve(&cache, &infos, &LiveRows::seen(20)).unwrap();
    let coded = |b: &&Block| b.encoding != Encoding::Plain;
    let quantised: std::collections::BTreeSet<usize> =
        resolved.blocks.iter().filter(coded).map(|b| b.layer).collect();
    assert_eq!(quantised.into_iter().collect::<Vec<_>>(), [5, 11]);
    let plain = resolved.blocks.iter().filter(|b| !coded(b)).all(|b| b.dtype == F16 && b.layer % 6 != 5);
    assert!(plain);
}

/// LMCache #3106: Gemma 4 has layers of 16 × 256 and of 4 × 512.
#[test]
fn d33_layers_have_heads_and_lanes_of_their_own() {
    let layer = |kv_heads, dim| LayerSpec::Full { kv_heads, key_dim: dim, value_dim: dim };
    let mut layers = vec![layer(16, 256); 5];
    layers.push(layer(4, 512));
    let cache = CacheSpec { layers };
    let sizes = Sizes { capacity: 4, dtype: F16, block_rows: 16, row_stride_bytes: None };
    let apart = presets::get("mlx-lm").unwrap();
    let infos = apart.tensors(&cache, &sizes).unwrap();
    let resolved = apart.resolve(&cache, &infos, &LiveRows::seen(3)).unwrap();
    assert_eq!(resolved.part(0, Part::Key).next().unwrap().extents(), [16, 3, 256]);
    assert_eq!(resolved.part(5, Part::Value).next().unwrap().extents(), [4, 3, 512]);
    let error = presets::get("yetter").unwrap().tensors(&cache, &sizes).unwrap_err();
    let want =
        LayoutError::MixedLayers { tensor: "key_cache".into(), axis: Axis::KvHead, first: 16, other: 4 };
    assert_eq!(error, want);
}

/// kvcached #417: layers that share another's cache keep none.
#[test]
fn d34_shared_layers_have_no_tensors() {
    let full = LayerSpec::Full { kv_heads: 1, key_dim: 4, value_dim: 4 };
    let mut layers = vec![full; 15];
    layers.extend((15..35).map(|l| LayerSpec::Shared { with: if l % 5 == 4 { 14 } else { 13 } }));
    let cache = CacheSpec { layers };
    let layout = presets::get("mlx-lm").unwrap();
    let sizes = Sizes { capacity: 8, dtype: F16, block_rows: 16, row_stride_bytes: None };
    let infos = layout.tensors(&cache, &sizes).unwrap();
    assert_eq!(infos.len(), 30);
    let resolved = layout.resolve(&cache, &infos, &LiveRows::seen(3)).unwrap();
    assert!(resolved.blocks.iter().all(|b| b.layer < 15));
    let error = layout.resolve(&cache, &infos[..28], &LiveRows::seen(3)).unwrap_err().to_string();
    assert!(error.contains("`keys_14`"), "{error}");
}

#[test]
fn groups_take_their_layers_from_their_shapes() {
    let layout = presets::get("anemll-chunked").unwrap();
    let group = |number: usize, layers: usize| {
        let shape = [2 * layers, 2, 8, 4];
        TensorInfo::contiguous(format!("{number}/model.model.kv_cache_0"), F16, &shape)
    };
    let infos = [group(0, 3), group(1, 2)];
    let resolved = layout.resolve(&full(5), &infos, &LiveRows::seen(2)).unwrap();
    let at = |layer, part| {
        let block = resolved.part(layer, part).next().unwrap();
        (block.tensor, block.offset_bytes / (2 * 8 * 4 * 2))
    };
    assert_eq!(at(2, Part::Key), (0, 2));
    assert_eq!(at(2, Part::Value), (0, 5));
    assert_eq!(at(3, Part::Key), (1, 0));
    assert_eq!(at(4, Part::Value), (1, 3));
    for (layers, infos, says) in [
        (5, vec![group(0, 3)], "`1/model.model.kv_cache_0` of layout `anemll-chunked` is missing"),
        (5, vec![group(0, 6)], "5 layers are left"),
        (5, vec![group(0, 0)], "5 layers are left"),
    ] {
        let error = layout.resolve(&full(layers), &infos, &LiveRows::seen(2)).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn one_sequence_of_a_batch_is_named() {
    let layout = presets::get("mlx-lm-batch").unwrap();
    let infos = tensors(&["keys_0", "values_0"], &[3, 2, 8, 4]);
    let live = |sequence| LiveRows { sequence, pad: Some(2), ..LiveRows::seen(5) };
    let resolved = layout.resolve(&full(1), &infos, &live(Some(2))).unwrap();
    let block = resolved.part(0, Part::Key).next().unwrap();
    assert_eq!(block.offset_bytes, (2 * 2 * 8 * 4 + 2 * 4) * 2);
    let error = layout.resolve(&full(1), &infos, &live(Some(3))).unwrap_err().to_string();
    assert!(error.contains("axis batch: the layout needs 4, the tensor has 3"), "{error}");
    let error = layout.resolve(&full(1), &infos, &live(None)).unwrap_err().to_string();
    assert!(error.contains("axis batch: the layout needs 1, the tensor has 3"), "{error}");
}

#[test]
fn keys_and_values_of_different_lanes_do_not_share_a_tensor() {
    let spec = LayerSpec::Full { kv_heads: 1, key_dim: 6, value_dim: 4 };
    let cache = CacheSpec { layers: vec![spec; 2] };
    let sizes = Sizes { capacity: 8, dtype: F16, block_rows: 16, row_stride_bytes: None };
    let error = presets::get("anemll").unwrap().tensors(&cache, &sizes).unwrap_err();
    assert!(
        matches!(error, LayoutError::MixedLayers { axis: Axis::HeadDim, first: 6, other: 4, .. }),
        "{error}"
    );
    assert!(presets::get("mlx-lm").unwrap().tensors(&cache, &sizes).is_ok());
}

#[test]
fn a_target_of_some_rows_has_their_bytes() {
    let infos = tensors(&["k", "v"], &[1, 2, 8, 4]);
    let resolved = pair(STACKED, "").resolve(&full(1), &infos, &LiveRows::seen(6)).unwrap();
    let some = resolved.only_rows(&(2..4), true);
    let block = some.part(0, Part::Key).next().unwrap();
    assert_eq!((block.rows.clone(), block.offset_bytes), (2..4, 2 * 4 * 2));
    assert_eq!(resolved.only_rows(&(6..9), true).blocks, []);
}

#[test]
fn blocks_that_follow_one_another_are_one() {
    let cache = full(1);
    let sizes = Sizes { capacity: 32, dtype: F16, block_rows: 4, row_stride_bytes: None };
    let of = |name: &str, table: Vec<u32>| {
        let layout = presets::get(name).unwrap();
        let infos = layout.tensors(&cache, &sizes).unwrap();
        let live = LiveRows { block_table: Some(table), ..LiveRows::seen(10) };
        let resolved = layout.resolve(&cache, &infos, &live).unwrap();
        resolved.part(0, Part::Key).map(|b| (b.rows.clone(), b.offset_bytes)).collect::<Vec<_>>()
    };
    // A cell of llama.cpp is 2 heads of 4 lanes.
    let cells: Vec<u32> = (3..8).chain(20..25).collect();
    assert_eq!(of("llama-cpp", cells), [(0..5, 3 * 16), (5..10, 20 * 16)]);
    // A block of vLLM is 4 rows of keys, then 4 of values: never packed one after the other.
    assert_eq!(of("vllm-nhd", vec![1, 2, 3]).len(), 3);
}
