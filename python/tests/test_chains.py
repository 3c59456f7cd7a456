"""Chains of packages, on the executor and on the fake of Core ML: what is wrong in a chain file, what fails on the
way, and packages that state nothing, as ANEMLL's do not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from kvbaton._export import export, program
from kvbaton._export.config import ModelConfig, Rope, read_config
from kvbaton._export.function import Part
from kvbaton._export.package import write_package
from kvbaton._export.past import FLOAT16, INT32, Kind, Past
from kvbaton._export.rope import tables
from kvbaton._export.weights import Weights
from kvbaton.mlx import make_caches
from kvbaton.testing import FakeCoreML
from mlx_lm.utils import load_model

mb: Any = pytest.importorskip("coremltools.converters.mil").Builder
from coremltools.converters.mil.mil import Function  # noqa: E402

PIECE, CONTEXT = 8, 32
PROMPT = [(5 * i * i + 3 * i + 7) % tiny_models.VOCAB for i in range(21)]


class OneState(Past):
    """ANEMLL's state: keys of all layers, then values of all layers; position ids and mask come in."""

    def __init__(self, part: Part, inputs: dict[str, Any]) -> None:
        super().__init__(PIECE)
        self.part, self.inputs = part, inputs
        self.state = mb.read_state(input=inputs["model.model.kv_cache_0"])

    def kind(self, rope: Rope, window: int | None, prefix: str) -> Kind:
        """Tables by the position ids, the mask as it is given."""
        shape = [1, 1, PIECE, rope.dims]
        cos, sin = (
            mb.reshape(x=mb.gather(x=table, indices=self.inputs["position_ids"], axis=0), shape=shape)
            for table in tables(rope, CONTEXT)
        )
        return Kind(cos, sin, self.inputs["causal_mask"])

    def seen(self, layer: int, k: Any, v: Any) -> tuple[Any, Any]:
        """The state's slots, the rows written."""
        held = self.part.end - self.part.first
        index = layer - self.part.first
        return self.written(index, k), self.written(index + held, v)

    def written(self, index: int, rows: Any) -> Any:
        position = self.inputs["current_pos"]
        after = mb.add(x=position, y=np.int32(PIECE))
        zero, at, to = (np.array([n], np.int32) for n in (0, index, index + 1))
        _, heads, count, lanes = self.state.shape
        ends = [np.array([n], np.int32) for n in (heads, lanes)]
        begin = mb.concat(values=[at, zero, position, zero], axis=0)
        end = mb.concat(values=[to, ends[0], after, ends[1]], axis=0)
        update = mb.slice_update(x=self.state, update=rows, begin=begin, end=end)
        self.state = mb.coreml_update_state(state=self.inputs["model.model.kv_cache_0"], value=update)
        return mb.slice_by_index(x=self.state, begin=[index, 0, 0, 0], end=[index + 1, heads, count, lanes])


def embeddings(config: ModelConfig, take: Any) -> Any:
    with Function({"input_ids": mb.TensorSpec((1, PIECE), dtype=INT32)}, program.OPSET) as function:
        builder = program._Builder(config, take, _NoLayers(PIECE), Part(0, 0, config.layers))
        x = builder.embeddings(function.inputs["input_ids"])
        function.set_outputs([mb.identity(x=x, name="hidden_states")])
    return function


class _NoLayers(OneState):
    def __init__(self, rows: int) -> None:
        Past.__init__(self, rows)

    def kind(self, rope: Rope, window: int | None, prefix: str) -> Kind:
        """None are needed."""
        return Kind(None, None, None)


def layers(config: ModelConfig, take: Any, part: Part) -> Any:
    shape = (2 * (part.end - part.first), config.kv_heads, CONTEXT, config.head_dim)
    specs = {
        "hidden_states": mb.TensorSpec((1, PIECE, config.hidden_size), dtype=FLOAT16),
        "position_ids": mb.TensorSpec((PIECE,), dtype=INT32),
        "causal_mask": mb.TensorSpec((1, 1, PIECE, CONTEXT), dtype=FLOAT16),
        "current_pos": mb.TensorSpec((1,), dtype=INT32),
        "model.model.kv_cache_0": mb.StateTensorSpec(shape, dtype=FLOAT16),
    }
    with Function(specs, program.OPSET) as function:
        builder = program._Builder(config, take, OneState(part, function.inputs), part)
        x = function.inputs["hidden_states"]
        for layer in range(part.first, part.end):
            x, _, _ = builder.layer(layer, x, None, None)
        function.set_outputs([mb.identity(x=x, name="output_hidden_states")])
    return function


