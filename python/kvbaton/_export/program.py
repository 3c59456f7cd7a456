"""The programs, built op by op with coremltools' ``mb`` builder.

- A prefill of S tokens: ``input_ids`` (1, S) int32 and ``last_index`` (1,) int32 give ``logits`` (1, vocab) of
  the row ``last_index`` and the cache of all S rows. Prompts are padded on the right: the causal mask keeps
  every row blind to what follows, so rows up to ``last_index`` never see the padding, and rows after it are
  not live.
- A chunk of a longer prompt also takes the cache so far, ``past_key`` and ``past_value``, and ``position``
  (1,), the number of tokens before it; it gives the rows of the chunk.
- A decode step takes one token and ``position``, and keeps the cache in states.

A part of a split model takes and gives ``hidden_states`` (1, S, hidden) where it has no embeddings or no head.
See ``past.py`` for what attention sees in each of them.

What the Neural Engine and fp16 ask for:

- RMS norm is ``layer_norm`` of ``[x, -x]``, whose mean is 0 and whose variance is ``mean(x²)``. Squaring in
  fp16 would overflow: SmolLM2's residual reaches 2790.
- Softmax is spelled out; the fused attention op gives wrong results on some Neural Engines.
- Gemma's residual reaches 103,795, beyond fp16: all of it is kept at a quarter. The embedding's scale and the
  gains of the norms that add to it are a quarter of the model's, and the epsilon of the norms that read it a
  sixteenth, so that nothing else changes.
- Tensors have at most four axes, and K/V are repeated for their query heads only inside a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from coremltools import target
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function

from .config import ModelConfig
from .function import FunctionPlan, Part
from .layout import KvGroup
from .past import FLOAT16, INT32, Kind, NoPast, Past, PastInputs, States, past_shapes
from .quantize import Quantizer
from .weights import Half

OPSET = target.iOS18
"""The first target with several functions in one package (macOS 15)."""

RESIDUAL = 0.25
"""Share of Gemma's residual that the program keeps."""

Var = Any
Take = Callable[[str, tuple[int, ...]], Half]


def build_function(
    config: ModelConfig,
    take: Take,
    plan: FunctionPlan,
    part: Part,
    groups: list[KvGroup],
    quantizer: Quantizer | None = None,
    layer_done: Callable[[], None] = lambda: None,
) -> Function:
    """Builds ``plan`` for a part of the model; ``take(name, shape)`` gives each weight.

    ``groups`` are those of the part's layers.
    """
    if part.embeds:
        inputs = {"input_ids": mb.TensorSpec((1, plan.rows), dtype=INT32)}
    else:
        inputs = {"hidden_states": mb.TensorSpec((1, plan.rows, config.hidden_size), dtype=FLOAT16)}
    if plan.kind == "prefill" and part.ends:
        inputs["last_index"] = mb.TensorSpec((1,), dtype=INT32)
    if plan.context is not None:
        inputs["position"] = mb.TensorSpec((1,), dtype=INT32)
        shapes = past_shapes(config, plan.context, groups)
        for group in groups:
            if plan.kind == "decode":
                for name in (group.key, group.value):
                    inputs[name] = mb.StateTensorSpec(shapes[name], dtype=FLOAT16)
            else:
                inputs[group.past_key] = mb.TensorSpec(shapes[group.key], dtype=FLOAT16)
                inputs[group.past_value] = mb.TensorSpec(shapes[group.value], dtype=FLOAT16)
    with Function(inputs, OPSET) as function:
        values = function.inputs
        past: Past
        if plan.context is None:
            past = NoPast(plan.rows)
        elif plan.kind == "decode":
            past = States(config, plan.rows, plan.context, groups, values)
        else:
            past = PastInputs(config, plan.rows, plan.context, groups, values)
        function.set_outputs(_Builder(config, take, past, part, quantizer).body(values, groups, layer_done))
    return function


