use super::*;
use crate::{CacheSpec, DType, LiveRows, Sizes, presets};

fn sizes() -> Sizes {
    Sizes { capacity: 16, dtype: DType::Float16, block_rows: 4, row_stride_bytes: None }
}

/// Every preset either gives back the model that its tensors were made for, or says what is open.
#[test]
fn shapes_give_the_model_back_or_say_what_is_open() {
    let cache = CacheSpec::full(5, 3, 64);
    let mut found = Vec::new();
    for name in presets::names() {
        let layout = presets::get(name).unwrap();
        let Ok(tensors) = layout.tensors(&cache, &sizes()) else { continue };
        match layout.infer_cache(&tensors) {
            Ok(inferred) => {
                assert_eq!(inferred, cache, "{name}");
                found.push(name);
            }
            Err(error) => assert!(matches!(error, LayoutError::Open { .. }), "{name}: {error}"),
        }
    }
    for name in [
        "kvbaton-stacked",
        "kvbaton-grouped",
        "kvbaton-per-layer",
        "yetter",
        "coreai-macos",
        "anemll",
        "anemll-chunked",
        "swift-transformers",
        "vllm-nhd",
        "vllm-fused",
        "coreml-llm-litert",
        "executorch-mlx",
    ] {
        assert!(found.contains(&name), "{name} is not among {found:?}");
    }
    for name in
        ["coreai-ios", "whisperkit", "smpanaro-gpt2", "mlx-lm", "coreml-llm-sliding", "executorch-static"]
    {
        assert!(!found.contains(&name), "{name}");
    }
}

#[test]
fn a_cache_that_was_inferred_resolves() {
    let layout = presets::get("yetter").unwrap();
    let shape = [28, 8, 512, 128];
    let tensors = ["key_cache", "value_cache"].map(|n| TensorInfo::contiguous(n, DType::Float16, &shape));
    let cache = layout.infer_cache(&tensors).unwrap();
    assert_eq!(cache, CacheSpec::full(28, 8, 128));
    assert!(layout.resolve(&cache, &tensors, &LiveRows::seen(300)).is_ok());
}

#[test]
fn heads_apart_and_codes_are_counted() {
    let text = "name = \"t\"\n[[tensor]]\nname = \"{k|v}/l{layer},h{kv_head}\"\nholds = \"key-and-value\"\n\
                axes = \"row head_dim\"";
    let layout = Layout::from_toml(text).unwrap();
    let cache = CacheSpec::full(2, 3, 8);
    assert_eq!(layout.infer_cache(&layout.tensors(&cache, &sizes()).unwrap()), Ok(cache));
    let both = |name: &str, role: &str| {
        format!(
            "[[tensor]]\nname = \"{{k|v}}{name}\"\nholds = \"key-and-value\"\naxes = \"layer kv_head row head_dim\"\n\
             encoding = {{ bits = 3, group_size = 32 }}\nrole = \"{role}\"\n"
        )
    };
    let text = "name = \"t\"\n".to_owned() + &both("", "elements") + &both("s", "scale") + &both("b", "bias");
    let layout = Layout::from_toml(&text).unwrap();
    let cache = CacheSpec::full(2, 3, 96);
    assert_eq!(layout.infer_cache(&layout.tensors(&cache, &sizes()).unwrap()), Ok(cache));
}

#[test]
fn keys_and_values_may_differ_in_lanes() {
    let layout = presets::get("kvbaton-per-layer").unwrap();
    let spec = LayerSpec::Full { kv_heads: 2, key_dim: 6, value_dim: 4 };
    let cache = CacheSpec { layers: vec![spec; 3] };
    assert_eq!(layout.infer_cache(&layout.tensors(&cache, &sizes()).unwrap()), Ok(cache));
}

#[test]
fn tensors_that_disagree_are_refused() {
    let layout = presets::get("kvbaton-per-layer").unwrap();
    let good = layout.tensors(&CacheSpec::full(3, 2, 4), &sizes()).unwrap();
    let change = |name: &str, shape: &[usize]| {
        let mut tensors = good.clone();
        let at = tensors.iter().position(|t| t.name == name).unwrap();
        tensors[at] = TensorInfo::contiguous(name, DType::Float16, shape);
        layout.infer_cache(&tensors).unwrap_err().to_string()
    };
    let error = change("value_cache_1", &[1, 3, 16, 4]);
    assert!(error.contains("axis kv_head: the layout needs 2, the tensor has 3"), "{error}");
    let error = change("key_cache_1", &[2, 2, 16, 4]);
    assert!(error.contains("axis batch"), "{error}");
    let error = change("key_cache_1", &[2, 16, 4]);
    assert!(error.contains("has 3 dimensions"), "{error}");
    let error = layout.infer_cache(&good[..5]).unwrap_err();
    assert_eq!(error, LayoutError::Uncovered { layer: 2, part: Part::Value });
    let error = layout.infer_cache(&[]).unwrap_err().to_string();
    assert!(error.contains("`key_cache_0`"), "{error}");
}

#[test]
fn listed_layers_take_their_numbers() {
    let text = "name = \"t\"\n[[tensor]]\nname = \"{k|v}_a\"\nholds = \"key-and-value\"\n\
                axes = \"layer kv_head row head_dim\"\nlayers = [1, 0]\n[[tensor]]\nname = \"{k|v}{layer}\"\n\
                holds = \"key-and-value\"\naxes = \"kv_head row head_dim\"\nlayers = [2]";
    let layout = Layout::from_toml(text).unwrap();
    let cache = CacheSpec::full(3, 2, 4);
    let tensors = layout.tensors(&cache, &sizes()).unwrap();
    assert_eq!(layout.infer_cache(&tensors), Ok(cache));
    let mut more = tensors;
    more[0] = TensorInfo::contiguous("k_a", DType::Float16, &[3, 2, 16, 4]);
    let error = layout.infer_cache(&more).unwrap_err().to_string();
    assert!(error.contains("axis layer: the layout needs 2, the tensor has 3"), "{error}");
}
