"""Writes ``torch_outputs.mlpackage`` and ``torch_states.mlpackage``: transformers' Llama, traced and converted.

Run by hand, never by the tests, in an environment of its own: torch is gigabytes.

    python3.11 -m venv torchenv
    torchenv/bin/pip install torch==2.7.1 transformers==4.53.3 coremltools==9.0 safetensors 'numpy<2.4'
    torchenv/bin/python python/tests/foreign/torch_llama.py

Both are ``LlamaForCausalLM`` as transformers has it, with the weights of ``tiny_models.CONFIGS["llama_tied"]``; no
operation is written here. They differ in where the cache goes:

- ``torch_outputs``: 32 tokens in, the logits of all and transformers' own cache, stacked, out.
- ``torch_states``: Apple's way for Llama and Mistral: the cache is two states of 48 rows that a ``Cache`` class updates by
  slices, the prompt and the mask have any length up to that (``RangeDim``), and the mask's width says where it starts.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

import coremltools as ct
import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import Cache, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import tiny_models

CONFIG = tiny_models.CONFIGS["llama_tied"]
LAYERS, KV = CONFIG["num_hidden_layers"], CONFIG["num_key_value_heads"]
D = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
LENGTH = 32
ROWS = 48


def llama() -> LlamaForCausalLM:
    """The model with its random weights, in float32."""
    known = {key: value for key, value in CONFIG.items() if key != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**known, attn_implementation="sdpa")).eval()
    weights: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for file in tiny_models.build("llama_tied", Path(folder)).glob("*.safetensors"):
            weights.update(load_file(file))
    tensors = {name: torch.tensor(value.astype(np.float32)) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"], missing  # the embeddings are the head
    assert not unexpected, unexpected
    return model


class WithOutputs(torch.nn.Module):
    """Leaves the cache of a prompt as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        done = self.model(input_ids=input_ids, use_cache=True)
        layers = [done.past_key_values[layer] for layer in range(LAYERS)]
        return done.logits, torch.stack([k[0] for k, _ in layers]), torch.stack([v[0] for _, v in layers])


class SliceUpdated(Cache):
    """Two buffers of all layers, written by slices."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.seen: Any = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, cache_kwargs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        begin, end = self.seen, self.seen + key_states.shape[2]
        self.keys[layer_idx, :, :KV, begin:end, :] = key_states
        self.values[layer_idx, :, :KV, begin:end, :] = value_states
        return self.keys[layer_idx, :, :, :end, :], self.values[layer_idx, :, :, :end, :]

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        return self.seen  # type: ignore[no-any-return]


class WithStates(torch.nn.Module):
    """Keeps the cache in states."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.register_buffer("keyCache", torch.zeros(LAYERS, 1, KV, ROWS, D))
        self.register_buffer("valueCache", torch.zeros(LAYERS, 1, KV, ROWS, D))
        self.cache = SliceUpdated(self.keyCache, self.valueCache)

    def forward(self, input_ids: torch.Tensor, causal_mask: torch.Tensor) -> torch.Tensor:
        self.cache.seen = causal_mask.shape[-1] - input_ids.shape[-1]
        done = self.model(
            input_ids=input_ids, attention_mask=causal_mask, past_key_values=self.cache, use_cache=True
        )
        return done.logits  # type: ignore[no-any-return]


def save(name: str, module: torch.nn.Module, example: tuple[torch.Tensor, ...], **features: Any) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(module.eval(), example, check_trace=False)
    model = ct.convert(
        traced,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT16,
        skip_model_load=True,
        **features,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.mlpackage"
        model.save(str(path))
        shutil.rmtree(HERE / path.name, ignore_errors=True)
        shutil.copytree(path, HERE / path.name)


def outputs() -> None:
    half = [ct.TensorType(name, dtype=np.float16) for name in ("all_logits", "key_cache", "value_cache")]
    ids = torch.zeros((1, LENGTH), dtype=torch.int32)
    inputs = [ct.TensorType("input_ids", (1, LENGTH), np.int32)]
    save("torch_outputs", WithOutputs(), (ids,), inputs=inputs, outputs=half)


def states() -> None:
    new, all_rows = ct.RangeDim(1, ROWS, default=1), ct.RangeDim(1, ROWS, default=1)
    ids, mask = torch.zeros((1, 2), dtype=torch.int32), torch.zeros((1, 1, 2, 5), dtype=torch.float32)
    shape = (LAYERS, 1, KV, ROWS, D)
    save(
        "torch_states",
        WithStates(),
        (ids, mask),
        inputs=[
            ct.TensorType("inputIds", (1, new), np.int32),
            ct.TensorType("causalMask", (1, 1, new, all_rows), np.float16),
        ],
        outputs=[ct.TensorType("all_logits", dtype=np.float16)],
        states=[
            ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name)
            for name in ("keyCache", "valueCache")
        ],
    )


if __name__ == "__main__":
    outputs()
    states()
