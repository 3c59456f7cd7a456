"""The parts of the exported program that compute: against mlx, through coremltools' evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from kvbaton._export import ExportError
from kvbaton._export.config import Rope, parse_config
from kvbaton._export.function import Part
from kvbaton._export.rope import periods, tables
from kvbaton._export.weights import Weights, dequantize

mx = pytest.importorskip("mlx.core")
pytest.importorskip("coremltools")
from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402
from kvbaton._export import past, program  # noqa: E402
from mlx_lm.models.base import create_causal_mask  # noqa: E402
from mlx_lm.models.rope_utils import initialize_rope  # noqa: E402

SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"type": "default"},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "llama3", "factor": 32.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 512,
    },
]


# --- rotary tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("theta", "dims"), [(10000.0, 16), (500000.0, 64), (1000000.0, 128)])
def test_rotation_equals_mlx(theta: float, dims: int, scaling: dict[str, Any] | None) -> None:
    rows = 300
    config = {**tiny_models.BASE, "head_dim": dims, "rope_theta": theta, "rope_scaling": scaling}
    rope = parse_config(config).rope
    x = np.random.default_rng(0).standard_normal((1, 2, rows, dims), dtype=np.float32)
    theirs = np.array(initialize_rope(dims, theta, False, scaling, 8192)(mx.array(x)))
    cos, sin = (table.astype(np.float32) for table in tables(rope, rows))
    first, second = np.split(x, 2, axis=-1)
    ours = x * cos + np.concatenate([-second, first], -1) * sin
    # fp16 tables are off by 2⁻¹² each, x reaches about 4.5, and mlx's f32 angles add rows * 2⁻²⁴.
    np.testing.assert_allclose(ours, theirs, atol=4.5 * 2 * 2**-12 + 1e-4)


def test_llama3_periods_equal_mlx() -> None:
    scaling = SCALINGS[4]
    rope = parse_config({**tiny_models.BASE, "head_dim": 64, "rope_scaling": scaling}).rope
    theirs = np.array(initialize_rope(64, 10000.0, False, scaling, 8192)._freqs)
    np.testing.assert_allclose(periods(rope), theirs, rtol=1e-5)
    plain = periods(Rope(10000.0, 64, {"kind": "default"}))
    changed = periods(rope) / plain
    assert changed.min() == 1  # short waves are kept,
    assert np.isclose(changed.max(), 8)  # long ones stretched
    assert ((changed > 1.01) & (changed < 7.9)).any()  # and some are blended


# --- weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_dequantisation_equals_mlx(bits: int, group_size: int) -> None:
    w = mx.random.normal((24, 256), key=mx.random.key(bits))
    packed, scales, biases = mx.quantize(w, group_size, bits)
    theirs = np.array(mx.dequantize(packed, scales, biases, group_size, bits))
    ours = dequantize(np.array(packed), np.array(scales), np.array(biases), group_size, bits)
    # One rounding against two: f32 multiply and add, fused or not.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=float(np.abs(theirs).max()) * 2**-22)


def test_every_bfloat16_value_is_read_as_mlx_reads_it(tmp_path: Path) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    finite = bits[(bits & 0x7F80) != 0x7F80]
    values = (finite.astype(np.uint32) << 16).view(np.float32)
    values = values[np.abs(values) <= 65504].reshape(1, -1)
    tiny_models.save_safetensors({"t": values}, tmp_path / "model.safetensors", bfloat16=True)
    loaded = mx.load(str(tmp_path / "model.safetensors"))["t"]
    theirs = np.array(loaded.astype(mx.float32)).astype(np.float16)
    np.testing.assert_array_equal(Weights(tmp_path).take("t", values.shape), theirs)


@pytest.mark.parametrize(
    ("value", "text"),
    [(65520.0, "65520"), (-1e6, "1e\\+06"), (np.inf, "inf"), (np.nan, "nan")],
)
def test_values_beyond_float16_are_refused(value: float, text: str, tmp_path: Path) -> None:
    values = np.zeros((2, 3), np.float32)
    values[1, 1] = value
    tiny_models.save_safetensors({"w": values}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=f"tensor w reaches {text}, above the largest float16") as error:
        Weights(tmp_path).take("w", (2, 3))
    assert error.value.kind == "overflow"
    assert error.value.fields["tensor"] == "w"


def test_largest_float16_is_kept(tmp_path: Path) -> None:
    values = np.array([[65504, -65504]], np.float32)
    tiny_models.save_safetensors({"w": values}, tmp_path / "model.safetensors")
    assert Weights(tmp_path).take("w", (1, 2)).tolist() == [[65504, -65504]]


def test_no_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no model\*\.safetensors"):
        Weights(tmp_path)


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("model.safetensors", "model-00001-of-00001.safetensors"):
        tiny_models.save_safetensors({"w": np.zeros((2, 3), np.float16)}, tmp_path / file)
    with pytest.raises(ExportError, match=r"tensor w is in model-00001\S* and in model\.safetensors"):
        Weights(tmp_path)


def test_missing_tensor_and_wrong_shape_are_named(tmp_path: Path) -> None:
    tiny_models.save_safetensors({"w": np.zeros((2, 3), np.float16)}, tmp_path / "model.safetensors")
    weights = Weights(tmp_path)
    with pytest.raises(ExportError, match="no tensor v"):
        weights.take("v", (1,))
    with pytest.raises(ExportError, match=r"tensor w has shape \[2, 3\], config.json asks for \[3, 2\]"):
        weights.take("w", (3, 2))


def write_raw(folder: Path, header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    (folder / "model.safetensors").write_bytes(size.to_bytes(8, "little") + text + data)


ENTRY = {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "length", "fragment"),
    [
        ({"w": ENTRY}, 1 << 40, "a header of"),
        (b"{", None, "its header is not JSON"),
        ([], None, "its header is not an object"),
        ({"w": {"dtype": "F16"}}, None, "the entry of w is malformed"),
        ({"w": {**ENTRY, "data_offsets": [0, 80]}}, None, "the data of w lies outside the file"),
        ({"w": {**ENTRY, "data_offsets": [8, 0]}}, None, "the data of w lies outside the file"),
        ({"w": {**ENTRY, "shape": [-2, -2]}}, None, "the data of w lies outside the file"),
        ({"w": {**ENTRY, "shape": [2, 3]}}, None, "w has 8 bytes for 6 values of F16"),
        ({"w": {**ENTRY, "dtype": "F64"}}, None, "tensor w has dtype F64"),
    ],
)
def test_broken_safetensors_are_refused(
    header: Any, length: int | None, fragment: str, tmp_path: Path
) -> None:
    write_raw(tmp_path, header, length=length)
    with pytest.raises(ExportError, match=fragment) as error:
        Weights(tmp_path)
    assert error.value.kind == "weights"


def test_empty_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ExportError, match="a header of 0 bytes in a file of 0"):
        Weights(tmp_path)


QUANTIZATION = {"group_size": 32, "bits": 4}


def packed_tensors() -> dict[str, Any]:
    packed, scales, biases = tiny_models.quantize(np.random.default_rng(0).normal(size=(4, 64)), 4, 32)
    return {"p.weight": packed, "p.scales": scales, "p.biases": biases}


@pytest.mark.parametrize(
    ("change", "quantization", "fragment"),
    [
        ({}, None, "config.json has no quantization"),
        ({"p.biases": None}, QUANTIZATION, "no tensor p.biases"),
        ({"p.scales": None, "p.biases": None}, QUANTIZATION, r"packed \(U32\) but has no scales"),
        ({"p.weight": np.zeros((4, 8), np.float32)}, QUANTIZATION, "has scales but is F32, not U32"),
        ({"p.weight": np.zeros((4, 14), np.uint32)}, QUANTIZATION, "packed with 7 bits in groups of 32"),
        ({"p.biases": np.zeros((4, 3), np.float16)}, QUANTIZATION, "tensor p.biases has shape"),
        ({}, {**QUANTIZATION, "p": {"group_size": 64, "bits": 4}}, "tensor p.scales has shape"),
        ({}, {**QUANTIZATION, "p": {"group_size": 32}}, "cannot tell the group size and bits of p.weight"),
    ],
)
def test_broken_quantisation_is_named(
    change: dict[str, Any], quantization: dict[str, Any] | None, fragment: str, tmp_path: Path
) -> None:
    tensors = {name: values for name, values in (packed_tensors() | change).items() if values is not None}
    tiny_models.save_safetensors(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match=fragment) as error:
        Weights(tmp_path, quantization).take("p.weight", (4, 64))
    assert error.value.kind == "weights"


def test_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    from kvbaton._export import export

    config = tiny_models.BASE
    tensors = tiny_models.random_weights(config, 0)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tiny_models.write_plain(tmp_path, config, tensors)
    with pytest.raises(ExportError, match=r"q_proj\.bias that llama does not use"):
        export(tmp_path, tmp_path / "m.mlpackage", buckets=(4,), digest=lambda folder: "blake3:0")


# --- building blocks, evaluated by coremltools -----------------------------------------------------------


def evaluate(config: dict[str, Any], rows: int, weights: dict[str, Any], block: Any) -> Any:
    """Runs ``block(builder)`` on constants and returns coremltools' value of what it builds."""
    values = []

    @mb.function(  # type: ignore[untyped-decorator]
        input_specs=[mb.TensorSpec((1,), dtype=types.fp16)], opset_version=program.OPSET
    )
    def body(unused: Any) -> Any:
        parsed = parse_config(config)
        builder = program._Builder(
            parsed,
            lambda name, shape: weights[name].reshape(shape),
            past.NoPast(rows),
            Part(0, parsed.layers, parsed.layers),
        )
        values.append(block(builder).val)
        return mb.identity(x=unused)

    assert values[0] is not None, "every op of the block has a value"
    return values[0].astype(np.float32)


