"""The demo's model conversion, the shipped prompts and the reference answers fit together."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent.parent
MODEL = ROOT / "demo" / "out" / "model"
COUNTS = {1, 2, 17, 127, 128, 129, 255, 256, 257, 400, 511, 512, 513}


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    pytest.importorskip("gguf")
    return importlib.import_module("convert_smollm2")


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    text = (TESTS / "prompts" / "prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((TESTS / "golden" / "smollm2_reference.json").read_text())
    return content


def test_rotary_rows_are_put_back(converter: ModuleType) -> None:
    """The forward permutation is the one llama.cpp's converter applies to Q and K."""
    heads, rows = 3, 24
    original = np.arange(rows * 5, dtype=np.float32).reshape(rows, 5)
    stored = original.reshape(heads, 2, rows // heads // 2, 5).swapaxes(1, 2).reshape(rows, 5)
    assert not np.array_equal(stored, original)
    np.testing.assert_array_equal(converter.half_split_rows(stored, heads), original)


@pytest.mark.parametrize(
    ("gguf", "mlx"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.12.attn_output.weight", "model.layers.12.self_attn.o_proj.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_tensor_names(converter: ModuleType, gguf: str, mlx: str) -> None:
    assert converter.mlx_name(gguf) == mlx


def test_prompts_cover_the_bucket_edges(prompts: list[dict[str, Any]]) -> None:
    assert len({prompt["name"] for prompt in prompts}) == len(prompts) == 24
    assert {prompt["token_count"] for prompt in prompts} >= COUNTS


def test_reference_answers_every_prompt(prompts: list[dict[str, Any]], reference: dict[str, Any]) -> None:
    assert reference["dtype"] == "float32"
    found = [(entry["name"], entry["prompt_tokens"]) for entry in reference["prompts"]]
    assert found == [(prompt["name"], prompt["token_count"]) for prompt in prompts]
    for entry in reference["prompts"]:
        assert len(entry["tokens"]) == reference["new_tokens"] == 32
        assert [best for best, _ in entry["top2_ids"]] == entry["tokens"]
        assert all(first >= second for first, second in entry["top2_logits"])


@pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} is not there: run demo/convert_smollm2.py")
def test_token_counts_are_smollm2s(prompts: list[dict[str, Any]]) -> None:
    utils = pytest.importorskip("mlx_lm.tokenizer_utils")
    tokenizer = utils.load(MODEL)
    for prompt in prompts:
        assert len(tokenizer.encode(prompt["prompt"])) == prompt["token_count"], prompt["name"]
    message = [{"role": "user", "content": (ROOT / "demo" / "prompt.txt").read_text().strip()}]
    assert 380 <= len(tokenizer.apply_chat_template(message, add_generation_prompt=True)) <= 440
