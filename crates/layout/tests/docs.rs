//! `docs/layouts.md`: its examples are layouts, the shapes below them are theirs, and its table lists the presets.
//!
//! `KVBATON_UPDATE=1` rewrites shapes and table.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::path::Path;

use kvbaton_layout::{CacheSpec, DType, LayerSet, LayerSpec, Layout, LiveRows, Part, Sizes, Window, presets};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/layouts.md");

/// The model of the examples, as the page describes it.
fn model(layout: &Layout) -> CacheSpec {
    let full = LayerSpec::Full { kv_heads: 2, key_dim: 64, value_dim: 64 };
    let window = Window { size: 128, keep: 0 };
    let sliding = LayerSpec::Sliding { kv_heads: 2, key_dim: 64, value_dim: 64, window };
    let recurrent =
        LayerSpec::Recurrent { conv_steps: 3, conv_channels: 48, heads: 4, value_dim: 16, key_dim: 8 };
    let windows = layout.sliding_placement.is_some()
        || layout.tensors.iter().any(|r| r.layers == LayerSet::Sliding || r.sliding_placement.is_some());
    let states = layout.tensors.iter().any(|r| r.parts() == [Part::Conv]);
    let even = if states {
        recurrent
    } else if windows {
        sliding
    } else {
        full
    };
    CacheSpec { layers: vec![even, full, even, full] }
}

/// The tensors of a layout, a line each, neighbours of the same shape together.
fn shapes(layout: &Layout) -> String {
    let cache = model(layout);
    let sizes = Sizes { capacity: 512, dtype: DType::Float16, block_rows: 16, row_stride_bytes: None };
    let tensors = layout.tensors(&cache, &sizes).unwrap();
    let live = LiveRows {
        pad: Some(2),
        ring_start: Some(3),
        conv_start: Some(1),
        block_table: Some((0..512).rev().collect()),
        ..LiveRows::seen(100)
    };
    let live = if layout.tensors.iter().any(|r| r.axes.to_string().starts_with("block part")) {
        LiveRows { block_table: Some((0..32).collect()), ..live }
    } else {
        live
    };
    layout.resolve(&cache, &tensors, &live).unwrap_or_else(|e| panic!("{}: {e}", layout.name));
    let mut lines: Vec<(Vec<String>, String)> = Vec::new();
    for tensor in tensors {
        let shape = tensor.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let shape = format!("({shape}) {}", tensor.dtype);
        match lines.last_mut() {
            Some((names, last)) if *last == shape => names.push(tensor.name),
            _ => lines.push((vec![tensor.name], shape)),
        }
    }
    let line = |(names, shape): (Vec<String>, String)| {
        let names = match names.as_slice() {
            [first, .., last] if names.len() > 4 => format!("{first} … {last} ({} tensors)", names.len()),
            _ => names.join(", "),
        };
        format!("{names}: {shape}\n")
    };
    lines.into_iter().map(line).collect()
}

fn table() -> String {
    let mut text = "| name | what it is | tensors | placement |\n|---|---|---|---|\n".to_owned();
    for name in presets::names() {
        let layout = presets::get(name).unwrap();
        let names: Vec<String> =
            layout.tensors.iter().map(|r| format!("`{}`", r.name.0.replace('|', "\\|"))).collect();
        let word = |p| {
            let text = toml::to_string(&std::collections::BTreeMap::from([("p", p)])).unwrap();
            text.trim().trim_start_matches("p = ").trim_matches('"').to_owned()
        };
        let mut placement = word(layout.placement);
        if let Some(sliding) = layout.sliding_placement {
            placement += &format!("; windows {}", word(sliding));
        }
        text += &format!("| `{name}` | {} | {} | {placement} |\n", layout.description, names.join(", "));
    }
    text
}

/// The page as it should be.
fn rewritten(page: &str) -> String {
    let mut out = String::new();
    let mut rest = page;
    while let Some(at) = rest.find("```toml\n") {
        let (before, from) = rest.split_at(at + "```toml\n".len());
        let (example, after) = from.split_once("```\n").expect("a fence is closed");
        let layout = Layout::from_toml(example).unwrap_or_else(|e| panic!("{e}\n{example}"));
        assert_eq!(Layout::from_toml(&layout.to_toml()).unwrap(), layout, "{}", layout.name);
        out += &format!("{before}{example}```\n\n```text\n{}```\n", shapes(&layout));
        rest = match after.strip_prefix("\n```text\n").and_then(|old| old.split_once("```\n")) {
            Some((_, after)) => after,
            None => after,
        };
    }
    let (before, table_on) =
        rest.split_once("<!-- presets -->\n").expect("the page has a place for the table");
    let (_, after) = table_on.split_once("<!-- /presets -->").expect("the table ends");
    out + before + "<!-- presets -->\n" + &table() + "<!-- /presets -->" + after
}

#[test]
fn the_page_s_examples_parse_and_its_shapes_and_table_are_current() {
    let page = std::fs::read_to_string(PATH).unwrap();
    let current = rewritten(&page);
    if std::env::var_os("KVBATON_UPDATE").is_some() {
        std::fs::write(Path::new(PATH), &current).unwrap();
    }
    let stale = page.lines().zip(current.lines()).find(|(a, b)| a != b);
    assert!(
        page == current || std::env::var_os("KVBATON_UPDATE").is_some(),
        "docs/layouts.md is stale, rewrite it with KVBATON_UPDATE=1; first difference: {stale:?}"
    );
}

#[test]
fn every_field_and_word_of_the_language_is_on_the_page() {
    let page = std::fs::read_to_string(PATH).unwrap();
    for word in [
        "left",
        "right",
        "ring",
        "ring-indexed",
        "ring-from",
        "left-padded",
        "paged",
        "key-and-value",
        "conv",
        "state",
        "group_layers",
        "sliding_placement",
        "extra_rows",
        "padded_head_dim",
        "partial",
        "encoding",
        "role",
        "{layer}",
        "{index}",
        "{group}",
        "{kv_head}",
        "int8-per-token-head",
        "int8-per-token",
        "bits",
        "group_size",
        "last_index",
        "positions",
        "mask",
        "logits",
        "block_table",
        "ring_start",
        "conv_start",
        "sequence",
        "live",
        "pad",
        "tokens_seen",
    ] {
        assert!(page.contains(word), "`{word}` is not explained");
    }
    for name in presets::names() {
        assert!(page.contains(&format!("| `{name}` |")), "{name} is not listed");
    }
}
