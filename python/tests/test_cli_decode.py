"""``kvbaton run`` with decode packages, MLX models that prefill, and long prompts; ``kvbaton export`` for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kvbaton
import mlx.core as mx
import numpy as np
import pytest
import tiny_models
from kvbaton._export import export
from kvbaton.mlx import make_caches
from mlx_lm.utils import load_model

CONTEXT, CHUNK = 64, 16
PROMPT = [(7 * i * i + 3 * i + 11) % tiny_models.VOCAB for i in range(41)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its prefill and decode packages, and those of another model."""
    parent = tmp_path_factory.mktemp("made")
    for name in ("llama_tied", "llama_linear_rope"):
        folder = tiny_models.build(name, parent)
        export(folder, parent / f"{name}-d.mlpackage", kind="decode", context=(CONTEXT,))
    options = {"buckets": (8,), "context": (CONTEXT,), "chunk": CHUNK}
    export(parent / "llama_tied", parent / "p.mlpackage", **options)
    return parent


def run(kvbaton_cli: Any, made: Path, tmp_path: Path, tokens: list[int], **flags: Any) -> Any:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(tokens))
    given = {
        "prefill": made / "p.mlpackage",
        "decode": made / "llama_tied-d.mlpackage",
        "prompt-tokens": ids,
        "max-tokens": 8,
        **{name.replace("_", "-"): value for name, value in flags.items()},
    }
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return kvbaton_cli("run", *words, "--json")


def alone(folder: Path, tokens: list[int], chosen: list[int]) -> None:
    """``chosen`` are mlx-lm's own greedy tokens, but for near ties."""
    model = load_model(folder)[0]
    model.set_dtype(mx.float32)
    caches, token = make_caches(model), tokens
    for number, choice in enumerate(chosen):
        logits = np.array(model(mx.array([token]), cache=caches)[0, -1])
        assert logits.max() - logits[choice] < 0.005 * np.abs(logits).max(), number
        token = [choice]


@pytest.mark.parametrize("prefill", ["p.mlpackage", "llama_tied"])
@pytest.mark.parametrize("length", [1, 2, 9, 41])
def test_a_package_decodes(kvbaton_cli: Any, made: Path, tmp_path: Path, prefill: str, length: int) -> None:
    done = run(kvbaton_cli, made, tmp_path, PROMPT[:length], prefill=made / prefill)
    assert done.code == 0, done.stderr
    report = done.json()
    assert len(report["tokens"]) == 8
    assert (report["text"] == "") == (prefill == "p.mlpackage")  # a package has no tokenizer
    alone(made / "llama_tied", PROMPT[:length], report["tokens"])
    assert report["decode"]["engine"] == "cpu"
    assert report["remaining_tokens"] == PROMPT[length - 1 : length]
    handoff = report["handoff"]
    assert handoff["rows"] == length - 1
    assert handoff["bytes"] == 2 * 3 * 2 * 16 * 2 * (length - 1)  # K and V, layers, heads, lanes, bytes, rows
    assert handoff["first_step_copied_bytes"] == 0
    assert (handoff["memcpy_ratio"] is None) == (length == 1)
    if length > 1:
        assert report["prefill"]["engine"] == ("cpu" if prefill == "p.mlpackage" else "mlx-cpu")
        assert report["prefill"]["tokens"] == length - 1