CHAIN = """\
format = 1
layout = "anemll-chunked"

[[stage]]
package = "embeddings.mlpackage"
layout = { name = "e", partial = true, inputs.tokens = "input_ids", outputs.hidden = "hidden_states" }

[[stage]]
package = "chunk_0.mlpackage"
function = "prefill"
layout = "ffn.toml"

[[stage]]
package = "chunk_1.mlpackage"
function = "prefill"
layout = "ffn.toml"
"""
FFN = """\
name = "ffn"
partial = true

[inputs]
hidden = "hidden_states"
positions = "position_ids"
mask = "causal_mask"
position = "current_pos"

[outputs]
hidden = "output_hidden_states"
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's folder, and a chain of packages in ANEMLL's shape made from it."""
    parent = tmp_path_factory.mktemp("foreign")
    folder = tiny_models.build("llama_no_groups", parent)
    config, weights = read_config(folder), Weights(folder, None)
    config = ModelConfig(**{**config.__dict__, "tied": True})
    (parent / "chain").mkdir()
    parts = [Part(0, 2, config.layers), Part(2, 3, config.layers)]
    made = {"embeddings": {"main": embeddings(config, weights.take)}}
    for index, part in enumerate(parts):
        made[f"chunk_{index}"] = {"prefill": layers(config, weights.take, part)}
    for name, functions in made.items():
        write_package(functions, next(iter(functions)), parent / f"chain/{name}.mlpackage", {}, name)
    (parent / "chain/chain.toml").write_text(CHAIN)
    (parent / "chain/ffn.toml").write_text(FFN)
    return folder, parent / "chain"


def run(kvbaton_cli: Any, chain: Path, folder: Path, tokens: list[int], tmp_path: Path, *more: str) -> Any:
    ids = tmp_path / "ids.json"
    ids.write_text(str(tokens))
    where = ("--prefill", chain, "--decode", folder, "--model", folder, "--prompt-tokens", ids)
    return kvbaton_cli("run", *where, "--dtype", "float32", "--max-tokens", "12", "--json", *more)


