use super::*;

fn layout(head: &str, rule: &str) -> Result<Layout, LayoutError> {
    Layout::from_toml(&format!("name = \"t\"\n{head}\n[[tensor]]\n{rule}"))
}

/// A rule of keys with something added or replaced.
fn key(more: &str) -> Result<Layout, LayoutError> {
    layout("", &format!("holds = \"key\"\n{more}"))
}

#[test]
fn a_rule_of_every_field_reads_back_exactly() {
    let text = r#"
name = "all"
description = "every field"
placement = "left-padded"
sliding_placement = "ring-from"
partial = true

[inputs]
tokens = "input_ids"
last_index = "last"
position = "first"
hidden = "h"
positions = "pos"
mask = "mask"

[outputs]
logits = "logits"

[[tensor]]
name = "{group}/{k|v}"
holds = "key-and-value"
axes = "layer batch kv_head row head_dim"
layers = [0, 2]
group_layers = 2
padded_head_dim = 512
dtype = "bfloat16"
placement = "right"
sliding_placement = "ring"

[[tensor]]
name = "codes_{layer}"
holds = "value"
axes = "kv_head row head_dim"
layers = "full"
encoding = { bits = 4, group_size = 32 }

[[tensor]]
name = "scales_{layer}"
holds = "value"
axes = "kv_head row head_dim"
layers = "full"
encoding = { bits = 4, group_size = 32 }
role = "scale"

[[tensor]]
name = "conv_{layer}"
holds = "conv"
axes = "channel row"
placement = "right"
extra_rows = 1
"#;
    let layout = Layout::from_toml(text).unwrap();
    assert_eq!(layout.tensors[0].group_layers, Some(2));
    assert_eq!(layout.tensors[0].placement_of(&layout, true), Placement::Ring);
    assert_eq!(layout.tensors[1].placement_of(&layout, true), Placement::RingFrom);
    assert_eq!(layout.tensors[1].placement_of(&layout, false), Placement::LeftPadded);
    assert_eq!(layout.tensors[1].encoding, Encoding::Affine { bits: 4, group_size: 32 });
    assert_eq!(layout.tensors[3].extra_rows, 1);
    assert_eq!(Layout::from_toml(&layout.to_toml()).unwrap(), layout);
}

#[test]
fn rules_that_cannot_hold_say_why() {
    let axes = "axes = \"kv_head row head_dim\"";
    for (name, more, says) in [
        ("k", "axes = \"kv_head row\"".to_owned(), "lacks the axis head_dim"),
        ("k", "axes = \"kv_head head_dim\"".to_owned(), "lacks the axis row"),
        ("k", "axes = \"part kv_head row head_dim\"".to_owned(), "has the axis part, it holds one part"),
        (
            "k",
            "axes = \"channel row head_dim\"".to_owned(),
            "has the axis channel, which recurrent layers have",
        ),
        ("k{layer}", "axes = \"layer row head_dim\"".to_owned(), "every layer has a tensor of its own"),
        ("k{group}", axes.to_owned(), "lacks the axis layer, a group has several layers"),
        ("k{layer}{group}", axes.to_owned(), "named by layer and by group"),
        ("k{kv_head}", axes.to_owned(), "every head has a tensor of its own"),
        ("{k|v}", axes.to_owned(), "names keys and values, and holds only one"),
        ("k{head}", axes.to_owned(), "`{head}` in the name `k{head}` stands for nothing"),
        ("k", "axes = \"block kv_head row head_dim\"".to_owned(), "has the axis block"),
        ("k", format!("{axes}\nplacement = \"paged\""), "lacks the axis block"),
        ("k", format!("{axes}\nsliding_placement = \"paged\""), "lacks the axis block"),
        ("k", format!("{axes}\ngroup_layers = 2"), "has no {group} in its name"),
        (
            "k{group}",
            "axes = \"layer kv_head row head_dim\"\ngroup_layers = 0".to_owned(),
            "groups of no layers",
        ),
        ("k", format!("{axes}\nencoding = {{ bits = 7, group_size = 64 }}"), "not 7"),
        ("k", format!("{axes}\nencoding = {{ bits = 4, group_size = 48 }}"), "not 48"),
        (
            "k",
            format!("{axes}\nencoding = {{ bits = 4, group_size = 64 }}\ndtype = \"float16\""),
            "are uint32, not float16",
        ),
        ("k", format!("{axes}\nencoding = \"int8-per-token\"\ndtype = \"uint32\""), "are int8, not uint32"),
        (
            "k",
            format!("{axes}\nencoding = \"int8-per-token\"\nrole = \"bias\""),
            "int8 per token elements have no biases",
        ),
        ("k", format!("{axes}\nrole = \"scale\""), "plain elements have no scales"),
        (
            "k",
            format!("{axes}\nencoding = \"int8-per-token\"\nrole = \"scale\"\ndtype = \"int8\""),
            "scales are floats",
        ),
        ("k", format!("{axes}\ndtype = \"int8\""), "plain elements are floats, not int8"),
    ] {
        let error = key(&format!("name = \"{name}\"\n{more}")).unwrap_err();
        assert!(matches!(error, LayoutError::BadLayout { .. }), "{name}: {error}");
        assert!(error.to_string().contains(says), "{name}, {more}: {error}");
    }
}

