//! What a hand-off must know of a model: its cache, layer by layer, and what makes two models the same.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Tokens the layer attends to.
    pub size: usize,
    /// Tokens at the start of the context that stay (attention sinks).
    #[serde(default)]
    pub keep: usize,
}

/// What one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum LayerSpec {
    /// Attention over the whole context.
    Full {
        /// KV heads.
        kv_heads: usize,
        /// Lanes of one key head.
        key_dim: usize,
        /// Lanes of one value head.
        value_dim: usize,
    },
    /// Attention over a window.
    Sliding {
        /// KV heads.
        kv_heads: usize,
        /// Lanes of one key head.
        key_dim: usize,
        /// Lanes of one value head.
        value_dim: usize,
        /// The window.
        window: Window,
    },
    /// A convolution state and a recurrent state; either may be absent (0 steps, 0 heads).
    Recurrent {
        /// Steps of the convolution state: its kernel minus one.
        conv_steps: usize,
        /// Channels of the convolution state.
        conv_channels: usize,
        /// Heads of the recurrent state.
        heads: usize,
        /// Value lanes of the recurrent state.
        value_dim: usize,
        /// Key lanes of the recurrent state.
        key_dim: usize,
    },
    /// Reads the cache of another layer and keeps none.
    Shared {
        /// The layer that keeps it.
        with: usize,
    },
}

impl LayerSpec {
    /// The kind's name in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            LayerSpec::Full { .. } => "full",
            LayerSpec::Sliding { .. } => "sliding",
            LayerSpec::Recurrent { .. } => "recurrent",
            LayerSpec::Shared { .. } => "shared",
        }
    }

    /// (KV heads, key lanes, value lanes) of an attention layer.
    pub fn attention(&self) -> Option<(usize, usize, usize)> {
        match *self {
            LayerSpec::Full { kv_heads, key_dim, value_dim }
            | LayerSpec::Sliding { kv_heads, key_dim, value_dim, .. } => Some((kv_heads, key_dim, value_dim)),
            _ => None,
        }
    }

    /// The window of a sliding layer.
    pub fn window(&self) -> Option<Window> {
        match self {
            LayerSpec::Sliding { window, .. } => Some(*window),
            _ => None,
        }
    }
}

/// The cache of a model, layer by layer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CacheSpec {
    /// One entry a layer of the model, in order.
    pub layers: Vec<LayerSpec>,
}

impl CacheSpec {
    /// `layers` layers of full attention, all alike.
    pub fn full(layers: usize, kv_heads: usize, head_dim: usize) -> CacheSpec {
        CacheSpec {
            layers: vec![LayerSpec::Full { kv_heads, key_dim: head_dim, value_dim: head_dim }; layers],
        }
    }

    /// The same model's cache of `layers` alone: the others are marked as kept elsewhere.
    #[must_use]
    pub fn only(&self, layers: &Range<usize>) -> CacheSpec {
        let own = |(number, spec): (usize, &LayerSpec)| {
            if layers.contains(&number) { *spec } else { LayerSpec::Shared { with: number } }
        };
        CacheSpec { layers: self.layers.iter().enumerate().map(own).collect() }
    }
}

/// Rotary position embedding, as far as it decides what the keys hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    /// `half-split` (Hugging Face, MLX's `traditional=False`) or `interleaved`.
    pub kind: String,
    /// The base of the frequencies.
    pub theta: f64,
    /// Lanes that are rotated.
    pub dims: usize,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched for long contexts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Positions divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1's by frequency band.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Lower band edge.
        low_freq_factor: f64,
        /// Upper band edge.
        high_freq_factor: f64,
        /// Context the model was first trained at.
        original_max_position_embeddings: f64,
    },
}

/// What a package, a cache or a decoder says of its model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// The architecture's name, `llama`, `qwen3`, …
    pub architecture: String,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Type of the cache's elements, or of the weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// Rotary embedding of the keys.
    pub rope: RopeSpec,
    /// The cache, layer by layer.
    #[serde(rename = "layers")]
    pub cache: CacheSpec,
    /// BLAKE3 of the weights it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weights_digest: Option<String>,
}

/// A field in which two models differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mismatch {
    /// The field: `layers`, `kv_heads`, `head_dim`, `window`, `rope`, `vocab_size`, `weights_digest`.
    pub field: &'static str,
    /// Where, when it concerns one layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// The producer's value.
    pub source: String,
    /// The consumer's value.
    pub target: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.field)?;
        if let Some(layer) = self.layer {
            write!(f, " of layer {layer}")?;
        }
        write!(f, " differs: {} here, {} there", self.source, self.target)
    }
}

impl ModelSpec {
    /// The fields in which a cache of `self` does not serve a decoder of `other`, weights aside.
    ///
    /// Architecture names are not compared: what they imply for the cache is.
    pub fn differences(&self, other: &ModelSpec) -> Vec<Mismatch> {
        let mut found = Vec::new();
        let mut compare = |field, layer, source: String, target: String| {
            if source != target {
                found.push(Mismatch { field, layer, source, target });
            }
        };
        let (a, b) = (&self.cache.layers, &other.cache.layers);
        compare("layers", None, a.len().to_string(), b.len().to_string());
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            compare("layer kind", Some(i), a.kind().to_owned(), b.kind().to_owned());
            if let (Some((ah, ak, av)), Some((bh, bk, bv))) = (a.attention(), b.attention()) {
                compare("kv_heads", Some(i), ah.to_string(), bh.to_string());
                compare("head_dim", Some(i), ak.to_string(), bk.to_string());
                compare("value head_dim", Some(i), av.to_string(), bv.to_string());
            } else if a.kind() == b.kind() {
                compare("layer", Some(i), format!("{a:?}"), format!("{b:?}"));
            }
            if let (Some(a), Some(b)) = (a.window(), b.window()) {
                compare("window", Some(i), a.size.to_string(), b.size.to_string());
            }
        }
        compare("vocab_size", None, self.vocab_size.to_string(), other.vocab_size.to_string());
        compare("rope", None, self.rope.to_string(), other.rope.to_string());
        found
    }
}

impl fmt::Display for RopeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} theta {} over {} lanes", self.kind, self.theta, self.dims)?;
        match &self.scaling {
            RopeScaling::Default => Ok(()),
            RopeScaling::Linear { factor } => write!(f, ", linear {factor}"),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original,
            } => write!(f, ", llama3 {factor} ({low_freq_factor}..{high_freq_factor}, {original})"),
        }
    }
}
