"""MLX's affine codes over many rows: written and read bit for bit as ``mx.quantize`` does and reads.

Ten thousand rows of head_dim 128: random ones at many scales, and the odd ones that finite rows can be
(constant, one-sided, subnormal, largest values, signed zeros, one outlier).
"""

from __future__ import annotations

import json

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from kvbaton import _native

ROWS, DIM = 10_000, 128
SPEC = [{"kind": "full", "kv_heads": 1, "key_dim": DIM, "value_dim": DIM}]


def rows() -> np.ndarray:
    rng = np.random.default_rng(11)
    scale = np.exp2(rng.uniform(-12, 12, (ROWS, 1)))
    values = rng.standard_normal((ROWS, DIM)) * scale + rng.choice([0, 0, 1, -3], (ROWS, 1)) * scale
    values[:100] = rng.standard_normal((100, 1))  # constant rows
    values[100:200] = np.abs(values[100:200])
    values[200:300] = -np.abs(values[200:300])
    values[300:400] = rng.integers(-3, 4, (100, DIM)) * 2.0**-24  # subnormal in float16
    values[400:500] = rng.choice([-65504, 65504, 0], (100, DIM))
    values[500:550] = rng.choice([0.0, -0.0], (50, DIM))
    values[550:600, 5] = 60000
    return np.clip(values, -65504, 65504).astype(np.float16)


def layout(bits: int, group: int) -> str:
    parts = []
    for part in ("key", "value"):
        for suffix, role in (("", "elements"), ("_scales", "scale"), ("_biases", "bias")):
            parts.append(
                f'[[tensor]]\nname = "{part}{suffix}"\nholds = "{part}"\nrole = "{role}"\n'
                f'axes = "batch kv_head row head_dim"\n'
                f"encoding = {{ bits = {bits}, group_size = {group} }}\nlayers = [0]\n"
            )
    return 'name = "codes"\n' + "\n".join(parts)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_ten_thousand_rows_are_coded_as_mlx_codes_them(bits: int, group: int) -> None:
    source = rows()
    held = {name: source[None, None] for name in ("keys_0", "values_0")}
    view = kvbaton.CacheView.from_arrays(held, "mlx-lm", cache=SPEC, tokens_seen=ROWS)
    coded = [np.array(a) for a in mx.quantize(mx.array(source), group_size=group, bits=bits)]
    arrays = {
        f"{part}{suffix}": np.zeros_like(a)[None, None]
        for part in ("key", "value")
        for suffix, a in zip(("", "_scales", "_biases"), coded, strict=True)
    }
    targets = [(name, array, str(array.dtype)) for name, array in arrays.items()]
    _native.view_fill(view._native, targets, layout(bits, group), json.dumps({"tokens_seen": ROWS}))
    for suffix, wanted in zip(("", "_scales", "_biases"), coded, strict=True):
        for part in ("key", "value"):
            got = arrays[f"{part}{suffix}"][0, 0]
            assert np.array_equal(got.view(np.uint8), wanted.view(np.uint8)), (part, suffix)
    back = kvbaton.CacheView.from_arrays(arrays, layout(bits, group), cache=SPEC, tokens_seen=ROWS)
    wanted = np.array(mx.dequantize(*map(mx.array, coded), group_size=group, bits=bits))
    assert np.array_equal(back.layers[0].arrays["key"][0].view(np.uint16), wanted.view(np.uint16))


def test_a_target_that_shares_memory_with_its_source_is_refused() -> None:
    source = rows()[:8][None, None].copy()
    other = np.zeros_like(source)
    view = kvbaton.CacheView.from_arrays(
        {"keys_0": source, "values_0": other}, "mlx-lm", cache=SPEC, tokens_seen=8
    )
    targets = [("keys_0", np.zeros_like(source), "float16"), ("values_0", source, "float16")]
    before = source.copy()
    with pytest.raises(kvbaton.errors.UsageError, match="shares memory with `keys_0`"):
        _native.view_fill(view._native, targets, "mlx-lm", json.dumps({"tokens_seen": 8}))
    assert np.array_equal(source, before)