#[test]
fn recurrent_rules_that_cannot_hold_say_why() {
    for (rule, says) in [
        ("holds = \"conv\"\naxes = \"channel\"", "lacks the axis row, a convolution state has steps"),
        ("holds = \"conv\"\naxes = \"row\"", "lacks the axis channel"),
        ("holds = \"conv\"\naxes = \"kv_head row channel\"", "has the axis kv_head"),
        ("holds = \"conv\"\naxes = \"row (channel head_dim)\"", "has the axis head_dim"),
        ("holds = \"state\"\naxes = \"kv_head key_dim\"", "lacks the axis value_dim"),
        ("holds = \"state\"\naxes = \"kv_head value_dim\"", "lacks the axis key_dim"),
        ("holds = \"state\"\naxes = \"kv_head row value_dim key_dim\"", "has the axis row"),
        ("holds = \"key-and-value\"\naxes = \"kv_head row head_dim\"", "lacks the axis part"),
        (
            "holds = \"state\"\naxes = \"kv_head value_dim key_dim\"\nencoding = \"int8-per-token\"",
            "a recurrent state is not int8 per token",
        ),
        ("holds = \"conv\"\naxes = \"channel row\"\nplacement = \"paged\"", "lacks the axis block"),
    ] {
        let error = layout("", &format!("name = \"s{{layer}}\"\n{rule}")).unwrap_err().to_string();
        assert!(error.contains(says), "{rule}: {error}");
    }
    let apart = "name = \"{k|v}\"\nholds = \"key-and-value\"\naxes = \"part kv_head row head_dim\"";
    let error = layout("", apart).unwrap_err().to_string();
    assert!(error.contains("keys and values have tensors of their own"), "{error}");
}

#[test]
fn texts_that_are_no_layout_are_refused() {
    for (text, says) in [
        ("name = ", "not a layout"),
        ("name = \"t\"", "it has no tensors"),
        ("name = \"t\"\ntensor = []", "it has no tensors"),
        ("name = \"t\"\ncolour = 1\ntensor = []", "unknown field `colour`"),
        ("name = \"t\"\nplacement = \"middle\"\ntensor = []", "unknown variant `middle`"),
        (
            "name = \"t\"\n[[tensor]]\nname = \"k\"\nholds = \"keys\"\naxes = \"row head_dim\"",
            "unknown variant `keys`",
        ),
        (
            "name = \"t\"\n[[tensor]]\nname = \"k\"\nholds = \"key\"\naxes = \"token lane\"",
            "`token` is no axis",
        ),
        (
            "name = \"t\"\n[[tensor]]\nname = \"k\"\nholds = \"key\"\naxes = \"row head_dim\"\nrows = 3",
            "unknown field `rows`",
        ),
        (
            "name = \"t\"\n[[tensor]]\nname = \"k\"\nholds = \"key\"\naxes = \"row head_dim\"\ndtype = \"float64\"",
            "unknown variant `float64`",
        ),
    ] {
        let error = Layout::from_toml(text).unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}

#[test]
fn affine_tensors_take_other_bits_and_groups() {
    let eight = crate::presets::get("mlx-lm-8bit").unwrap();
    let three = eight.with_affine(3, 32).unwrap();
    assert_eq!(three.tensors[0].encoding, Encoding::Affine { bits: 3, group_size: 32 });
    let plain = three.tensors.iter().filter(|r| r.encoding == Encoding::Plain).count();
    assert_eq!(plain, eight.tensors.iter().filter(|r| r.encoding == Encoding::Plain).count());
    assert!(eight.with_affine(7, 64).is_err());
    let error = crate::presets::get("yetter").unwrap().with_affine(8, 64).unwrap_err().to_string();
    assert!(error.contains("no tensors of affine codes"), "{error}");
}