@pytest.mark.parametrize(("eps", "size"), [(1e-5, 1.0), (1e-6, 1.0), (1e-6, 1e-3), (1e-5, 3e-3), (1e-8, 1.0)])
def test_norm_equals_mlx(eps: float, size: float) -> None:
    """The sizes near sqrt(eps) are where a lost epsilon changes the result by 40 %."""
    rng = np.random.default_rng(1)
    x = (size * rng.standard_normal((1, 5, 64))).astype(np.float16)
    gain = (1 + 0.2 * rng.standard_normal(64)).astype(np.float16)
    config = {**tiny_models.BASE, "rms_norm_eps": eps}
    ours = evaluate(
        config, 5, {"g": gain}, lambda builder: builder.rms_norm(mb.const(val=x.astype(np.float16)), "g", 64)
    )
    theirs = np.array(
        mx.fast.rms_norm(mx.array(x.astype(np.float32)), mx.array(gain.astype(np.float32)), eps)
    )
    # coremltools evaluates in fp16, squares included; where eps rounds by 4.6 % half of that reaches the
    # result.
    tolerance = 0.03 if size == 1e-3 else 0.01
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "scaled_first"), [("llama_tied", False), ("llama_no_groups", False), ("qwen2", True)]
)
def test_attention_equals_mlx(name: str, scaled_first: bool) -> None:
    raw = tiny_models.CONFIGS[name]
    config, rows = parse_config(raw), 12
    rng = np.random.default_rng(2)
    q, k, v = (
        rng.standard_normal((1, heads, rows, config.head_dim)).astype(np.float16)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    ours = evaluate(raw, rows, {}, lambda b: b.attention(*(mb.const(val=t) for t in (q, k, v)), b.full))
    theirs = mx.fast.scaled_dot_product_attention(
        *(mx.array(t.astype(np.float32)) for t in (q, k, v)), scale=config.head_dim**-0.5, mask="causal"
    )
    assert config.qkv_bias == scaled_first
    np.testing.assert_allclose(ours, np.array(theirs), atol=6e-3)


@pytest.mark.parametrize("rows", [8, 12, 13, 30])
def test_windows_attend_to_as_many_rows_as_in_mlx(rows: int) -> None:
    raw = tiny_models.GEMMA3
    config = parse_config(raw)
    assert config.windows is not None
    rng = np.random.default_rng(4)
    q, k, v = (
        rng.standard_normal((1, heads, rows, config.head_dim)).astype(np.float16)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    ours = evaluate(raw, rows, {}, lambda b: b.attention(*(mb.const(val=t) for t in (q, k, v)), b.sliding))
    theirs = mx.fast.scaled_dot_product_attention(
        *(mx.array(t.astype(np.float32)) for t in (q, k, v)),
        scale=raw["query_pre_attn_scalar"] ** -0.5,
        mask=create_causal_mask(rows, window_size=config.windows.size),
    )
    np.testing.assert_allclose(ours, np.array(theirs), atol=6e-3)


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_norms_of_a_scaled_residual_are_those_of_the_whole(size: float) -> None:
    rng = np.random.default_rng(5)
    x = (size * rng.standard_normal((1, 5, 64))).astype(np.float16)
    stored = (0.2 * rng.standard_normal(64)).astype(np.float16)

    def block(builder: Any) -> Any:
        quarter = mb.const(val=(x * np.float16(0.25)))
        return builder.rms_norm(quarter, "g", 64, reads_residual=True)

    ours = evaluate({**tiny_models.GEMMA3, "rms_norm_eps": 1e-6}, 5, {"g": stored}, block)
    gain = 1 + mx.array(stored.astype(np.float32))
    theirs = np.array(mx.fast.rms_norm(mx.array(x.astype(np.float32)), gain, 1e-6))
    # A sixteenth of the epsilon rounds by 4.6 % in fp16, as the epsilon itself does.
    np.testing.assert_allclose(ours, theirs, rtol=0.06 if size == 1e-3 else 0.01, atol=4e-3)


def test_norms_that_add_to_the_residual_have_a_quarter_of_their_gain() -> None:
    stored = np.random.default_rng(6).standard_normal(64).astype(np.float16)
    ours = evaluate(tiny_models.GEMMA3, 4, {"g": stored}, lambda b: b.gain("g", 64, b.residual))
    np.testing.assert_array_equal(ours, ((1 + stored.astype(np.float32)) / 4).astype(np.float16))


def test_large_key_biases_do_not_overflow() -> None:
    """16 lanes of 16 * 300 sum to 76,800, beyond fp16; scaled first they stay below."""
    q = np.full((1, 4, 4, 16), 16, np.float16)
    k = np.full((1, 2, 4, 16), 300, np.float16)
    v = np.ones((1, 2, 4, 16), np.float16)

    def block(builder: Any) -> Any:
        return builder.attention(*(mb.const(val=t) for t in (q, k, v)), builder.full)

    np.testing.assert_allclose(evaluate(tiny_models.CONFIGS["qwen2"], 4, {}, block), 1, atol=1e-3)
    with np.errstate(all="ignore"):
        assert np.isnan(evaluate(tiny_models.CONFIGS["llama_tied"], 4, {}, block)).any()


@pytest.mark.parametrize("head_norm", [False, True])
def test_heads_are_split_and_rotated_as_mlx_does(head_norm: bool) -> None:
    raw = tiny_models.CONFIGS["qwen3" if head_norm else "mistral"]
    config, rows = parse_config(raw), 9
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, rows, config.kv_heads * config.head_dim)).astype(np.float16)
    gain = (1 + 0.2 * rng.standard_normal(config.head_dim)).astype(np.float16)
    ours = evaluate(
        raw, rows, {"n": gain}, lambda b: b.rotate(b.heads(mb.const(val=x), config.kv_heads, "n"), b.full)
    )
    heads = mx.array(x.astype(np.float32)).reshape(1, rows, config.kv_heads, config.head_dim)
    if head_norm:
        heads = mx.fast.rms_norm(heads, mx.array(gain.astype(np.float32)), config.norm_eps)
    theirs = initialize_rope(config.head_dim, config.rope.theta, False)(heads.transpose(0, 2, 1, 3))
    np.testing.assert_allclose(ours, np.array(theirs), atol=1e-2)


