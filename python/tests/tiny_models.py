"""Tiny random MLX model folders, one for every kind of checkpoint that export supports.

    python python/tests/tiny_models.py OUT_FOLDER

Each has 3 layers, 512 tokens of vocabulary and a fixed seed; ``mlx_lm.load`` takes all of them. Weights are
scaled so that activations keep a realistic size, and norm gains, biases and q/k norms differ from their
neutral values, so that dropping one changes the logits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Json = dict[str, Any]

VOCAB = 512
BASE: Json = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN2: Json = {**BASE, "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
QWEN3: Json = {**QWEN2, "model_type": "qwen3", "head_dim": 32}
LLAMA3_SCALING: Json = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short enough that every branch of the formula is taken by a head of 16 lanes.
    "original_max_position_embeddings": 64,
}

GEMMA3: Json = {
    **{key: value for key, value in BASE.items() if key not in ("hidden_act", "tie_word_embeddings")},
    "model_type": "gemma3_text",
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    # Every third of the layers is full; prompts of the tests are longer than the window.
    "sliding_window": 12,
    "sliding_window_pattern": 3,
}

CONFIGS: dict[str, Json] = {
    "llama_tied": BASE,
    "llama_untied": {**BASE, "tie_word_embeddings": False},
    "llama_biases": {**BASE, "attention_bias": True, "mlp_bias": True},
    "llama_linear_rope": {**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3_rope": {**BASE, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "llama_no_groups": {**BASE, "num_key_value_heads": 4},
    "mistral": {
        **BASE,
        "model_type": "mistral",
        "head_dim": 24,
        "tie_word_embeddings": False,
        "sliding_window": 32,
    },
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_nested_rope": {
        **{key: value for key, value in QWEN3.items() if key != "rope_theta"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    },
    "gemma3": GEMMA3,
    "llama_4bit": BASE,
    "llama_sharded_bf16": {**BASE, "torch_dtype": "bfloat16"},
}


def shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, as mlx-lm's models of that type declare them."""
    kind = config["model_type"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = kind == "qwen2" or config.get("attention_bias", False)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, hidden)}
    if not config.get("tie_word_embeddings", True):
        found["lm_head.weight"] = (VOCAB, hidden)
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}."
        found[path + "input_layernorm.weight"] = (hidden,)
        found[path + "post_attention_layernorm.weight"] = (hidden,)
        for name, outputs, inputs, bias in (
            ("self_attn.q_proj", queries, hidden, qkv_bias),
            ("self_attn.k_proj", kv, hidden, qkv_bias),
            ("self_attn.v_proj", kv, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, queries, config.get("attention_bias", False)),
            ("mlp.gate_proj", inner, hidden, config.get("mlp_bias", False)),
            ("mlp.up_proj", inner, hidden, config.get("mlp_bias", False)),
            ("mlp.down_proj", hidden, inner, config.get("mlp_bias", False)),
        ):
            found[f"{path}{name}.weight"] = (outputs, inputs)
            if bias:
                found[f"{path}{name}.bias"] = (outputs,)
        if kind == "gemma3_text":
            found[path + "pre_feedforward_layernorm.weight"] = (hidden,)
            found[path + "post_feedforward_layernorm.weight"] = (hidden,)
        if kind in ("qwen3", "gemma3_text"):
            found[path + "self_attn.q_norm.weight"] = (head_dim,)
            found[path + "self_attn.k_norm.weight"] = (head_dim,)
    found["model.norm.weight"] = (hidden,)
    return found


def random_weights(config: Json, seed: int) -> dict[str, Array]:
    """f32 values that fp16 holds exactly."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for name, shape in shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            # Gemma stores gains minus one; gains that fp16 holds either way.
            values = (1 + 0.2 * values).astype(np.float16) - (config["model_type"] == "gemma3_text")
        elif name.endswith("bias"):
            values = 0.3 * values
        elif name.startswith("model.embed_tokens"):
            values = 0.5 * values
        else:
            values = 1.5 * values * shape[-1] ** -0.5
        tensors[name] = values.astype(np.float16).astype(np.float32)
    return tensors


def save_safetensors(tensors: dict[str, Array], file: Path, bfloat16: bool = False) -> None:
    """Writes one safetensors file; bfloat16 keeps the upper half of each f32 (cut, not rounded)."""
    names = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.uint32): "U32"}
    header: Json = {"__metadata__": {"format": "mlx"}}
    chunks, offset = [], 0
    for name, values in sorted(tensors.items()):
        if bfloat16:
            data = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            data = np.ascontiguousarray(values).tobytes()
        dtype = "BF16" if bfloat16 else names[values.dtype]
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def quantize(values: Array, bits: int, group_size: int) -> tuple[Array, Array, Array]:
    """MLX affine packing of (rows, lanes), bits dividing 32: packed u32, scales and biases in fp16."""
    rows, lanes = values.shape
    groups = values.reshape(rows, lanes // group_size, group_size)
    low, high = groups.min(-1), groups.max(-1)
    scales = ((high - low) / (2**bits - 1)).astype(np.float16)
    biases = low.astype(np.float16)
    codes = np.rint((groups - biases[..., None].astype(np.float32)) / scales[..., None].astype(np.float32))
    codes = codes.clip(0, 2**bits - 1).astype(np.uint32).reshape(rows, -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (codes << shifts).sum(-1, dtype=np.uint32), scales, biases


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer whose words are ``t0`` … ``t511``: enough for mlx-lm to load the folder."""
    model = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(VOCAB)}, "unk_token": "t2"}
    content: Json = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_quantized(folder: Path, config: Json, tensors: dict[str, Array]) -> None:
    """Packs all matrices with 4 bits in groups of 32, but the first layer's ``down_proj`` with 8."""
    finer = "model.layers.0.mlp.down_proj"
    entry: Json = {"group_size": 32, "bits": 4, "mode": "affine", finer: {"group_size": 32, "bits": 8}}
    packed: dict[str, Array] = {}
    for name, values in tensors.items():
        if values.ndim == 2:
            path = name.removesuffix(".weight")
            bits = 8 if path == finer else 4
            codes, scales, biases = quantize(values, bits, 32)
            packed |= {name: codes, f"{path}.scales": scales, f"{path}.biases": biases}
        else:
            packed[name] = values.astype(np.float16)
    save_safetensors(packed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization": entry}))


def write_sharded(folder: Path, config: Json, tensors: dict[str, Array]) -> None:
    """Two bf16 files and the index that names them."""
    names = sorted(tensors)
    index: dict[str, str] = {}
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{part:05d}-of-00002.safetensors"
        save_safetensors({name: tensors[name] for name in chosen}, folder / file, bfloat16=True)
        index |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


def write_plain(folder: Path, config: Json, tensors: dict[str, Array]) -> None:
    """One fp16 file."""
    half = {name: values.astype(np.float16) for name, values in tensors.items()}
    save_safetensors(half, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


WRITERS: dict[str, Callable[[Path, Json, dict[str, Array]], None]] = {
    "llama_4bit": write_quantized,
    "llama_sharded_bf16": write_sharded,
}


def build(name: str, parent: Path) -> Path:
    """Writes model ``name`` of :data:`CONFIGS` into ``parent / name`` and returns that folder."""
    folder = parent / name
    folder.mkdir(parents=True)
    config = CONFIGS[name]
    tensors = random_weights(config, seed=list(CONFIGS).index(name))
    WRITERS.get(name, write_plain)(folder, config, tensors)
    write_tokenizer(folder)
    return folder


if __name__ == "__main__":
    for model in CONFIGS:
        print(build(model, Path(sys.argv[1])))