@pytest.mark.parametrize("name", ["llama_tied", "gemma3"])
def test_chunks_are_handed_on_while_the_next_one_runs(
    kvbaton_cli: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    parent = tmp_path_factory.mktemp(name)
    folder = tiny_models.build(name, parent)
    export(folder, parent / "p.mlpackage", buckets=(8,), context=(CONTEXT,), chunk=CHUNK)
    flags = {"decode": folder, "dtype": "float32", "max_tokens": 24}
    done = run(kvbaton_cli, parent, tmp_path, PROMPT, **flags)
    assert done.code == 0, done.stderr
    report = done.json()
    alone(folder, PROMPT, report["tokens"])
    assert report["handoff"]["streamed"]["pieces"] == 3  # 16, 16 and 8 rows
    assert report["handoff"]["rows"] == 40


def test_mlx_decodes_what_mlx_prefilled(kvbaton_cli: Any, made: Path, tmp_path: Path) -> None:
    folder = made / "llama_tied"
    done = run(kvbaton_cli, made, tmp_path, PROMPT, prefill=folder, decode=folder, dtype="float32")
    assert done.code == 0, done.stderr
    alone(folder, PROMPT, done.json()["tokens"])


def test_a_full_context_ends_the_answer(kvbaton_cli: Any, made: Path, tmp_path: Path) -> None:
    done = run(kvbaton_cli, made, tmp_path, [*PROMPT, *PROMPT][:60], max_tokens=50)
    assert done.code == 0, done.stderr
    # 59 rows are handed over; 64 fit, and the last of them gives a token, too.
    assert len(done.json()["tokens"]) == CONTEXT - 59


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_temperature_samples(kvbaton_cli: Any, made: Path, tmp_path: Path, temperature: float) -> None:
    answers = {
        tuple(run(kvbaton_cli, made, tmp_path, PROMPT[:9], temp=temperature).json()["tokens"])
        for _ in range(3)
    }
    assert (len(answers) > 1) == (temperature > 0)


@pytest.mark.parametrize(
    ("flags", "kind", "fragment"),
    [
        ({"decode": "p.mlpackage"}, "package", "decodes a token at a time"),
        ({"prefill": "llama_tied-d.mlpackage"}, "package", "prefills"),
        ({"decode": "llama_linear_rope-d.mlpackage"}, "incompatible", "differ in rope"),
        ({"prefill": "llama_linear_rope"}, "incompatible", "differ in rope"),
        ({"dtype": "float32"}, "usage", "--dtype is for MLX models"),
        ({"prompt-tokens": None, "prompt": "hello"}, "usage", "neither side has a tokenizer"),
        ({"prompt-tokens": None, "prompt": "hello", "tokenizer": "p.mlpackage"}, "usage", "has no tokenizer"),
        ({"prefill": "llama_tied", "layout": "yetter"}, "usage", "--layout and --model are for packages"),
        ({"prefill": "llama_tied", "tokens_seen": 3}, "usage", "--tokens-seen is for dumps"),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    kvbaton_cli: Any, made: Path, tmp_path: Path, flags: dict[str, Any], kind: str, fragment: str
) -> None:
    places = ("decode", "prefill", "tokenizer")
    done = run(
        kvbaton_cli,
        made,
        tmp_path,
        PROMPT[:9],
        **{name: made / value if name in places else value for name, value in flags.items()},
    )
    error = done.json()["error"]
    assert (done.code, error["kind"]) == (2, kind), error
    assert fragment in error["message"]


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is there")
@pytest.mark.parametrize("prefill", ["p.mlpackage", "llama_tied"])
def test_the_engine_s_flags_reach_the_package_that_decodes(
    kvbaton_cli: Any, made: Path, tmp_path: Path, prefill: str
) -> None:
    for flags, kind, said in (
        ({"engine": "coreml"}, "unavailable", "the engine coreml needs a Mac"),
        ({"compute_units": "cpu-and-ne"}, "usage", "--compute-units is for the engine coreml"),
        ({"engine_timeout": 5}, "usage", "--engine-timeout is for the engine coreml"),
        ({"prediction_timeout": 5}, "usage", "--prediction-timeout is for the engine coreml"),
    ):
        done = run(kvbaton_cli, made, tmp_path, [1, 2, 3], prefill=made / prefill, **flags)
        assert (done.code, done.json()["error"]["kind"]) == (2, kind)
        assert said in done.json()["error"]["message"]
    done = run(kvbaton_cli, made, tmp_path, [1, 2, 3], prefill=made / prefill, engine="cpu")
    assert done.code == 0, done.stderr
    assert done.json()["decode"]["engine"] == "cpu"


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is there")
@pytest.mark.parametrize(
    ("flag", "value", "kind", "said"),
    [
        ("engine", "coreml", "unavailable", "the engine coreml needs a Mac"),
        ("compute-units", "cpu-and-ne", "usage", "--compute-units is for the engine coreml"),
        ("engine-timeout", 5, "usage", "--engine-timeout is for the engine coreml"),
        ("prediction-timeout", 5, "usage", "--prediction-timeout is for the engine coreml"),
    ],
)
def test_a_chain_takes_the_engine_s_flags_as_a_package_does(
    kvbaton_cli: Any, made: Path, tmp_path: Path, flag: str, value: Any, kind: str, said: str
) -> None:
    chain, model = tmp_path / "chain", made / "llama_tied"
    chain.mkdir()
    (chain / "chain.toml").write_text('format = 1\n[[stage]]\npackage = "p.mlpackage"\n')
    (tmp_path / "prompts.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    verify = ("verify", "--prompts", tmp_path / "prompts.jsonl", "--decode", model, f"--{flag}", value)
    for path in (chain, chain / "chain.toml", made / "p.mlpackage"):
        for done in (
            run(kvbaton_cli, made, tmp_path, [1, 2, 3], prefill=path, decode=model, **{flag: value}),
            kvbaton_cli(*map(str, (*verify, "--prefill", path, "--json"))),
        ):
            error = done.json()["error"]
            assert (done.code, error["kind"]) == (2, kind), error
            assert said in error["message"]
        with pytest.raises(kvbaton.KvbatonError, match=said):
            kvbaton.Prefill(path, **{flag.replace("-", "_"): value})


def test_a_chain_runs_with_the_engine_named_and_its_decoder_s_flags_are_the_decoder_s(
    kvbaton_cli: Any, made: Path, tmp_path: Path
) -> None:
    export(made / "llama_tied", tmp_path / "chain", buckets=(8,), split=2)
    chain, model = tmp_path / "chain" / "chain.toml", made / "llama_tied"
    done = run(kvbaton_cli, made, tmp_path, [1, 2, 3], prefill=chain, decode=model, engine="cpu")
    assert (done.code, done.json()["prefill"]["engine"]) == (0, "cpu"), done.stderr
    assert kvbaton.Prefill(chain, engine="cpu").engine == "cpu"
    bench = ("bench", "run", "--prefill", chain, "--decode", model, "--context", "5", "--max-tokens", "2")
    done = kvbaton_cli(*map(str, bench), "--repeats", "1", "--json")
    assert done.code == 0, done.stderr
    own = "coreml" if sys.platform == "darwin" else "cpu"
    assert (done.json()["prefill_engine"], done.json()["prefill"]) == (own, str(chain))
    done = kvbaton_cli("bench", "prefill", str(chain.parent), "--tokens", "5", "--json")
    assert [row["engine"] for row in done.json()["rows"]] == [own], done.stderr
    if sys.platform != "darwin":
        done = run(kvbaton_cli, made, tmp_path, [1, 2, 3], prefill=chain, engine="coreml")
        assert (done.code, done.json()["error"]["kind"]) == (2, "unavailable")
        assert "the engine coreml needs a Mac" in done.json()["error"]["message"]


def test_a_prompt_longer_than_the_context_is_refused(kvbaton_cli: Any, made: Path, tmp_path: Path) -> None:
    done = run(kvbaton_cli, made, tmp_path, [1] * (CONTEXT + 2))
    error = done.json()["error"]
    assert (done.code, error["kind"]) == (2, "prompt_too_long")
    assert f"66 tokens; the package takes at most {CONTEXT + 1}" in error["message"]
    assert "--context 128" in error["hint"]


def test_a_tokenizer_of_the_prefill_side_is_taken(
    kvbaton_cli: Any, model_folder: Path, tmp_path: Path
) -> None:
    """Text comes from an MLX folder's tokenizer, or from the one that is named."""
    export(model_folder, tmp_path / "d.mlpackage", kind="decode", context=(256,))
    flags = ("--prompt", "The capital of France is", "--ignore-chat-template", "--max-tokens", "4", "--json")
    done = kvbaton_cli("run", "--prefill", model_folder, "--decode", tmp_path / "d.mlpackage", *flags)
    assert done.code == 0, done.stderr
    assert "Paris" in done.json()["text"]
    assert kvbaton.Decode(tmp_path / "d.mlpackage").capacity == 256


def test_export_writes_what_was_asked_for(kvbaton_cli: Any, made: Path, tmp_path: Path) -> None:
    folder = made / "llama_tied"
    report = kvbaton_cli(
        "export", folder, tmp_path / "d.mlpackage", "--kind", "decode", "--context", "32", "--json"
    ).json()
    assert (report["kind"], report["functions"], report["contexts"]) == ("decode", ["decode"], [32])
    report = kvbaton_cli(
        *("export", folder, tmp_path / "chain", "--split", "3", "--buckets", "8"),
        *("--context", "32,64", "--chunk", "8", "--json"),
    ).json()
    assert report["functions"] == ["prefill_8", "prefill_8_of_32", "prefill_8_of_64"]
    assert report["packages"] == [f"part_{index}.mlpackage" for index in range(3)]
    inspected = kvbaton_cli("inspect", tmp_path / "chain", "--json").json()
    assert (inspected["kind"], inspected["path"]) == ("chain", str(tmp_path / "chain/chain.toml"))
    assert [Path(package["path"]).name for package in inspected["packages"]] == report["packages"]
    text = kvbaton_cli("inspect", tmp_path / "chain/chain.toml").stdout
    assert "a chain of 3 packages" in text
    assert text.count(": Core ML package, ") == 3
    refused = kvbaton_cli("inspect", tmp_path / "chain", "--prompt-tokens", tmp_path / "none", "--json")
    assert (refused.code, refused.json()["error"]["kind"]) == (2, "usage")
    assert kvbaton.Prefill(tmp_path / "chain")(PROMPT).cache.tokens_seen == 41
    done = kvbaton_cli("export", folder, tmp_path / "d.mlpackage", "--kind", "decode", "--json")
    assert (done.code, done.json()["error"]["kind"]) == (2, "usage")
