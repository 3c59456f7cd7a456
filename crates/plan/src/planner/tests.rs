use kvbaton_layout::{
    DType, LayerSpec, Layout, LiveRows, Sizes, TensorInfo, Window, contiguous_strides, presets,
};

use super::*;

const F16: DType = DType::Float16;

fn sizes(capacity: usize, dtype: DType) -> Sizes {
    Sizes { capacity, dtype, block_rows: 16, row_stride_bytes: None }
}

/// A layout's own tensors, resolved.
fn side(layout: &Layout, cache: &CacheSpec, capacity: usize, dtype: DType, live: &LiveRows) -> Resolved {
    let tensors = layout.tensors(cache, &sizes(capacity, dtype)).unwrap();
    layout.resolve(cache, &tensors, live).unwrap()
}

fn named(name: &str) -> Layout {
    presets::get(name).unwrap()
}

fn window(layers: usize, size: usize, keep: usize) -> CacheSpec {
    let window = Window { size, keep };
    CacheSpec { layers: vec![LayerSpec::Sliding { kv_heads: 2, key_dim: 4, value_dim: 4, window }; layers] }
}

#[test]
fn stacked_to_per_layer_is_one_box_a_layer_and_part() {
    let cache = CacheSpec::full(3, 2, 4);
    let live = LiveRows::seen(5);
    let source = side(&named("yetter"), &cache, 8, F16, &live);
    let target = side(&named("mlx-lm"), &cache, 16, F16, &live);
    let plan = plan(&source, &target, &cache).unwrap();
    assert_eq!(plan.ops().len(), 6);
    let op = &plan.ops()[2];
    assert_eq!((op.layer, op.part, op.extents), (1, Part::Key, [2, 1, 20]));
    assert_eq!(op.src.offset_bytes, 2 * 8 * 4 * 2);
    assert_eq!([op.src.strides_bytes[0], op.dst.strides_bytes[0]], [8 * 8, 16 * 8]);
    assert_eq!(op.place_of([1, 0, 9]), (1, 2, 1));
}

/// vllm #52607 and others: 0.5 GB/s instead of 49, for 112 thousand pieces.
#[test]
fn d35_operations_are_few() {
    let cache = CacheSpec::full(28, 8, 128);
    let live = LiveRows::seen(300);
    let mlx = side(&named("mlx-lm"), &cache, 512, F16, &live);
    for (name, most) in
        [("yetter", 2 * 28 * 8), ("coreai-ios", 2 * 28 * 8), ("exo", 2 * 28), ("anemll", 2 * 28 * 8)]
    {
        let source = side(&named(name), &cache, 512, F16, &live);
        let plan = plan(&source, &mlx, &cache).unwrap();
        assert!(plan.operations() <= most, "{name}: {} operations", plan.operations());
        assert_eq!(plan.bytes_written(), 2 * 28 * 8 * 300 * 128 * 2);
    }
    // Where everything is contiguous on both sides, a layer's part is a single run.
    let full = LiveRows::seen(512);
    let source = side(&named("yetter"), &cache, 512, F16, &full);
    let target = side(&named("mlx-lm"), &cache, 512, F16, &full);
    let plan = plan(&source, &target, &cache).unwrap();
    assert_eq!(plan.operations(), 2 * 28);
    assert!(plan.ops().iter().all(|op| op.extents == [1, 1, 8 * 512 * 128]));
}

/// vllm-metal PR #474: the bytes touched are those of the live rows.
#[test]
fn d36_bytes_are_those_of_live_rows() {
    let cache = CacheSpec::full(4, 2, 8);
    let live = LiveRows { block_table: Some((0..64).rev().collect()), ..LiveRows::seen(40) };
    let pool = side(&named("vllm-metal"), &cache, 1024, F16, &live);
    let mlx = side(&named("mlx-lm"), &cache, 256, F16, &live);
    for (source, target) in [(&pool, &mlx), (&mlx, &pool)] {
        let plan = plan(source, target, &cache).unwrap();
        assert_eq!(plan.bytes_read(), 4 * 2 * 40 * 2 * 8 * 2);
        assert_eq!(plan.bytes_written(), plan.bytes_read());
        assert!(plan.zeros().is_empty());
    }
}

