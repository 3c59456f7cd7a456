"""Reading ``config.json``: each kind of model that is not exported is refused by field and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from kvbaton._export import ExportError, read_model_spec
from kvbaton._export.config import parse_config

LLAMA, QWEN2, QWEN3 = tiny_models.BASE, tiny_models.QWEN2, tiny_models.QWEN3
GEMMA3 = tiny_models.GEMMA3
ABSENT = object()


def patched(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not ABSENT}


@pytest.mark.parametrize(
    ("base", "changes", "fragments"),
    [
        (
            LLAMA,
            {"model_type": "gemma2"},
            ["model_type", "gemma2", "llama, mistral, qwen2, qwen3, gemma3_text"],
        ),
        (GEMMA3, {"final_logit_softcapping": 30.0}, ["final_logit_softcapping = 30.0"]),
        (GEMMA3, {"use_bidirectional_attention": True}, ["use_bidirectional_attention = true"]),
        (GEMMA3, {"hidden_activation": "silu"}, ["hidden_activation", "silu"]),
        (GEMMA3, {"layer_types": ["full_attention"] * 3}, ["layer_types", "every layer of 3 alone"]),
        (LLAMA, {"model_type": ABSENT}, ["model_type = null"]),
        (LLAMA, {"model_file": "net.py"}, ["model_file", "net.py"]),
        (LLAMA, {"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        (LLAMA, {"rope_traditional": True}, ["rope_traditional = true"]),
        (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        (QWEN2, {"use_sliding_window": True}, ["use_sliding_window = true"]),
        (
            LLAMA,
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            ["layer_types[1]", "sliding_attention"],
        ),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling", "yarn"]),
        (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling", "longrope"]),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling", "dynamic"]),
        (QWEN2, {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, ["rope_scaling", "mrope"]),
        (QWEN3, {"rope_scaling": {"rope_type": "proportional"}}, ["rope_scaling", "proportional"]),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            ["partial_rotary_factor = 0.25"],
        ),
        (LLAMA, {"rope_parameters": {"rope_theta": 5e5}}, ["rope_parameters", "500000", "rope_theta"]),
        (
            LLAMA,
            {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
            ["quantization.mode", "mxfp4"],
        ),
        (
            LLAMA,
            {"quantization": {"group_size": 32, "bits": 4, "lm_head": {"mode": "nvfp4"}}},
            ["quantization.lm_head.mode", "nvfp4"],
        ),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
    ],
)
def test_other_models_are_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(ExportError) as error:
        parse_config(patched(base, **changes))
    assert error.value.kind == "architecture"
    for fragment in fragments:
        assert fragment in str(error.value)
    assert {"field", "value"} <= set(error.value.fields)


@pytest.mark.parametrize(
    ("base", "changes", "fragments"),
    [
        (LLAMA, {"hidden_size": ABSENT}, ["no hidden_size"]),
        (LLAMA, {"vocab_size": -5}, ["vocab_size = -5", "positive integer"]),
        (LLAMA, {"num_hidden_layers": True}, ["num_hidden_layers = true"]),
        (LLAMA, {"rms_norm_eps": 0}, ["rms_norm_eps = 0"]),
        (LLAMA, {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        (LLAMA, {"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        (LLAMA, {"hidden_size": 66}, ["hidden_size 66", "num_attention_heads 4"]),
        (LLAMA, {"head_dim": 15}, ["head_dim 15 is odd"]),
        (LLAMA, {"layer_types": ["full_attention"]}, ["layer_types", "3 layers"]),
        (LLAMA, {"rope_scaling": "linear"}, ["rope_scaling", "an object"]),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, ["no factor"]),
        (LLAMA, {"rope_parameters": [1]}, ["rope_parameters", "an object"]),
        (LLAMA, {"quantization": 4}, ["quantization = 4"]),
        (LLAMA, {"num_hidden_layers": 10**9}, ["num_hidden_layers = 1000000000", "up to 4096"]),
        (LLAMA, {"hidden_size": 2**63}, ["hidden_size = 9223372036854775808", "up to 2147483647"]),
        (LLAMA, {"rope_theta": 10**400}, ["rope_theta = 1000", "a positive number"]),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 10**400}}, ["factor", "a positive number"]),
        (QWEN2, {"num_key_value_heads": ABSENT}, ["no num_key_value_heads"]),
        (QWEN3, {"head_dim": ABSENT}, ["no head_dim"]),
        (QWEN3, {"tie_word_embeddings": ABSENT}, ["no tie_word_embeddings"]),
        (QWEN3, {"rope_theta": ABSENT}, ["no rope_theta"]),
    ],
)
def test_malformed_entries_are_named(
    base: dict[str, Any], changes: dict[str, Any], fragments: list[str]
) -> None:
    with pytest.raises(ExportError) as error:
        parse_config(patched(base, **changes))
    assert error.value.kind == "config"
    for fragment in fragments:
        assert fragment in str(error.value)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"cannot read .*config\.json: No such file"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [("{", "not valid JSON"), ("[]", "holds list"), ("[" * 100_000, "not valid JSON")],
)
def test_broken_config_is_named(text: str, fragment: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ExportError, match=fragment):
        read_model_spec(tmp_path)


def mlx_arguments(module: Any, raw: dict[str, Any]) -> Any:
    return module.ModelArgs.from_dict(raw)


def test_defaults_are_those_of_mlx_lm() -> None:
    """mlx-lm's own argument classes are the oracle."""
    from mlx_lm.models import llama, qwen2

    bare = patched(
        LLAMA, num_key_value_heads=ABSENT, rope_theta=ABSENT, tie_word_embeddings=ABSENT, hidden_act=ABSENT
    )
    ours, theirs = parse_config(bare), mlx_arguments(llama, bare)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.rope.theta == theirs.rope_theta
    assert ours.tied == theirs.tie_word_embeddings
    assert (ours.qkv_bias, ours.mlp_bias) == (theirs.attention_bias, theirs.mlp_bias)

    bare = patched(QWEN2, rope_theta=ABSENT, tie_word_embeddings=ABSENT)
    ours, args = parse_config(bare), mlx_arguments(qwen2, bare)
    assert (ours.rope.theta, ours.tied) == (args.rope_theta, args.tie_word_embeddings)


