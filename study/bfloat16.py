"""A decoder in bfloat16 on a CPU, as fast as one in float32.

MLX's own bfloat16 products are scalar loops on a CPU. Here they are float32 products of the same bfloat16 values,
rounded once: what a matrix unit with float32 sums computes. Attention keeps its scores in float32, as Metal's fused
kernel does, and rounds its result. Every other operation is MLX's own, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn


class _WideLinear(nn.Linear):
    """A linear layer whose sums are float32."""

    def __call__(self, x: mx.array) -> mx.array:
        out = x.astype(mx.float32) @ self._wide.T
        if "bias" in self:
            out = out + self.bias.astype(mx.float32)
        return out.astype(x.dtype)


class _WideEmbedding(nn.Embedding):
    """An embedding whose use as the output layer sums in float32."""

    def as_linear(self, x: mx.array) -> mx.array:
        return (x.astype(mx.float32) @ self._wide.T).astype(x.dtype)


def widen(model: Any) -> None:
    """Makes the products of a bfloat16 model float32 ones. Its parameters, and so its caches, stay bfloat16."""
    for _, module in model.named_modules():
        kind = {nn.Linear: _WideLinear, nn.Embedding: _WideEmbedding}.get(type(module))
        if kind is not None:
            # Names with an underscore are no parameters.
            module._wide = module.weight.astype(mx.float32)
            mx.eval(module._wide)
            module.__class__ = kind


@contextmanager
def wide_attention() -> Iterator[None]:
    """While it lasts, attention over bfloat16 caches is computed in float32 and rounded once."""
    plain = mx.fast.scaled_dot_product_attention

    def attention(queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
        if queries.dtype != mx.bfloat16:
            return plain(queries, keys, values, **more)
        wide = (x.astype(mx.float32) for x in (queries, keys, values))
        return plain(*wide, **more).astype(mx.bfloat16)

    mx.fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = plain