#[test]
fn blocks_that_follow_one_another_are_one_copy() {
    let cache = CacheSpec::full(1, 2, 8);
    let table = |blocks: &[u32]| LiveRows { block_table: Some(blocks.to_vec()), ..LiveRows::seen(64) };
    let count = |blocks: &[u32]| {
        let live = table(blocks);
        let pool = side(&named("vllm-metal"), &cache, 64, F16, &live);
        plan(&pool, &side(&named("exo"), &cache, 64, F16, &live), &cache).unwrap().operations()
    };
    assert_eq!(count(&[0, 1, 2, 3]), 2);
    assert_eq!(count(&[2, 3, 0, 1]), 4);
    assert_eq!(count(&[3, 2, 1, 0]), 8);
}

#[test]
fn cells_one_after_the_other_are_one_copy() {
    let cache = CacheSpec::full(1, 2, 8);
    let live = LiveRows { block_table: Some((5..25).collect()), ..LiveRows::seen(20) };
    let cells = side(&named("llama-cpp-v-transposed"), &cache, 32, F16, &live);
    let plan = plan(&cells, &side(&named("mlx-lm"), &cache, 32, F16, &live), &cache).unwrap();
    assert_eq!(plan.operations(), 2);
    assert_eq!(plan.ops()[1].rows, 0..20);
}

#[test]
fn a_decoder_s_window_may_lack_the_row_it_no_longer_reads() {
    let cache = window(1, 8, 0);
    // The source has seen 20 tokens, the last one stays with the decoder.
    let source =
        side(&named("mlx-lm"), &cache, 8, F16, &LiveRows { ring_start: Some(4), ..LiveRows::seen(20) });
    let target = side(&named("mlx-lm"), &cache, 8, F16, &LiveRows::seen(19));
    let copies = plan(&source, &target, &cache).unwrap();
    let zeroed: Vec<_> = copies.zeros().iter().map(|z| (z.part, z.rows.clone(), z.extents)).collect();
    assert_eq!(zeroed, [(Part::Key, 11..12, [2, 1, 4]), (Part::Value, 11..12, [2, 1, 4])]);
    // Two rows less would be attended to.
    let target = side(&named("mlx-lm"), &cache, 8, F16, &LiveRows::seen(18));
    let error = plan(&source, &target, &cache).unwrap_err();
    let PlanError::MissingRows { layer: 0, part: Part::Key, want, .. } = &error else { panic!("{error}") };
    assert_eq!(*want, 10..18);
}

#[test]
fn rows_that_stay_must_be_there() {
    let cache = window(1, 8, 2);
    let source = side(&named("coreml-llm-rolling"), &cache, 8, F16, &LiveRows::seen(20));
    let target = side(&named("mlx-lm"), &cache, 8, F16, &LiveRows::seen(20));
    let error = plan(&source, &target, &cache).unwrap_err();
    assert!(matches!(error, PlanError::MissingRows { want: Range { start: 0, end: 2 }, .. }), "{error}");
}

#[test]
fn lanes_that_pad_a_head_are_zeroed() {
    let cache = window(2, 8, 0);
    let mut layout = named("coreml-llm-sliding");
    for rule in &mut layout.tensors {
        rule.padded_head_dim = Some(10);
    }
    let live = LiveRows::seen(5);
    let target = side(&layout, &cache, 8, F16, &live);
    let plan = plan(&side(&named("mlx-lm"), &cache, 8, F16, &live), &target, &cache).unwrap();
    assert_eq!(plan.zeros().len(), 4);
    assert_eq!(plan.zeros()[0].extents, [2, 5, 6]);
    // Rows 0..5 are in slots 3..8, lanes 4..10 pad.
    assert_eq!(plan.zeros()[0].dst.offset_bytes, (3 * 10 + 4) * 2);
}

