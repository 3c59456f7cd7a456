"""Tiny random mlx-lm models of every family whose caches differ, in float32 unless asked otherwise."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

VOCAB = 64
WINDOW = 8

_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "model_type": "llama"},
    "llama_wide": {**_SMALL, "model_type": "llama", "head_dim": 64},
    "gemma3": {
        **_SMALL,
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {
        **_SMALL,
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_scaling": None,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {
        **_SMALL,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 16,
        "mlp_only_layers": [0, 1, 2, 3],
        "moe_intermediate_size": 16,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 2,
    },
    "llama4": {
        "model_type": "llama4",
        "text_config": {
            **_SMALL,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 5,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    # A chunk that no test fills.
    "llama4_long": {},
    "gemma3n": {
        "model_type": "gemma3n",
        "text_config": {
            **_SMALL,
            "model_type": "gemma3n_text",
            "num_hidden_layers": 6,
            "intermediate_size": [48] * 6,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCAB,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "activation_sparsity_pattern": [0.0] * 6,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
            "rope_scaling": None,
            "query_pre_attn_scalar": 8,
        },
    },
    "falcon_h1": {
        **_SMALL,
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_conv": 4,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
    },
}
CONFIGS["llama4_long"] = {
    **CONFIGS["llama4"],
    "text_config": {**CONFIGS["llama4"]["text_config"], "attention_chunk_size": 4096},
}


def build(family: str, dtype: Any = mx.float32, seed: int = 7) -> Any:
    """A model of ``family`` with random weights, large enough that tokens differ."""
    config = CONFIGS[family]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), 4096))
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if not mx.issubdtype(value.dtype, mx.floating):
            weights.append((name, value))
            continue
        noise = mx.random.normal(value.shape, key=next(keys))
        if "norm" in name and value.ndim == 1:
            noise = value + 0.1 * noise
        elif value.ndim == 1:
            noise = value + 0.2 * noise
        else:
            noise = 1.5 * noise * value.shape[-1] ** -0.5
        weights.append((name, noise.astype(dtype)))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model


def prompt(length: int, seed: int = 3) -> list[int]:
    """Fixed token ids that do not repeat in a short period."""
    return [(seed + 7 * i * i + 3 * i + (i // 5) * 11) % VOCAB for i in range(length)]
