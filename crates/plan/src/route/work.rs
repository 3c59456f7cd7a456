//! How much a model has to do, whatever runs it.

use kvbaton_layout::{CacheSpec, LayerSpec};
use serde::{Deserialize, Serialize};

/// Attention layers that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// How many layers.
    pub layers: usize,
    /// Query heads times head_dim, of one layer.
    pub width: usize,
    /// Tokens that a token attends to at most; all before it when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
}

/// A model's work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelWork {
    /// Weights that a token is multiplied with: those of the active experts, the output projection, not the lookup of
    /// an embedding.
    pub active_weights: f64,
    /// Bytes of all weights as the decoder holds them.
    pub weight_bytes: f64,
    /// Attention.
    pub attention: Vec<Attention>,
}

impl ModelWork {
    /// Floating-point operations outside attention for `tokens` tokens.
    pub fn token_flops(&self, tokens: usize) -> f64 {
        2.0 * self.active_weights * tokens as f64
    }

    /// Floating-point operations of causal attention over `tokens` tokens: two products of a row with each of those
    /// before it.
    pub fn attention_flops(&self, tokens: usize) -> f64 {
        let n = tokens as f64;
        self.attention
            .iter()
            .map(|a| {
                let w = a.window.map_or(n, |w| n.min(w as f64));
                // The first w tokens see all before them, the others w.
                let pairs = w * (w + 1.0) / 2.0 + (n - w) * w;
                4.0 * (a.layers * a.width) as f64 * pairs
            })
            .sum()
    }

    /// Whether figures of `other` are figures of this model: they agree to a part in a thousand, but for the bytes of
    /// the weights, which another type or quantisation changes.
    pub fn is_like(&self, other: &ModelWork) -> bool {
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-3 * a.abs().max(b.abs());
        near(self.active_weights, other.active_weights) && self.attention == other.attention
    }
}

/// Bytes of the rows that a cache of `tokens` tokens holds, in elements of `element_bytes`; recurrent states are held
/// in float32.
pub(crate) fn cache_bytes(cache: &CacheSpec, tokens: usize, element_bytes: usize) -> usize {
    cache
        .layers
        .iter()
        .map(|layer| match *layer {
            LayerSpec::Full { kv_heads, key_dim, value_dim } => {
                tokens * kv_heads * (key_dim + value_dim) * element_bytes
            }
            LayerSpec::Sliding { kv_heads, key_dim, value_dim, window } => {
                tokens.min(window.size) * kv_heads * (key_dim + value_dim) * element_bytes
            }
            LayerSpec::Recurrent { conv_steps, conv_channels, heads, value_dim, key_dim } => {
                conv_steps * conv_channels * element_bytes + heads * value_dim * key_dim * 4
            }
            LayerSpec::Shared { .. } => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use kvbaton_layout::Window;

    use super::*;

    #[test]
    fn attention_counts_the_pairs_that_a_mask_shows() {
        let naive = |n: usize, window: Option<usize>| -> usize {
            (0..n).map(|i| (i + 1).min(window.unwrap_or(usize::MAX))).sum()
        };
        for (n, window) in [(1, None), (7, None), (5, Some(8)), (8, Some(8)), (40, Some(8))] {
            let work = ModelWork {
                active_weights: 0.0,
                weight_bytes: 0.0,
                attention: vec![Attention { layers: 3, width: 10, window }],
            };
            assert_eq!(work.attention_flops(n), (4 * 3 * 10 * naive(n, window)) as f64);
        }
    }

    #[test]
    fn a_cache_holds_its_windows_and_states() {
        let window = Window { size: 4, keep: 0 };
        let cache = CacheSpec {
            layers: vec![
                LayerSpec::Full { kv_heads: 2, key_dim: 8, value_dim: 4 },
                LayerSpec::Sliding { kv_heads: 2, key_dim: 8, value_dim: 4, window },
                LayerSpec::Recurrent { conv_steps: 3, conv_channels: 10, heads: 2, value_dim: 5, key_dim: 7 },
                LayerSpec::Shared { with: 0 },
            ],
        };
        assert_eq!(cache_bytes(&cache, 10, 2), 10 * 24 * 2 + 4 * 24 * 2 + 30 * 2 + 70 * 4);
    }
}