@pytest.mark.parametrize("length", [2, PIECE + 1, 21])
def test_packages_of_another_exporter_prefill(
    kvbaton_cli: Any, foreign: tuple[Path, Path], tmp_path: Path, length: int
) -> None:
    folder, chain = foreign
    done = run(kvbaton_cli, chain, folder, PROMPT[:length], tmp_path)
    assert done.code == 0, done.stderr
    report = done.json()
    assert report["prefill"]["tokens"] == report["handed_off_tokens"] == length - 1
    model = load_model(folder)[0]
    model.set_dtype(mx.float32)
    caches = make_caches(model)
    token: list[int] = PROMPT[:length]
    for number, chosen in enumerate(report["tokens"]):
        logits = np.array(model(mx.array([token]), cache=caches)[0, -1])
        assert logits.max() - logits[chosen] < 0.005 * np.abs(logits).max(), number
        token = [chosen]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model's folder, and a chain of kvbaton's own that takes the past as inputs."""
    parent = tmp_path_factory.mktemp("own")
    folder = tiny_models.build("llama_tied", parent)
    export(folder, parent / "chain", buckets=(PIECE,), context=(CONTEXT,), chunk=PIECE, split=2)
    return folder, parent / "chain"


@pytest.mark.parametrize("made_by", ["foreign", "own"])
@pytest.mark.parametrize("align", [0, 100])
def test_both_engines_leave_the_same_cache(request: pytest.FixtureRequest, made_by: str, align: int) -> None:
    folder, chain = request.getfixturevalue(made_by)
    stated = {"model": folder} if made_by == "foreign" else {}
    executor = kvbaton.Prefill(chain, engine="cpu", **stated)
    fake = FakeCoreML(chain / "chain.toml", row_align_bytes=align, **stated)
    assert (executor.engine, fake.engine) == ("cpu", "fake")
    for length in (1, PIECE, PIECE + 1, 21):
        ours, theirs = fake(PROMPT[:length]), executor(PROMPT[:length])
        assert (ours.report.engine, ours.report.compute_units) == ("fake", "all")
        assert (ours.logits is None) == (made_by == "foreign")
        if ours.logits is not None and theirs.logits is not None:
            assert np.array_equal(ours.logits, theirs.logits)
        for one, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
            for part in ("key", "value"):
                assert np.array_equal(one.arrays[part], other.arrays[part])
        del ours, one


@pytest.mark.parametrize("made_by", ["foreign", "own"])
def test_what_fails_or_hangs_on_the_way_hands_nothing_over(
    request: pytest.FixtureRequest, made_by: str
) -> None:
    folder, chain = request.getfixturevalue(made_by)
    stated = {"model": folder} if made_by == "foreign" else {}
    foreign_parts = ("embeddings", "chunk_0", "chunk_1")
    parts = foreign_parts if made_by == "foreign" else ("part_0", "part_1")
    model = load_model(folder)[0]
    for habits, said in (
        ({"fails_at": (1,)}, "prediction 1 failed"),
        (
            {"hangs_at": (1,), "hang_seconds": 1.0, "prediction_timeout": 0.3},
            "did not return within 0.3 s",
        ),
    ):
        engine = FakeCoreML(chain, **habits, **stated)  # type: ignore[arg-type]
        caches = make_caches(model)
        # Every package's second prediction fails: in each prompt another's.
        for part in parts:
            with pytest.raises(kvbaton.KvbatonError, match=f"{said}.*{part}.mlpackage"):
                kvbaton.prefill_to_mlx(engine, PROMPT, model, prompt_cache=caches)
            assert all(cache.offset == 0 for cache in caches)
        handoff = kvbaton.prefill_to_mlx(engine, PROMPT, model, prompt_cache=caches)
        assert (handoff.remaining_tokens, caches[0].offset) == (PROMPT[-1:], len(PROMPT) - 1)


def test_states_take_whole_pieces(kvbaton_cli: Any, foreign: tuple[Path, Path], tmp_path: Path) -> None:
    folder, chain = foreign
    done = run(kvbaton_cli, chain, folder, [1] * (CONTEXT + 2), tmp_path)
    assert done.code == 2
    assert done.json()["error"]["kind"] == "prompt_too_long"
    assert "34 tokens; the package takes at most 33" in done.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (("format = 1", "format = 2"), "a chain of format 2, this version reads format 1"),
        (("format = 1", "format = "), "line 1:"),
        (('package = "chunk_1', 'file = "chunk_1'), "unknown field `file`"),
        (('layout = "anemll-chunked"', 'layout = "nothing.toml"'), "no layout is called `nothing.toml`"),
        (('layout = "ffn.toml"\n', ""), "does not state its layout"),
        (("chunk_1.mlpackage", "chunk_9.mlpackage"), "chunk_9.mlpackage"),
        (('function = "prefill"', 'function = "infer"'), "infer"),
        (("inputs.tokens", "inputs.hidden"), "has neither tokens of shape (1, S)"),
        (('outputs.hidden = "hidden_states"', 'outputs.logits = "hidden_states"'), "leaves no hidden states"),
    ],
)
def test_what_is_wrong_in_a_chain_is_named(
    kvbaton_cli: Any, foreign: tuple[Path, Path], tmp_path: Path, change: tuple[str, str], fragment: str
) -> None:
    folder, chain = foreign
    copy = tmp_path / "chain"
    shutil.copytree(chain, copy)
    assert change[0] in CHAIN
    (copy / "chain.toml").write_text(CHAIN.replace(*change))
    done = run(kvbaton_cli, copy, folder, PROMPT, tmp_path)
    assert done.code == 2, done.stderr
    assert fragment in done.json()["error"]["message"]
    with pytest.raises(kvbaton.KvbatonError) as refused:
        FakeCoreML(copy, model=folder)
    assert str(refused.value) == done.json()["error"]["message"]


def test_an_input_that_nobody_names_is_named(
    kvbaton_cli: Any, foreign: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, chain = foreign
    copy = tmp_path / "chain"
    shutil.copytree(chain, copy)
    (copy / "ffn.toml").write_text(FFN.replace('mask = "causal_mask"\n', ""))
    done = run(kvbaton_cli, copy, folder, PROMPT, tmp_path)
    assert done.code == 2
    said = "does not say what the program's input `causal_mask` is"
    assert said in done.json()["error"]["message"]
    with pytest.raises(kvbaton.KvbatonError, match=said):
        FakeCoreML(copy, model=folder)(PROMPT)


ENGINES = pytest.mark.parametrize("engine", [kvbaton.Prefill, FakeCoreML])


@ENGINES
def test_parts_of_two_models_are_refused(tmp_path: Path, engine: type[kvbaton.Prefill]) -> None:
    for name in ("llama_tied", "llama_linear_rope"):
        folder = tiny_models.build(name, tmp_path)
        export(folder, tmp_path / f"{name}-chain", buckets=(8,), split=2)
    mixed = tmp_path / "llama_tied-chain"
    shutil.rmtree(mixed / "part_1.mlpackage")
    shutil.copytree(tmp_path / "llama_linear_rope-chain/part_1.mlpackage", mixed / "part_1.mlpackage")
    with pytest.raises(kvbaton.KvbatonError, match="are not of one model: rope differs"):
        engine(mixed)


@ENGINES
def test_parts_of_other_lengths_are_refused(tmp_path: Path, engine: type[kvbaton.Prefill]) -> None:
    folder = tiny_models.build("llama_tied", tmp_path)
    for bucket in (8, 16):
        export(folder, tmp_path / f"chain-{bucket}", buckets=(bucket,), split=2)
    shutil.rmtree(tmp_path / "chain-8/part_1.mlpackage")
    shutil.copytree(tmp_path / "chain-16/part_1.mlpackage", tmp_path / "chain-8/part_1.mlpackage")
    with pytest.raises(kvbaton.KvbatonError, match=r"takes \[8\] tokens .* \[16\]"):
        engine(tmp_path / "chain-8")


@ENGINES
def test_a_part_that_is_left_out_is_missed(tmp_path: Path, engine: type[kvbaton.Prefill]) -> None:
    folder = tiny_models.build("llama_tied", tmp_path)
    export(folder, tmp_path / "chain", buckets=(8,), split=3)
    lines = (
        (tmp_path / "chain/chain.toml").read_text().replace('[[stage]]\npackage = "part_1.mlpackage"\n', "")
    )
    (tmp_path / "chain/chain.toml").write_text(lines)
    with pytest.raises(kvbaton.KvbatonError, match="layer 1"):
        engine(tmp_path / "chain")([1, 2, 3])
