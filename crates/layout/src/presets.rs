//! The layouts that ship with kvbaton, by name.

use crate::{Layout, LayoutError};

/// Name and text of every preset, in the order in which they are listed.
const PRESETS: &[(&str, &str)] = &[
    ("kvbaton-stacked", include_str!("../presets/kvbaton-stacked.toml")),
    ("kvbaton-grouped", include_str!("../presets/kvbaton-grouped.toml")),
    ("kvbaton-per-layer", include_str!("../presets/kvbaton-per-layer.toml")),
    ("mlx-lm", include_str!("../presets/mlx-lm.toml")),
    ("mlx-lm-8bit", include_str!("../presets/mlx-lm-8bit.toml")),
    ("mlx-lm-4bit", include_str!("../presets/mlx-lm-4bit.toml")),
    ("mlx-lm-batch", include_str!("../presets/mlx-lm-batch.toml")),
    ("mlx-lm-chunked", include_str!("../presets/mlx-lm-chunked.toml")),
    ("mlx-swift-lm", include_str!("../presets/mlx-swift-lm.toml")),
    ("mlx-swift-lm-8bit", include_str!("../presets/mlx-swift-lm-8bit.toml")),
    ("yetter", include_str!("../presets/yetter.toml")),
    ("atomgradient-coreml", include_str!("../presets/atomgradient-coreml.toml")),
    ("atomgradient-file", include_str!("../presets/atomgradient-file.toml")),
    ("coreml-llm-sliding", include_str!("../presets/coreml-llm-sliding.toml")),
    ("coreml-llm-sliding-outputs", include_str!("../presets/coreml-llm-sliding-outputs.toml")),
    ("coreml-llm-chunked", include_str!("../presets/coreml-llm-chunked.toml")),
    ("coreml-llm-prefill", include_str!("../presets/coreml-llm-prefill.toml")),
    ("coreml-llm-shared", include_str!("../presets/coreml-llm-shared.toml")),
    ("coreml-llm-litert", include_str!("../presets/coreml-llm-litert.toml")),
    ("coreml-llm-stateful", include_str!("../presets/coreml-llm-stateful.toml")),
    ("coreml-llm-stateful-shift", include_str!("../presets/coreml-llm-stateful-shift.toml")),
    ("coreml-llm-qwen3-5", include_str!("../presets/coreml-llm-qwen3-5.toml")),
    ("coreml-llm-qwen3-vl", include_str!("../presets/coreml-llm-qwen3-vl.toml")),
    ("coreml-llm-rolling", include_str!("../presets/coreml-llm-rolling.toml")),
    ("anemll", include_str!("../presets/anemll.toml")),
    ("anemll-chunked", include_str!("../presets/anemll-chunked.toml")),
    ("forge", include_str!("../presets/forge.toml")),
    ("forge-v8", include_str!("../presets/forge-v8.toml")),
    ("forge-drafter", include_str!("../presets/forge-drafter.toml")),
    ("coreai-macos", include_str!("../presets/coreai-macos.toml")),
    ("coreai-ios", include_str!("../presets/coreai-ios.toml")),
    ("coreai-gemma4", include_str!("../presets/coreai-gemma4.toml")),
    ("coreai-qwen3-5", include_str!("../presets/coreai-qwen3-5.toml")),
    ("smpanaro-llama2", include_str!("../presets/smpanaro-llama2.toml")),
    ("smpanaro-gpt2", include_str!("../presets/smpanaro-gpt2.toml")),
    ("swift-transformers", include_str!("../presets/swift-transformers.toml")),
    ("apple-mistral", include_str!("../presets/apple-mistral.toml")),
    ("whisperkit", include_str!("../presets/whisperkit.toml")),
    ("executorch-static", include_str!("../presets/executorch-static.toml")),
    ("executorch-static-shift", include_str!("../presets/executorch-static-shift.toml")),
    ("executorch-static-heads", include_str!("../presets/executorch-static-heads.toml")),
    (
        "executorch-static-heads-transposed",
        include_str!("../presets/executorch-static-heads-transposed.toml"),
    ),
    ("executorch-mlx", include_str!("../presets/executorch-mlx.toml")),
    ("vllm-metal", include_str!("../presets/vllm-metal.toml")),
    ("vllm-nhd", include_str!("../presets/vllm-nhd.toml")),
    ("vllm-hnd", include_str!("../presets/vllm-hnd.toml")),
    ("vllm-fused", include_str!("../presets/vllm-fused.toml")),
    ("exo", include_str!("../presets/exo.toml")),
    ("ane-infer-cpu", include_str!("../presets/ane-infer-cpu.toml")),
    ("ane-infer-gpu", include_str!("../presets/ane-infer-gpu.toml")),
    ("aneforge", include_str!("../presets/aneforge.toml")),
    ("recurrent", include_str!("../presets/recurrent.toml")),
    ("llama-cpp", include_str!("../presets/llama-cpp.toml")),
    ("llama-cpp-v-transposed", include_str!("../presets/llama-cpp-v-transposed.toml")),
];

/// The names of all presets.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// The TOML text of the preset called `name`.
pub fn text(name: &str) -> Option<&'static str> {
    PRESETS.iter().find(|(n, _)| *n == name).map(|(_, text)| *text)
}

/// The preset called `name`.
///
/// # Errors
///
/// When there is none.
pub fn get(name: &str) -> Result<Layout, LayoutError> {
    let text = text(name).ok_or_else(|| LayoutError::UnknownLayout { name: name.to_owned() })?;
    Layout::from_toml(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_reads_back_as_written() {
        for name in names() {
            let layout = get(name).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(layout.name, name);
            assert_eq!(Layout::from_toml(&layout.to_toml()).unwrap(), layout);
        }
    }
}
