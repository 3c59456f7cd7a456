//! How much work a model is, from its folder or by its name.

use std::path::Path;

use kvbaton_layout::{CacheSpec, DType};
use kvbaton_memory::Mapped;
use kvbaton_plan::route::{Attention, ModelWork};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::digest::weight_files;
use crate::{Error, ErrorKind};

/// The work of a model that is known by name, its weights in float16.
pub fn built_in_work(name: &str) -> Option<ModelWork> {
    let (weights, query_width) = match name {
        "smollm2-135m" => (134.5e6, 576),
        "qwen3-0.6b" => (596e6, 2048),
        "qwen3-4b" => (4.02e9, 4096),
        "llama-3.1-8b" => (7.50e9, 4096),
        "gemma3-270m" => (268e6, 1024),
        "gemma3-27b" => (27.0e9, 4096),
        // 3.6·10⁹ of 21·10⁹ weights are active.
        "gpt-oss-20b" => (3.6e9, 4096),
        "qwen3.8-27b" => (27.0e9, 6144),
        _ => return None,
    };
    let held = if name == "gpt-oss-20b" { 20.9e9 } else { weights };
    let cache = crate::bench::shape(name)?;
    let attention = attention(&cache, query_width);
    Some(ModelWork { active_weights: weights, weight_bytes: 2.0 * held, attention })
}

/// The work of the model in `folder`: its weights from the headers of its safetensors files, its query heads from
/// config.json. `dtype` is the type that floating-point weights will be held in; their own when absent.
///
/// # Errors
///
/// When config.json or a weight file cannot be read, or says nothing of the query heads.
pub fn model_work(folder: &Path, cache: &CacheSpec, dtype: Option<DType>) -> Result<ModelWork, Error> {
    let wrong = |problem: String| {
        Error::new(ErrorKind::Model, format!("`{}`: {problem}", folder.join("config.json").display()))
    };
    let text = std::fs::read_to_string(folder.join("config.json")).map_err(|e| wrong(e.to_string()))?;
    let config: Value = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    let find = |name: &str| config.get(name).or_else(|| config.get("text_config")?.get(name));
    let number = |name: &str| find(name).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
    let heads = number("num_attention_heads").ok_or_else(|| wrong("no num_attention_heads".to_owned()))?;
    let lanes = cache.layers.iter().find_map(|l| l.attention()).map(|(_, key, _)| key);
    let width = heads * lanes.or_else(|| number("head_dim")).unwrap_or(0);
    let tied = find("tie_word_embeddings").and_then(Value::as_bool).unwrap_or(false);
    let bits = config.get("quantization").and_then(|q| q.get("bits")).and_then(Value::as_u64).unwrap_or(4);
    let experts = ["num_local_experts", "num_experts", "n_routed_experts"].iter().find_map(|n| number(n));
    let active = number("num_experts_per_tok").or_else(|| number("experts_per_token"));
    let expert_share = match (active, experts) {
        (Some(active), Some(experts)) if experts > 0 => active as f64 / experts as f64,
        _ => 1.0,
    };

    let (mut active_weights, mut weight_bytes, mut head) = (0.0, 0.0, false);
    let mut embedding = 0.0;
    for path in weight_files(folder)? {
        let unreadable = |e: String| Error::new(ErrorKind::Model, format!("`{}`: {e}", path.display()));
        let map = Mapped::open(&path).map_err(|e| unreadable(e.to_string()))?;
        let (_, header) = SafeTensors::read_metadata(&map).map_err(|e| unreadable(e.to_string()))?;
        for (name, info) in header.tensors() {
            let stored: usize = info.shape.iter().product();
            let float = matches!(info.dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32);
            let size = match dtype {
                Some(dtype) if float => dtype.size_bytes() as f64,
                _ => info.dtype.bitsize() as f64 / 8.0,
            };
            weight_bytes += stored as f64 * size;
            // Norms and biases are no products; scales and biases of codes belong to their codes.
            if info.shape.len() < 2 || name.ends_with(".scales") || name.ends_with(".biases") {
                continue;
            }
            let words = info.dtype == Dtype::U32;
            let weights = stored as f64 * if words { 32.0 / bits as f64 } else { 1.0 };
            if name.contains("embed_tokens") || name.contains("wte.") {
                embedding += weights;
                continue;
            }
            head |= name.contains("lm_head");
            active_weights += weights * if name.contains("experts") { expert_share } else { 1.0 };
        }
    }
    // A tied embedding is the output projection, too.
    if tied || !head {
        active_weights += embedding;
    }
    Ok(ModelWork { active_weights, weight_bytes, attention: attention(cache, width) })
}

