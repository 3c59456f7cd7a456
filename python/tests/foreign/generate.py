"""Writes packages as other exporters write them, over the weights of ``tiny_models.CONFIGS["llama_tied"]``.

Run by hand:  python generate.py   (coremltools 9.0, numpy)

- ``anemll.mlpackage``: 1×1 convolutions for projections, RMS norm through ``layer_norm`` of ``[x, -x]``, softmax in steps,
  scores by einsum, one state for all keys and values, a head split into four convolutions.
- ``coreml_llm.mlpackage``: the same convolutions, keys and values padded from 16 to 512 lanes with zeros and left as
  outputs, softmax in steps over a mask of -1e4, gather for the last row.

Both are prefill functions of 32 tokens over a context of 32. What transformers and torch give is in ``torch_llama.py``.
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
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
import tiny_models

CONFIG = tiny_models.CONFIGS["llama_tied"]
E, INNER, LAYERS = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["num_hidden_layers"]
HEADS, KV, VOCAB = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["vocab_size"]
D = E // HEADS
S = 32
PADDED = 512
HALF = np.float16


def save(program: Any, name: str) -> None:
    model = ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.mlpackage"
        model.save(str(path))
        shutil.rmtree(HERE / path.name, ignore_errors=True)
        shutil.copytree(path, HERE / path.name)


def weights() -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.numpy import load_file

        made = tiny_models.build("llama_tied", Path(folder))
        found: dict[str, np.ndarray] = {}
        for file in made.glob("*.safetensors"):
            found.update(load_file(file))
        return {name: w.astype(HALF) for name, w in found.items()}


W = weights()


def conv(x: Any, weight: np.ndarray, name: str | None = None) -> Any:
    """A projection of (1, C, 1, S) as a 1×1 convolution."""
    out, inputs = weight.shape
    named = {} if name is None else {"name": name}
    return mb.conv(x=x, weight=weight.reshape(out, inputs, 1, 1), pad_type="valid", **named)


def norm(x: Any, gain: np.ndarray) -> Any:
    """RMS norm of (1, S, E): layer_norm of [x, -x], whose mean is 0, without gains."""
    both = mb.concat(values=[x, mb.mul(x=x, y=HALF(-1))], axis=-1)
    normed = mb.layer_norm(x=both, axes=[-1], epsilon=HALF(CONFIG["rms_norm_eps"]))
    half = mb.slice_by_index(x=normed, begin=[0, 0, 0], end=[1, S, E])
    return mb.mul(x=half, y=gain)


def channels(x: Any) -> Any:
    """(1, S, C) to (1, C, 1, S)."""
    return mb.expand_dims(x=mb.transpose(x=x, perm=[0, 2, 1]), axes=[2])


def rows(x: Any) -> Any:
    """(1, C, 1, S) to (1, S, C)."""
    return mb.transpose(x=mb.squeeze(x=x, axes=[2]), perm=[0, 2, 1])


def heads(x: Any, count: int) -> Any:
    """(1, count * D, 1, S) to (1, count, S, D)."""
    return mb.transpose(x=mb.reshape(x=x, shape=[1, count, D, S]), perm=[0, 1, 3, 2])


def tables() -> tuple[np.ndarray, np.ndarray]:
    inverse = 1.0 / CONFIG["rope_theta"] ** (np.arange(0, D, 2) / D)
    angles = np.arange(S)[:, None] * np.concatenate([inverse, inverse])[None]
    return np.cos(angles).astype(HALF), np.sin(angles).astype(HALF)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    low = mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[1, x.shape[1], S, D // 2])
    high = mb.slice_by_index(x=x, begin=[0, 0, 0, D // 2], end=[1, x.shape[1], S, D])
    turned = mb.concat(values=[mb.mul(x=high, y=HALF(-1)), low], axis=-1)
    return mb.add(x=mb.mul(x=x, y=cos), y=mb.mul(x=turned, y=sin))


def softmax(scores: Any) -> Any:
    largest = mb.reduce_max(x=scores, axes=[-1], keep_dims=True)
    e = mb.exp(x=mb.sub(x=scores, y=largest))
    return mb.real_div(x=e, y=mb.reduce_sum(x=e, axes=[-1], keep_dims=True))


def repeated(x: Any, width: int) -> Any:
    """(1, KV, S, width) to (1, HEADS, S, width)."""
    x = mb.tile(x=mb.reshape(x=x, shape=[KV, 1, S, width]), reps=[1, HEADS // KV, 1, 1])
    return mb.reshape(x=x, shape=[1, HEADS, S, width])


def mlp(x: Any, path: str) -> Any:
    h = channels(norm(x, W[path + "post_attention_layernorm.weight"]))
    gate = mb.silu(x=conv(h, W[path + "mlp.gate_proj.weight"]))
    up = conv(h, W[path + "mlp.up_proj.weight"])
    return mb.add(x=x, y=rows(conv(mb.mul(x=gate, y=up), W[path + "mlp.down_proj.weight"])))


def projections(x: Any, path: str, cos: Any, sin: Any) -> tuple[Any, Any, Any]:
    h = channels(norm(x, W[path + "input_layernorm.weight"]))
    q = rotate(heads(conv(h, W[path + "self_attn.q_proj.weight"]), HEADS), cos, sin)
    k = rotate(heads(conv(h, W[path + "self_attn.k_proj.weight"]), KV), cos, sin)
    return q, k, heads(conv(h, W[path + "self_attn.v_proj.weight"]), KV)


def joined(a: Any, width: int) -> Any:
    """(1, HEADS, S, width), of which D lanes are real, to (1, HEADS * D, 1, S)."""
    if width != D:
        a = mb.slice_by_index(x=a, begin=[0, 0, 0, 0], end=[1, HEADS, S, D])
    a = mb.reshape(x=mb.transpose(x=a, perm=[0, 1, 3, 2]), shape=[1, HEADS * D, 1, S])
    return a


def anemll() -> None:
    cos_table, sin_table = tables()

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, S), dtype=types.int32),
            mb.TensorSpec((S,), dtype=types.int32),
            mb.TensorSpec((1, 1, S, S), dtype=types.fp16),
            mb.TensorSpec((1,), dtype=types.int32),
            mb.StateTensorSpec((2 * LAYERS, KV, S, D), dtype=types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(
        input_ids: Any, position_ids: Any, causal_mask: Any, current_pos: Any, model_model_kv_cache_0: Any
    ) -> Any:
        cos = mb.expand_dims(x=mb.gather(x=cos_table, indices=position_ids, axis=0), axes=[0, 1])
        sin = mb.expand_dims(x=mb.gather(x=sin_table, indices=position_ids, axis=0), axes=[0, 1])
        x = mb.gather(x=W["model.embed_tokens.weight"], indices=input_ids, axis=0)
        cache = mb.read_state(input=model_model_kv_cache_0)
        after = mb.add(x=current_pos, y=np.int32(S))
        for layer in range(LAYERS):
            path = f"model.layers.{layer}."
            q, k, v = projections(x, path, cos, sin)
            for slot, update in ((layer, k), (layer + LAYERS, v)):
                begin = mb.concat(values=[[slot], [0], current_pos, [0]], axis=0)
                end = mb.concat(values=[[slot + 1], [KV], after, [D]], axis=0)
                cache = mb.slice_update(x=cache, update=update, begin=begin, end=end)
                cache = mb.coreml_update_state(state=model_model_kv_cache_0, value=cache)
            k = mb.slice_by_index(x=cache, begin=[layer, 0, 0, 0], end=[layer + 1, KV, S, D])
            v = mb.slice_by_index(
                x=cache, begin=[LAYERS + layer, 0, 0, 0], end=[LAYERS + layer + 1, KV, S, D]
            )
            # MIL's einsum sums the last dimension of one with the second of the other.
            left = mb.transpose(x=q, perm=[0, 2, 1, 3])
            right = mb.transpose(x=repeated(k, D), perm=[0, 3, 1, 2])
            scores = mb.einsum(values=(left, right), equation="nchw,nwhu->nchu")
            scores = mb.transpose(x=scores, perm=[0, 2, 1, 3])
            scores = mb.add(x=mb.mul(x=scores, y=HALF(D**-0.5)), y=causal_mask)
            a = mb.matmul(x=softmax(scores), y=repeated(v, D))
            x = mb.add(x=x, y=rows(conv(joined(a, D), W[path + "self_attn.o_proj.weight"])))
            x = mlp(x, path)
        h = channels(norm(x, W["model.norm.weight"]))
        head = np.split(W["model.embed_tokens.weight"], 4)
        return tuple(
            mb.identity(x=rows(conv(h, part)), name=f"logits{number}") for number, part in enumerate(head, 1)
        )

    save(program, "anemll")


def coreml_llm() -> None:
    cos_table, sin_table = tables()
    mask = np.where(np.arange(S)[None] > np.arange(S)[:, None], HALF(-1e4), HALF(0))[None, None]

    def wide(x: Any) -> Any:
        """Lanes of zeros after the head's own."""
        return mb.pad(x=x, pad=[0, 0, 0, 0, 0, 0, 0, PADDED - D], mode="constant", constant_val=HALF(0))

    @mb.program(
        input_specs=[mb.TensorSpec((1, S), dtype=types.int32), mb.TensorSpec((1,), dtype=types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(input_ids: Any, last_index: Any) -> Any:
        x = mb.gather(x=W["model.embed_tokens.weight"], indices=input_ids, axis=0)
        cos, sin = cos_table[None, None], sin_table[None, None]
        keys, values = [], []
        for layer in range(LAYERS):
            path = f"model.layers.{layer}."
            q, k, v = projections(x, path, cos, sin)
            k, v = wide(k), wide(v)
            keys.append(k)
            values.append(v)
            scores = mb.matmul(x=wide(q), y=repeated(k, PADDED), transpose_y=True)
            scores = mb.add(x=mb.mul(x=scores, y=HALF(D**-0.5)), y=mask)
            a = mb.matmul(x=softmax(scores), y=repeated(v, PADDED))
            x = mb.add(x=x, y=rows(conv(joined(a, PADDED), W[path + "self_attn.o_proj.weight"])))
            x = mlp(x, path)
        last = mb.gather(x=norm(x, W["model.norm.weight"]), indices=last_index, axis=1)
        logits = mb.matmul(x=last, y=W["model.embed_tokens.weight"], transpose_y=True)
        return (
            mb.reshape(x=logits, shape=[1, VOCAB], name="logits"),
            mb.concat(values=keys, axis=0, name="K_full_out"),
            mb.concat(values=values, axis=0, name="V_full_out"),
        )

    save(program, "coreml_llm")


if __name__ == "__main__":
    anemll()
    coreml_llm()