#[test]
fn what_the_source_lacks_is_named() {
    let cache = CacheSpec::full(2, 2, 4);
    let live = LiveRows::seen(5);
    let target = side(&named("mlx-lm"), &cache, 8, F16, &live);
    let yetter = |cache: &CacheSpec, n| side(&named("yetter"), cache, 8, F16, &LiveRows::seen(n));
    let error = plan(&yetter(&CacheSpec::full(1, 2, 4), 5), &target, &cache).unwrap_err();
    assert_eq!(error, PlanError::NoSource { layer: 1, part: Part::Key });
    let error = plan(&yetter(&CacheSpec::full(2, 1, 4), 5), &target, &cache).unwrap_err();
    assert_eq!(error, PlanError::Shape { layer: 0, part: Part::Key, axis: "heads", want: 2, have: 1 });
    let error = plan(&yetter(&CacheSpec::full(2, 2, 5), 5), &target, &cache).unwrap_err();
    assert_eq!(error, PlanError::Shape { layer: 0, part: Part::Key, axis: "lanes", want: 4, have: 5 });
    let error = plan(&yetter(&cache, 4), &target, &cache).unwrap_err();
    assert_eq!(error, PlanError::MissingRows { layer: 0, part: Part::Key, want: 0..5, have: 0..4 });
}

#[test]
fn a_target_that_overlaps_itself_is_refused() {
    let cache = CacheSpec::full(1, 2, 4);
    let live = LiveRows::seen(5);
    let source = side(&named("yetter"), &cache, 8, F16, &live);
    let shape = [1, 2, 8, 4];
    for (axis, stride) in [(1, 0), (1, 32), (2, 6), (3, 0)] {
        let mut infos = ["keys_0", "values_0"].map(|n| TensorInfo::contiguous(n, F16, &shape)).to_vec();
        infos[1].strides_bytes = contiguous_strides(&shape, F16);
        infos[1].strides_bytes[axis] = stride;
        let target = named("mlx-lm").resolve(&cache, &infos, &live).unwrap();
        let error = plan(&source, &target, &cache).unwrap_err();
        assert_eq!(error, PlanError::TargetOverlaps { tensor: "values_0".into() }, "axis {axis}");
        // Reading it is fine: a source may repeat its elements.
        assert!(plan(&target, &source, &cache).is_ok());
    }
}

#[test]
fn quantised_rows_move_as_codes_or_are_coded_anew() {
    let cache = CacheSpec::full(2, 2, 128);
    let live = LiveRows::seen(5);
    let eight = side(&named("mlx-lm-8bit"), &cache, 8, F16, &live);
    let moved =
        plan(&eight, &side(&named("mlx-swift-lm-8bit"), &cache, 16, DType::BFloat16, &live), &cache).unwrap();
    assert_eq!((moved.ops().len(), moved.coded().len()), (2 * 2 * 3, 0));
    assert!(moved.ops().iter().all(|op| op.role != Role::Elements || op.src.dtype == op.dst.dtype));
    let decoded = plan(&eight, &side(&named("yetter"), &cache, 8, F16, &live), &cache).unwrap();
    assert_eq!((decoded.ops().len(), decoded.coded().len()), (0, 4));
    // Codes, and a scale and a bias of two bytes for every 64 lanes.
    assert_eq!(decoded.bytes_read(), 2 * 2 * 2 * 5 * (128 + 2 * 2 * 2));
    assert_eq!(decoded.bytes_written(), 2 * 2 * 2 * 5 * 128 * 2);
    assert!(decoded.converts() && moved.converts());
}

