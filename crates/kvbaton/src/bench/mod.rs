//! Measuring: what `kvbaton bench` prints.
//!
//! Every figure is a share of a memcpy measured in the same run, interleaved with what it is compared to, and
//! every answer is checked before its time is believed.

mod handoff;
mod machine;
mod prefill;

pub use handoff::{HandoffBench, HandoffBenchReport, HandoffRow, MemcpyRow, bench_handoff};
pub use machine::{Machine, resident_bytes};
pub use prefill::{PrefillRow, bench_prefill};

use kvbaton_layout::{CacheSpec, LayerSpec, Window};

/// The cache of a model that benches know by name.
pub fn shape(name: &str) -> Option<CacheSpec> {
    let sliding = |kv_heads, dim, size| LayerSpec::Sliding {
        kv_heads,
        key_dim: dim,
        value_dim: dim,
        window: Window { size, keep: 0 },
    };
    let full = |kv_heads, dim| LayerSpec::Full { kv_heads, key_dim: dim, value_dim: dim };
    Some(match name {
        "smollm2-135m" => CacheSpec::full(30, 3, 64),
        "qwen3-0.6b" => CacheSpec::full(28, 8, 128),
        "qwen3-4b" => CacheSpec::full(36, 8, 128),
        "llama-3.1-8b" => CacheSpec::full(32, 8, 128),
        // Gemma 3: five sliding layers, then a full one.
        "gemma3-270m" => CacheSpec {
            layers: (0..18).map(|l| if l % 6 == 5 { full(1, 256) } else { sliding(1, 256, 512) }).collect(),
        },
        "gemma3-27b" => CacheSpec {
            layers: (0..62)
                .map(|l| if l % 6 == 5 { full(16, 128) } else { sliding(16, 128, 1024) })
                .collect(),
        },
        // gpt-oss: sliding and full in turn.
        "gpt-oss-20b" => CacheSpec {
            layers: (0..24).map(|l| if l % 2 == 0 { sliding(8, 64, 128) } else { full(8, 64) }).collect(),
        },
        // Qwen3.8: three recurrent layers, then a full one.
        "qwen3.8-27b" => CacheSpec {
            layers: (0..64)
                .map(|l| {
                    if l % 4 == 3 {
                        full(4, 256)
                    } else {
                        LayerSpec::Recurrent {
                            conv_steps: 3,
                            conv_channels: 10_240,
                            heads: 48,
                            value_dim: 128,
                            key_dim: 128,
                        }
                    }
                })
                .collect(),
        },
        _ => return None,
    })
}

/// The names that [`shape`] knows.
pub const SHAPES: [&str; 8] = [
    "smollm2-135m",
    "qwen3-0.6b",
    "qwen3-4b",
    "llama-3.1-8b",
    "gemma3-270m",
    "gemma3-27b",
    "gpt-oss-20b",
    "qwen3.8-27b",
];