# --- what chunks and decode steps see --------------------------------------------------------------------

CONTEXT = 40


def shown(kind: str, position: int, rows: int, window: int | None) -> Any:
    """The mask that a function computes at a position, as truth values, by coremltools."""
    found = []

    @mb.function(  # type: ignore[untyped-decorator]
        input_specs=[mb.TensorSpec((1,), dtype=types.fp16)], opset_version=program.OPSET
    )
    def body(unused: Any) -> Any:
        at = mb.const(val=np.array([position], np.int32))
        made: Any = object.__new__(past.PastInputs if kind == "chunk" else past.States)
        past._Positioned.__init__(made, rows, CONTEXT, at)
        found.append(made.kind(Rope(10000.0, 16, {"kind": "default"}), window, ""))
        return mb.identity(x=unused)

    mask = found[0].mask.val
    assert set(np.unique(mask)) <= {0, -np.inf}
    return mask[0, 0] == 0, found[0]


def held(position: int, slots: int) -> list[int | None]:
    """The position of the row in every slot of a ring after ``position`` tokens; those at first are empty."""
    slot_of = {p % slots: p for p in range(position)}
    return [slot_of.get(slot) for slot in range(slots)]


@pytest.mark.parametrize("window", [None, 12, 64])
@pytest.mark.parametrize("position", [0, 1, 11, 12, 13, 24, 30])
def test_a_chunk_sees_the_rows_that_mlx_s_mask_shows(position: int, window: int | None) -> None:
    rows, slots = 10, past.slots(CONTEXT, window)
    mask, _ = shown("chunk", position, rows, window)
    columns = [position + row for row in range(rows)] + held(position, slots)
    whole = np.array(create_causal_mask(position + rows, window_size=window))[position:]
    for query in range(rows):
        visible = {columns[c] for c in np.flatnonzero(mask[query])}
        assert visible == set(np.flatnonzero(whole[query])), query
        assert mask[query].sum() == len(visible)


@pytest.mark.parametrize("window", [None, 12, 64])
@pytest.mark.parametrize("position", [0, 1, 11, 12, 13, 24, 39])
def test_a_decode_step_sees_the_rows_that_mlx_s_mask_shows(position: int, window: int | None) -> None:
    mask, _ = shown("decode", position, 1, window)
    columns = held(position + 1, past.slots(CONTEXT, window))
    whole = np.array(create_causal_mask(position + 1, window_size=window))[position]
    assert {columns[c] for c in np.flatnonzero(mask[0])} == set(np.flatnonzero(whole))


def test_a_chunk_is_rotated_by_its_positions() -> None:
    cos, sin = tables(Rope(10000.0, 16, {"kind": "default"}), CONTEXT)
    _, kind = shown("chunk", 35, 10, None)
    rows = np.minimum(np.arange(35, 45), CONTEXT - 1)  # padding after the context repeats its last row
    np.testing.assert_array_equal(kind.cos.val[0, 0], cos[rows])
    np.testing.assert_array_equal(kind.sin.val[0, 0], sin[rows])