#[test]
fn a_scale_of_all_heads_needs_them_in_one_tensor() {
    let text = |name: &str| {
        format!(
            "name = \"t\"\n[[tensor]]\nname = \"{name}\"\nholds = \"key-and-value\"\naxes = \"{}\"\n\
             encoding = \"int8-per-token\"\n[[tensor]]\nname = \"{{k|v}}s{{layer}}\"\nholds = \"key-and-value\"\n\
             axes = \"row\"\nencoding = \"int8-per-token\"\nrole = \"scale\"",
            if name.contains("kv_head") { "row head_dim" } else { "kv_head row head_dim" }
        )
    };
    let cache = CacheSpec::full(1, 2, 4);
    let live = LiveRows::seen(5);
    let source = side(&named("yetter"), &cache, 8, F16, &live);
    let together = Layout::from_toml(&text("{k|v}{layer}")).unwrap();
    let together = side(&together, &cache, 8, F16, &live);
    assert_eq!(plan(&source, &together, &cache).unwrap().coded().len(), 2);
    let apart = Layout::from_toml(&text("{k|v}{layer},{kv_head}")).unwrap();
    let apart = side(&apart, &cache, 8, F16, &live);
    let error = plan(&source, &apart, &cache).unwrap_err();
    assert_eq!(error, PlanError::SharedScale { layer: 0, part: Part::Key });
    // Codes and scales move as they are all the same.
    assert_eq!(plan(&together, &apart, &cache).unwrap().coded().len(), 0);
}

#[test]
fn a_source_without_scales_for_its_rows_is_refused() {
    let cache = CacheSpec::full(1, 2, 4);
    let mut source = side(&named("forge-v8"), &cache, 8, F16, &LiveRows::seen(5));
    source.blocks.retain(|b| b.role != Role::Scale);
    let target = side(&named("mlx-lm"), &cache, 8, F16, &LiveRows::seen(5));
    let error = plan(&source, &target, &cache).unwrap_err();
    assert_eq!(error, PlanError::Companion { layer: 0, part: Part::Value, role: "scales", rows: 0..5 });
}

#[test]
fn costs_add_up() {
    let cache = CacheSpec::full(28, 8, 128);
    let live = LiveRows::seen(300);
    let source = side(&named("coreai-ios"), &cache, 512, F16, &live);
    let target = side(&named("mlx-lm"), &cache, 512, DType::Float32, &live);
    let cost = plan(&source, &target, &cache).unwrap().cost(10.0);
    let elements = 2 * 28 * 8 * 300 * 128;
    assert_eq!((cost.bytes_read, cost.bytes_written, cost.bytes_zeroed), (elements * 2, elements * 4, 0));
    assert_eq!(cost.smallest_run_bytes, Some(2), "a transpose has no runs");
    assert!((cost.seconds - elements as f64 * 6.0 / 1e10).abs() < 1e-12);
    let target = side(&named("yetter"), &cache, 512, F16, &live);
    let rows = plan(&side(&named("coreai-macos"), &cache, 512, F16, &live), &target, &cache).unwrap();
    assert_eq!(rows.cost(10.0).smallest_run_bytes, Some(300 * 128 * 2));
}

#[test]
fn a_plan_explains_itself() {
    let cache = window(1, 4, 0);
    let mut layout = named("coreml-llm-sliding");
    layout.tensors[0].padded_head_dim = Some(6);
    let target = side(&layout, &cache, 4, DType::BFloat16, &LiveRows::seen(5));
    let live = LiveRows { ring_start: Some(2), ..LiveRows::seen(6) };
    let source = side(&named("mlx-lm"), &cache, 4, DType::BFloat16, &live);
    let text = plan(&source, &target, &cache).unwrap().explain();
    let lines: Vec<&str> = text.lines().filter(|l| l.contains("keys")).collect();
    assert_eq!(
        lines,
        [
            "layer   0 keys           heads 0..2   rows 2..4        lanes 0..4        2 x 2 x 4 of \
             bfloat16 to float16 keys_0 @ 16 (32, 8, 2) -> K_sliding_in @ 12 (48, 12, 2)",
            "layer   0 keys           heads 0..2   rows 4..5        lanes 0..4            2 x 4 of \
             bfloat16 to float16 keys_0 @ 0 (32, 2) -> K_sliding_in @ 36 (48, 2)",
            "layer   0 keys           rows 1..2        2 x 1 x 4 zeroed in K_sliding_in @ 0 (48, 2)",
            "layer   0 keys           rows 1..5        2 x 4 x 2 zeroed in K_sliding_in @ 8 (48, 12, 2)",
        ],
        "{text}"
    );
}