class _Builder:
    """Emits ops into the function being built; S is its number of rows, E the hidden size."""

    def __init__(
        self, config: ModelConfig, take: Take, past: Past, part: Part, quantizer: Quantizer | None = None
    ) -> None:
        self.config, self.take, self.past, self.part = config, take, past, part
        self.quantizer = quantizer
        self.rows = past.rows
        self.constants: dict[str, Var] = {}
        self.residual = RESIDUAL if config.gemma else 1.0
        held = [config.has_window(layer) for layer in range(part.first, part.end)]
        self.full = None if all(held) else past.kind(config.rope, None, "")
        self.sliding = None
        if config.windows is not None and any(held):
            self.sliding = past.kind(config.windows.rope, config.windows.size, "window_")

    def body(
        self, inputs: dict[str, Var], groups: list[KvGroup], layer_done: Callable[[], None]
    ) -> list[Var]:
        x = self.embeddings(inputs["input_ids"]) if self.part.embeds else inputs["hidden_states"]
        keys: dict[int, Var] = {}
        values: dict[int, Var] = {}
        # An output that holds a single layer is that layer's own tensor.
        decodes = isinstance(self.past, States)
        alone = {group.layers[0]: group for group in groups if len(group.layers) == 1 and not decodes}
        for layer in range(self.part.first, self.part.end):
            only = inputs.get("last_index") if layer == self.config.layers - 1 else None
            x, keys[layer], values[layer] = self.layer(layer, x, alone.get(layer), only)
            layer_done()
        ends = self.part.ends
        outputs = [self.logits(x) if ends else mb.identity(x=x, name="output_hidden_states")]
        if decodes:
            return outputs
        for parts, names in ((keys, [g.key for g in groups]), (values, [g.value for g in groups])):
            for group, name in zip(groups, names, strict=True):
                stacked = [parts[layer] for layer in group.layers]
                one = len(stacked) == 1
                outputs.append(stacked[0] if one else mb.concat(values=stacked, axis=0, name=name))
        return outputs

    def embeddings(self, input_ids: Var) -> Var:
        """(1, S) token ids to (1, S, E)."""
        config = self.config
        embedding = self.weight("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        x = mb.gather(x=embedding, indices=input_ids, axis=0, name="embeddings")
        if config.gemma:
            x = mb.mul(x=x, y=np.float16(config.gemma.embedding_scale * self.residual))
        return x

    def logits(self, x: Var) -> Var:
        """(1, 1, E) to (1, vocab)."""
        config = self.config
        last = self.rms_norm(x, "model.norm.weight", config.hidden_size, reads_residual=True)
        head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
        logits = self.linear(last, head, config.vocab_size, config.hidden_size)
        return mb.reshape(x=logits, shape=[1, config.vocab_size], name="logits")

    def layer(self, index: int, x: Var, output: KvGroup | None, only: Var | None) -> tuple[Var, Var, Var]:
        """One block: x (1, S, E) to the same shape; also its K and V, each (1, kv_heads, S, head_dim).

        With ``only``, a row's index, the block's result is that row alone, (1, 1, E).
        """
        config = self.config
        path = f"model.layers.{index}."
        attn, mlp = path + "self_attn.", path + "mlp."
        hidden, inner = config.hidden_size, config.intermediate_size
        queries_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim

        kind = self.sliding if config.has_window(index) else self.full
        assert kind is not None, "every kind of the part's layers has its constants"
        h = self.rms_norm(x, path + "input_layernorm.weight", hidden, reads_residual=True)
        q = self.linear(h, attn + "q_proj.weight", queries_width, hidden, config.qkv_bias)
        k = self.linear(h, attn + "k_proj.weight", kv_width, hidden, config.qkv_bias)
        v = self.linear(h, attn + "v_proj.weight", kv_width, hidden, config.qkv_bias)
        q = self.rotate(self.heads(q, config.heads, attn + "q_norm.weight"), kind)
        key_name, value_name = (output.key, output.value) if output else (None, None)
        k = self.rotate(self.heads(k, config.kv_heads, attn + "k_norm.weight"), kind, key_name)
        v = self.heads(v, config.kv_heads, name=value_name)

        a = self.attention(q, *self.past.seen(index, k, v), kind)
        a = mb.reshape(x=mb.transpose(x=a, perm=[0, 2, 1, 3]), shape=[1, self.rows, queries_width])
        if only is not None:
            # Nothing reads the other rows of the last block: their projections are not computed.
            a, x = (mb.gather(x=rows, indices=only, axis=1) for rows in (a, x))
        a = self.linear(a, attn + "o_proj.weight", hidden, queries_width, config.output_bias)
        after = path + "post_attention_layernorm.weight"
        if config.gemma:
            a = self.rms_norm(a, after, hidden, writes_residual=True)
        x = mb.add(x=x, y=a)

        before = path + "pre_feedforward_layernorm.weight" if config.gemma else after
        h = self.rms_norm(x, before, hidden, reads_residual=True)
        gate = self.linear(h, mlp + "gate_proj.weight", inner, hidden, config.mlp_bias)
        gate = mb.gelu(x=gate, mode="TANH_APPROXIMATION") if config.gemma else mb.silu(x=gate)
        up = self.linear(h, mlp + "up_proj.weight", inner, hidden, config.mlp_bias)
        down = self.linear(mb.mul(x=gate, y=up), mlp + "down_proj.weight", hidden, inner, config.mlp_bias)
        if config.gemma:
            down = self.rms_norm(
                down, path + "post_feedforward_layernorm.weight", hidden, writes_residual=True
            )
        return mb.add(x=x, y=down), k, v

    def heads(self, x: Var, count: int, norm: str | None = None, name: str | None = None) -> Var:
        """(1, S, count * head_dim) to (1, count, S, head_dim), normalised if the model has head norms."""
        x = mb.reshape(x=x, shape=[1, self.rows, count, self.config.head_dim])
        if norm is not None and self.config.head_norm:
            x = self.rms_norm(x, norm, self.config.head_dim)
        return mb.transpose(x=x, perm=[0, 2, 1, 3], **_named(name))

    def rotate(self, x: Var, kind: Kind, name: str | None = None) -> Var:
        """RoPE of half-split pairs: ``x * cos + [-x2, x1] * sin``."""
        first, second = mb.split(x=x, num_splits=2, axis=-1)
        turned = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=-1)
        return mb.add(x=mb.mul(x=x, y=kind.cos), y=mb.mul(x=turned, y=kind.sin), **_named(name))

    def attention(self, q: Var, k: Var, v: Var, kind: Kind) -> Var:
        """Attention: q (1, heads, S, head_dim), k and v (1, kv_heads, columns, head_dim); returns q's shape."""
        config = self.config
        scale = np.float16(config.gemma.query_scale if config.gemma else 1 / math.sqrt(config.head_dim))
        rows, columns = self.rows, k.shape[2]
        groups = config.heads // config.kv_heads
        if self.past.grouped:
            # Queries that share a KV head are rows of one product: nothing of the past is repeated.
            q = mb.reshape(x=q, shape=[1, config.kv_heads, groups * rows, config.head_dim])
        else:
            k, v = self.repeat(k), self.repeat(v)
        if config.qkv_bias or config.gemma:
            # Key biases of the qwen2 family are in the hundreds: unscaled products would leave fp16.
            scores = mb.matmul(x=mb.mul(x=q, y=scale), y=k, transpose_y=True)
        else:
            scores = mb.mul(x=mb.matmul(x=q, y=k, transpose_y=True), y=scale)
        if self.past.grouped:
            scores = mb.reshape(x=scores, shape=[config.kv_heads, groups, rows, columns])
        weights = mb.softmax(x=mb.add(x=scores, y=kind.mask), axis=-1)
        if self.past.grouped:
            weights = mb.reshape(x=weights, shape=[1, config.kv_heads, groups * rows, columns])
        a = mb.matmul(x=weights, y=v)
        return mb.reshape(x=a, shape=[1, config.heads, rows, config.head_dim]) if self.past.grouped else a

    def repeat(self, x: Var) -> Var:
        """(1, kv_heads, S, head_dim) to (1, heads, S, head_dim): a KV head for each of its query heads."""
        config = self.config
        times = config.heads // config.kv_heads
        if times == 1:
            return x
        x = mb.reshape(x=x, shape=[config.kv_heads, 1, self.rows, config.head_dim])
        x = mb.tile(x=x, reps=[1, times, 1, 1])
        return mb.reshape(x=x, shape=[1, config.heads, self.rows, config.head_dim])

    def rms_norm(
        self, x: Var, name: str, width: int, reads_residual: bool = False, writes_residual: bool = False
    ) -> Var:
        """``x / sqrt(mean(x²) + eps) * gain`` over the last axis, through ``layer_norm`` of ``[x, -x]``."""
        eps = self.config.norm_eps * (self.residual**2 if reads_residual else 1)
        both = mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=-1)
        normed = mb.layer_norm(x=both, axes=[-1], epsilon=_epsilon(eps))
        half, _ = mb.split(x=normed, num_splits=2, axis=-1)
        return mb.mul(x=half, y=self.gain(name, width, self.residual if writes_residual else 1.0))

    def gain(self, name: str, width: int, times: float) -> Var:
        """A norm's gain. Gemma stores it minus one."""
        if not self.config.gemma:
            return self.weight(name, (width,))

        def value() -> Half:
            stored = self.take(name, (width,)).astype(np.float32)
            return ((1 + stored) * np.float32(times)).astype(np.float16)

        return self.constant(name.replace(".", "_"), value)

    def linear(self, x: Var, name: str, outputs: int, inputs: int, bias: bool = False) -> Var:
        if bias:
            offset = self.weight(name.removesuffix("weight") + "bias", (outputs,))
        else:
            # Spelled out and shared: otherwise coremltools stores zeros for every single projection.
            offset = self.constant(f"zero_bias_{outputs}", lambda: np.zeros(outputs, np.float16))
        return mb.linear(x=x, weight=self.weight(name, (outputs, inputs)), bias=offset)

    def weight(self, name: str, shape: tuple[int, ...]) -> Var:
        plain = name.replace(".", "_")
        if self.quantizer is None or len(shape) != 2:
            return self.constant(plain, lambda: self.take(name, shape))
        # Matrices: projections and embeddings.
        if plain not in self.constants:
            parts = self.quantizer.quantized(name, lambda: self.take(name, shape))
            stored = {
                part: self.constant(f"{plain}_{part}", partial(parts.__getitem__, part)) for part in parts
            }
            if "lut" in stored:
                self.constants[plain] = mb.constexpr_lut_to_dense(**stored, name=plain)
            else:
                self.constants[plain] = mb.constexpr_blockwise_shift_scale(**stored, name=plain)
        return self.constants[plain]

    def constant(self, name: str, value: Callable[[], Half]) -> Var:
        """A constant stored once for all functions of the package: its weight_id is its name."""
        if name not in self.constants:
            constant = mb.const(val=value(), name=name)
            constant.op.weight_id = name
            self.constants[name] = constant
        return self.constants[name]


def _epsilon(value: float) -> np.float16 | np.float32:
    """The norm's epsilon, in the dtype of the activations where that is close enough.

    fp16 rounds 1e-5 by 0.1 % and 1e-6 by 4.6 %; both vanish beside a mean square that is not itself near
    zero. Smaller ones lose their value, so they stay fp32: since iOS 17 ``layer_norm`` takes both.
    """
    half = np.float16(value)
    return half if abs(float(half) - value) < 0.05 * value else np.float32(value)


def _named(name: str | None) -> dict[str, str]:
    return {} if name is None else {"name": name}
