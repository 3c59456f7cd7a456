"""What a prompt reaches inside a package, against MLX with its blocks watched; and what each numerics rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from conftest import Run
from export_helpers import TinyModel
from kvbaton._export import export
from safetensors.numpy import load_file, save_file

TEXT = "A cache holds keys and values, one row a token, and the decoder reads all of them at each step. " * 3


@pytest.fixture(scope="module")
def ids(smollm2: Any) -> list[int]:
    return list(smollm2[1].encode(TEXT))


def watched(model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[float, int, int]:
    """The largest value that a block of MLX's own model computes, its layer and its position."""
    from mlx_lm.models.llama import TransformerBlock

    seen: list[tuple[float, int, int]] = []
    layers = {id(layer): number for number, layer in enumerate(model.model.layers)}

    def block(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        def note(value: mx.array) -> mx.array:
            rows = np.abs(np.array(value)[0]).max(axis=-1)
            seen.append((float(rows.max()), layers[id(self)], int(rows.argmax())))
            return value

        h = note(x + note(self.self_attn(note(self.input_layernorm(x)), mask, cache)))
        n = note(self.post_attention_layernorm(h))
        product = note(nn.silu(note(self.mlp.gate_proj(n))) * note(self.mlp.up_proj(n)))
        return note(h + note(self.mlp.down_proj(product)))

    with monkeypatch.context() as patch:
        patch.setattr(TransformerBlock, "__call__", block)
        mx.eval(model(mx.array([ids])))
    return max(seen)


def test_the_largest_activation_is_that_of_mlx(
    smollm2: Any, package: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    value, layer, position = watched(smollm2[0], ids, monkeypatch)
    found = kvbaton.Prefill(package, numerics="f32").activations(ids)
    assert found.largest is not None
    assert abs(found.largest.value) == pytest.approx(value, rel=1e-3)
    assert (found.largest.layer, found.largest.position) == (layer, position)
    assert (found.numerics, found.tokens, found.functions) == ("f32", len(ids), ["prefill_128"])
    assert found.infinite == found.nan == found.beyond_half == 0
    assert found.first_overflow is None
    assert [a.layer for a in found.layers] == list(range(30))
    assert found.masked_results == 30  # the sum of scores and mask in each layer
    for numerics in ("f16-storage", "f16-accumulate"):
        rounded = kvbaton.Prefill(package, numerics=numerics).activations(ids)
        assert rounded.largest is not None
        assert rounded.largest.position == position
        assert abs(rounded.largest.value) == pytest.approx(value, rel=0.05)


def test_each_numerics_gives_logits_of_its_own(package: Path, ids: list[int], smollm2: Any) -> None:
    reference = np.array(smollm2[0](mx.array([ids]))[0, -1], np.float64)

    def error(numerics: Any) -> float:
        logits = kvbaton.Prefill(package, numerics=numerics)(ids).logits
        return float(np.linalg.norm(logits - reference) / np.linalg.norm(reference))

    single, storage, accumulate = map(error, ("f32", "f16-storage", "f16-accumulate"))
    assert single < 2e-3  # weights and logits are fp16
    assert single < storage < accumulate < 0.2


def test_padding_does_not_count(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A prompt of five tokens reaches the same in a function of 8 and in one of 64."""
    folder = tiny_model("llama_tied")
    found = []
    for rows in (8, 64):
        export(folder, tmp_path / f"{rows}.mlpackage", buckets=(rows,))
        prefill = kvbaton.Prefill(tmp_path / f"{rows}.mlpackage", numerics="f32")
        found.append(prefill.activations([3, 1, 4, 1, 5]))
    short, long = found
    assert short.largest is not None
    assert long.largest is not None
    assert short.largest.value == pytest.approx(long.largest.value, rel=1e-6)
    assert short.largest.position == long.largest.position


@pytest.fixture(scope="module")
def overflowing(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose second layer leaves fp16."""
    folder = tiny_model("llama_tied")
    made = tmp_path_factory.mktemp("overflow") / "model"
    made.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (made / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, value in weights.items():
            if name.startswith("model.layers.1.mlp"):
                largest = float(np.abs(value.astype(np.float32)).max())
                weights[name] = (value.astype(np.float32) * (3000 / largest)).astype(value.dtype)
        save_file(weights, made / file.name, metadata={"format": "mlx"})
    export(made, made.parent / "o.mlpackage", buckets=(8,))
    return made.parent / "o.mlpackage"


def test_overflow_is_counted_and_has_its_place(overflowing: Path) -> None:
    wide = kvbaton.Prefill(overflowing, numerics="f32").activations([3, 1, 4])
    assert wide.beyond_half > 0
    assert wide.infinite == wide.nan == 0
    assert wide.largest is not None
    assert abs(wide.largest.value) > 65504
    assert wide.first_overflow is not None
    assert wide.first_overflow.layer == 1
    half = kvbaton.Prefill(overflowing).activations([3, 1, 4])
    assert half.infinite > 0
    assert half.beyond_half == 0
    assert half.largest is not None
    assert abs(half.largest.value) <= 65504
    assert half.first_overflow is not None
    assert half.first_overflow.output == wide.first_overflow.output


def test_inspect_prints_what_a_prompt_reaches(
    kvbaton_cli: Run, overflowing: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([3, 1, 4]))
    prompt = ("--prompt-tokens", tmp_path / "ids.json")
    document = kvbaton_cli("inspect", overflowing, *prompt, "--json").json()
    assert document["kind"] == "mlpackage"
    expected = kvbaton.Prefill(overflowing).activations([3, 1, 4])
    activations = document["activations"]
    assert expected.largest is not None
    assert activations["largest"]["value"] == expected.largest.value
    assert activations["infinite"] == expected.infinite
    text = kvbaton_cli("inspect", overflowing, *prompt, "--numerics", "f32").stdout
    assert "largest activation" in text
    assert "numerics f32" in text
    assert "layer 1" in text
    assert "activations" not in kvbaton_cli("inspect", overflowing, "--json").json()


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (("--prompt", "hello"), "usage", "tokenizer"),
        (("--prompt", "hello", "--model", "nowhere"), "usage", "no tokenizer"),
        (("--prompt-tokens", "nothing.json"), "usage", "nothing.json"),
        (("--prompt-tokens", "-"), "empty_prompt", "no tokens"),
        (("--prompt-tokens", "-", "--numerics", "f64"), "usage", "f64"),
    ],
)
def test_inspect_refuses_prompts_it_cannot_run(
    kvbaton_cli: Run, overflowing: Path, arguments: tuple[str, ...], kind: str, says: str
) -> None:
    done = kvbaton_cli("inspect", overflowing, *arguments, "--json", stdin="[]")
    assert done.code == 2, done.stderr
    assert done.json()["error"]["kind"] == kind
    assert says in done.json()["error"]["message"]


def test_unknown_numerics_are_refused(overflowing: Path) -> None:
    with pytest.raises(kvbaton.errors.UsageError, match="f64"):
        kvbaton.Prefill(overflowing, numerics="f64")  # type: ignore[arg-type]