/// Attention layers in groups of one window.
fn attention(cache: &CacheSpec, width: usize) -> Vec<Attention> {
    let mut groups: Vec<Attention> = Vec::new();
    for layer in cache.layers.iter().filter(|l| l.attention().is_some()) {
        let window = layer.window().map(|w| w.size);
        match groups.iter_mut().find(|g| g.window == window) {
            Some(group) => group.layers += 1,
            None => groups.push(Attention { layers: 1, width, window }),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::SHAPES;

    #[test]
    fn every_built_in_shape_has_its_work() {
        for name in SHAPES {
            let work = built_in_work(name).unwrap();
            assert!(work.weight_bytes >= work.active_weights && !work.attention.is_empty(), "{name}");
        }
        assert_eq!(built_in_work("gpt-9"), None);
    }

    fn folder(config: &str, tensors: &[(&str, Dtype, &[usize])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let bytes = vec![0; 1 << 16];
        let views = tensors.iter().map(|(name, dtype, shape)| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (*name, safetensors::tensor::TensorView::new(*dtype, shape.to_vec(), &bytes[..len]).unwrap())
        });
        let file = folder.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &file).unwrap();
        folder
    }

    #[test]
    fn a_folders_work_counts_products_alone() {
        let cache = CacheSpec::full(2, 2, 8);
        let config = |tied: bool| format!("{{\"num_attention_heads\": 4, \"tie_word_embeddings\": {tied}}}");
        let tensors: [(&str, Dtype, &[usize]); 3] = [
            ("model.embed_tokens.weight", Dtype::F16, &[50, 10]),
            ("model.layers.0.mlp.up_proj.weight", Dtype::F16, &[30, 10]),
            ("model.norm.weight", Dtype::F16, &[10]),
        ];
        let tied = model_work(folder(&config(true), &tensors).path(), &cache, None).unwrap();
        assert_eq!((tied.active_weights, tied.weight_bytes), (800.0, 1620.0));
        assert_eq!(tied.attention, [Attention { layers: 2, width: 32, window: None }]);
        let mut untied = tensors.to_vec();
        untied.push(("lm_head.weight", Dtype::F16, &[50, 10]));
        let own = folder(&config(false), &untied);
        let work = model_work(own.path(), &cache, Some(DType::Float32)).unwrap();
        assert_eq!((work.active_weights, work.weight_bytes), (800.0, 5240.0));
    }

    #[test]
    fn codes_count_as_the_weights_they_stand_for_and_experts_by_their_share() {
        let config = "{\"num_attention_heads\": 4, \"quantization\": {\"bits\": 4, \"group_size\": 64}, \
            \"num_experts\": 8, \"num_experts_per_tok\": 2}";
        let tensors: [(&str, Dtype, &[usize]); 3] = [
            ("model.layers.0.mlp.experts.up.weight", Dtype::U32, &[8, 16, 4]),
            ("model.layers.0.mlp.experts.up.scales", Dtype::F16, &[8, 16, 1]),
            ("lm_head.weight", Dtype::F16, &[5, 32]),
        ];
        let work = model_work(folder(config, &tensors).path(), &CacheSpec::full(1, 2, 8), None).unwrap();
        assert_eq!(work.active_weights, 8.0 * 16.0 * 32.0 / 4.0 + 160.0);
    }

    #[test]
    fn a_config_without_heads_is_refused() {
        let own = folder("{}", &[("a", Dtype::F16, &[2, 2])]);
        let error = model_work(own.path(), &CacheSpec::full(1, 2, 8), None).unwrap_err();
        assert!(error.to_string().contains("num_attention_heads"), "{error}");
    }
}