def test_sliding_window_without_layer_types_is_full_attention() -> None:
    """mlx-lm gives such a Mistral plain caches in every layer."""
    from mlx_lm.models import llama
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    raw = tiny_models.CONFIGS["mistral"]
    model = llama.Model(mlx_arguments(llama, raw))
    assert all(type(cache) is KVCache for cache in make_prompt_cache(model))
    assert [layer["kind"] for layer in parse_config(raw).spec()["layers"]] == ["full"] * 3


def test_agreeing_rope_parameters_are_accepted() -> None:
    raw = patched(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert parse_config(raw).rope == parse_config(LLAMA).rope


def test_model_spec_is_plain_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.CONFIGS["qwen3_nested_rope"]))
    spec = read_model_spec(tmp_path)
    assert json.loads(json.dumps(spec)) == spec
    assert spec["rope"] == {
        "kind": "half-split",
        "theta": 1000000.0,
        "dims": 32,
        "scaling": {"kind": "default"},
    }


def test_gemma3_alternates_and_has_a_rope_for_windows() -> None:
    config = parse_config({**GEMMA3, "num_hidden_layers": 7})
    assert [config.has_window(layer) for layer in range(7)] == [True, True, False, True, True, False, True]
    spec = config.spec()
    assert [layer["kind"] for layer in spec["layers"]] == ["sliding", "sliding", "full"] * 2 + ["sliding"]
    assert spec["layers"][0]["window"] == {"size": 12, "keep": 0}
    assert spec["rope"]["kind"] == "half-split, theta 10000 in windows"
    other = parse_config({**GEMMA3, "rope_local_base_freq": 20000.0}).spec()
    assert other["rope"] != spec["rope"]


def test_gemma3_scales_its_embedding_as_mlx_rounds_it() -> None:
    mx = pytest.importorskip("mlx.core")
    for hidden in (64, 640, 1152, 2560, 3840):
        config = parse_config({**GEMMA3, "hidden_size": hidden})
        assert config.gemma is not None
        assert config.gemma.embedding_scale == mx.array(hidden**0.5, mx.bfloat16).astype(mx.float32).item()
