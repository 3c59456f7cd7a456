"""The command line, in processes of its own: documents, streams, exit codes, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from conftest import Run
from kvbaton._export import export

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and its package, functions of 8 and 32 tokens."""
    parent = tmp_path_factory.mktemp("cli")
    folder = tiny_models.build("llama_tied", parent)
    export(folder, parent / "tiny.mlpackage", buckets=(8, 32))
    return folder, parent / "tiny.mlpackage"


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    return file


def error(finished: Any, kind: str, code: int = 2) -> dict[str, Any]:
    """The one error of a ``--json`` run."""
    assert finished.code == code, finished.stderr
    document = finished.json()["error"]
    assert document["kind"] == kind, document
    assert "\n" not in document["message"]
    assert "Traceback" not in finished.stderr
    return dict(document)


def run_tiny(cli: Run, tiny: tuple[Path, Path], *more: str | Path) -> Any:
    folder, package = tiny
    return cli("run", "--prefill", package, "--decode", folder, *more)


def test_run_reports_under_the_documented_names(kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path) -> None:
    more = ("--prompt-tokens", ids, "--max-tokens", "5", "--dtype", "float32", "--json")
    report = run_tiny(kvbaton_cli, tiny, *more).json()
    assert report["prompt_tokens"] == len(IDS)
    assert report["handed_off_tokens"] == len(IDS) - 1
    assert report["remaining_tokens"] == IDS[-1:]
    assert 1 <= len(report["tokens"]) <= 5
    assert set(report["prefill"]) >= {"engine", "seconds", "tokens_per_second"}
    handoff = report["handoff"]
    assert handoff["path"] == "convert"  # the package's cache is float16
    assert handoff["bytes"] == 3 * 2 * 2 * 7 * 16 * 4
    assert handoff["first_step_copied_bytes"] == 0
    assert handoff["exposed_seconds"] == handoff["seconds"] >= handoff["copy_seconds"] > 0
    assert handoff["memcpy_ratio"] > 0
    assert set(handoff) >= {"copies", "gigabytes_per_second"}
    assert set(report["decode"]) >= {"engine", "seconds", "tokens_per_second"}
    assert report["time_to_first_token_seconds"] >= report["prefill"]["seconds"] + handoff["seconds"]


@pytest.mark.parametrize("count", [1, 2, 12])
def test_run_generates_what_mlx_generates_alone(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path, count: int
) -> None:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    prompt = [(5 * i * i + i + 3) % tiny_models.VOCAB for i in range(30)]
    file = tmp_path / "ids"
    file.write_text(json.dumps(prompt))
    more = ("--prompt-tokens", file, "--max-tokens", str(count), "--dtype", "float32", "--json")
    model = load_model(tiny[0])[0]
    model.set_dtype(mx.float32)
    alone = [int(step[0]) for step in generate_step(mx.array(prompt), model, max_tokens=count)]
    ends = alone.index(1) + 1 if 1 in alone else count  # token 1 ends the tiny model's answers
    assert run_tiny(kvbaton_cli, tiny, *more).json()["tokens"] == alone[:ends]


def test_text_goes_to_stdout_and_the_table_to_stderr(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path
) -> None:
    done = run_tiny(kvbaton_cli, tiny, "--prompt-tokens", ids, "--max-tokens", "3")
    assert done.code == 0
    for row in ("prefill", "hand-off", "first decode step", "decode", "time to first token"):
        assert row in done.stderr
        assert row not in done.stdout
    assert "of memcpy" in done.stderr


def test_a_prompt_of_one_token_skips_prefill(kvbaton_cli: Run, tiny: tuple[Path, Path]) -> None:
    more = ("--prompt-tokens", "-", "--max-tokens", "3", "--json")
    folder, package = tiny
    report = kvbaton_cli("run", "--prefill", package, "--decode", folder, *more, stdin="7").json()
    assert report["prefill"] is None
    assert (report["handed_off_tokens"], report["remaining_tokens"]) == (0, [7])
    assert report["handoff"]["bytes"] == 0
    assert report["handoff"]["memcpy_ratio"] is None


def test_a_prompt_may_be_one_token_longer_than_the_longest_function(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / "ids"
    file.write_text(" ".join(["5"] * 33))
    done = run_tiny(kvbaton_cli, tiny, "--prompt-tokens", file, "--max-tokens", "1", "--json")
    assert done.json()["handed_off_tokens"] == 32
    file.write_text(" ".join(["5"] * 34))
    refused = error(run_tiny(kvbaton_cli, tiny, "--prompt-tokens", file, "--json"), "prompt_too_long")
    assert "34 tokens" in refused["message"]
    assert "33" in refused["message"]


def test_an_empty_prompt_is_refused(kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text("[]")
    error(run_tiny(kvbaton_cli, tiny, "--prompt-tokens", file, "--json"), "empty_prompt")


def test_ids_that_are_no_numbers_are_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / "ids"
    file.write_text("1 two 3")
    assert (
        "`two`" in error(run_tiny(kvbaton_cli, tiny, "--prompt-tokens", file, "--json"), "usage")["message"]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2", "begins as a JSON list and is none"),
        ("[1,,2]", "begins as a JSON list and is none"),
        ("[1, 2] 3", "begins as a JSON list and is none"),
        ("[1, 2.0]", "`2.0`"),
        ("[1, true]", "`true`"),
        ("[1, -2]", "`-2`"),
        ("[4294967296]", "`4294967296`"),
        ('["1"]', '`"1"`'),
        ("1, 2]", "`2]`"),
        ("+1 2", "`+1`"),
    ],
)
def test_a_list_of_ids_is_whole_or_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert words in error(run_tiny(kvbaton_cli, tiny, "--prompt-tokens", file, "--json"), "usage")["message"]


@pytest.mark.parametrize(("flag", "text"), [("--prompt-tokens", "[3, 4, 5]"), ("--prompt-file", "t3 t4 t5")])
def test_a_byte_order_mark_is_not_part_of_the_prompt(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path, flag: str, text: str
) -> None:
    file = tmp_path / "prompt"
    file.write_text(text, encoding="utf-8-sig")
    report = run_tiny(kvbaton_cli, tiny, flag, file, "--max-tokens", "1", "--json").json()
    assert (report["prompt_tokens"], report["remaining_tokens"]) == (3, [5])


def test_flags_that_choose_nothing_are_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    for flag in ("--gpu-busy=0.5", "--machine=m5-pro", "--objective=total"):
        for route in ((), ("--route", "mlx")):
            done = run_tiny(kvbaton_cli, tiny, "--prompt-tokens", ids, flag, *route, "--json")
            assert flag.split("=")[0] in error(done, "usage")["message"]
    alone = ("run", "--prefill", tiny[0], "--decode", tiny[0], "--prompt-tokens", ids, "--json")
    for flag in ("--engine=coreml", "--compute-units=cpu", "--engine-timeout=9", "--max-memory=1GiB"):
        assert flag.split("=")[0] in error(kvbaton_cli(*alone, flag), "usage")["message"]
    decoding = tmp_path / "decode.mlpackage"
    export(tiny[0], decoding, kind="decode", context=(32,))
    both = ("run", "--prefill", tiny[1], "--decode", decoding, "--prompt-tokens", ids, "--json")
    refused = error(kvbaton_cli(*both, "--route", "mlx"), "usage")
    assert str(decoding) in refused["message"]
    assert "--decode-package" in refused["hint"]


def test_a_usage_error_says_what_is_missing_or_possible(kvbaton_cli: Run, tiny: tuple[Path, Path]) -> None:
    both = ("run", "--prefill", tiny[1], "--decode", tiny[0], "--json")
    assert "--prompt-tokens" in error(kvbaton_cli(*both), "usage")["message"]
    missing = error(kvbaton_cli(*both, "--prompt", "t1", "--decode-package", tiny[1]), "usage")
    assert "--route" in missing["message"]
    wrong = error(kvbaton_cli(*both, "--prompt", "t1", "--dtype", "float8"), "usage")["message"]
    assert all(word in wrong for word in ("float8", "float16", "bfloat16", "float32"))


def test_a_prompt_that_no_power_of_two_holds_has_a_hint(kvbaton_cli: Run, tiny: tuple[Path, Path]) -> None:
    done = kvbaton_cli("bench", "prefill", tiny[1], "--tokens", str(2**64 - 1), "--json")
    assert error(done, "prompt_too_long")["hint"] == "shorten the prompt"


@pytest.mark.parametrize("temperature", ["1e-320", "1e-9", "1e-5"])
def test_a_temperature_near_zero_takes_the_likeliest_token(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, temperature: str
) -> None:
    more = ("--prompt-tokens", ids, "--max-tokens", "8", "--dtype", "float32", "--json")
    cold = run_tiny(kvbaton_cli, tiny, *more, "--temp", temperature).json()
    assert cold["tokens"] == run_tiny(kvbaton_cli, tiny, *more).json()["tokens"]


@pytest.mark.parametrize("count", ["1025", "18446744073709551615"])
def test_no_machine_has_so_many_cores(kvbaton_cli: Run, count: str) -> None:
    refused = error(kvbaton_cli("bench", "handoff", "--context", "16", "--threads", count, "--json"), "usage")
    assert count in refused["message"]
    assert "1024" in refused["message"]


def test_a_bench_that_measures_nothing_or_does_not_fit_is_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path]
) -> None:
    for bench in (("handoff", "--context", "16"), ("prefill", tiny[1], "--tokens", "4")):
        done = kvbaton_cli("bench", *bench, "--repeats", "0", "--json")
        assert "--repeats 0" in error(done, "usage")["message"]
    # Rows of 2 * 28 layers * 8 heads * 128 lanes, in two bytes each here and there.
    rows = 10**10
    bytes_a_row = 2 * 28 * 8 * 128 * 2
    more = ("--shape", "qwen3-0.6b", "--live-fraction", "0.5", "--context", str(rows), "--json")
    refused = error(kvbaton_cli("bench", "handoff", *more), "usage")
    assert refused["fields"]["needed_bytes"] == 3 * rows * bytes_a_row
    assert str(refused["fields"]["available_bytes"]) in refused["message"]
    stride = ("--shape", "smollm2-135m", "--context", "64", "--row-stride", str(10**12), "--json")
    assert "available" in error(kvbaton_cli("bench", "handoff", *stride), "usage")["message"]


def test_a_plan_of_more_rows_than_any_context_is_refused(kvbaton_cli: Run) -> None:
    for source in ("kvbaton-stacked", "vllm-nhd"):
        done = kvbaton_cli("layouts", "plan", source, "mlx-lm", "--context", str(10**12), "--json")
        assert str(10**12) in error(done, "usage")["message"]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("by_model", [False, True])
def test_a_token_outside_the_vocabulary_is_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path, place: int, by_model: bool
) -> None:
    """The last one too, which nobody prefills: MLX would read whatever memory is there."""
    folder, package = tiny
    ids = [1, 2, 3]
    ids[place] = 2**31
    file = tmp_path / "ids"
    file.write_text(json.dumps(ids))
    prefill = folder if by_model else package
    done = kvbaton_cli("run", "--prefill", prefill, "--decode", folder, "--prompt-tokens", file, "--json")
    refused = error(done, "usage")
    found = {name: refused["fields"][name] for name in ("token", "position", "vocab_size")}
    assert found == {"token": 2**31, "position": place, "vocab_size": tiny_models.VOCAB}


@pytest.mark.parametrize(
    ("name", "field"),
    [("llama_no_groups", "kv_heads"), ("llama_linear_rope", "rope"), ("llama_untied", "weights_digest")],
)
def test_a_model_that_is_not_the_packages_is_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path, name: str, field: str
) -> None:
    other = tiny_models.build(name, tmp_path)
    done = kvbaton_cli("run", "--prefill", tiny[1], "--decode", other, "--prompt-tokens", ids, "--json")
    refused = error(done, "incompatible")
    assert refused["fields"]["field"] == field
    assert refused["fields"]["package"] in refused["message"]
    assert refused["fields"]["model"] in refused["message"]


@pytest.mark.parametrize(
    ("entry", "value", "field"),
    [("vocab_size", 256, "vocab_size"), ("num_hidden_layers", 2, "layers"), ("head_dim", 32, "head_dim")],
)
def test_a_changed_config_is_refused_by_its_field(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path, entry: str, value: int, field: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny[0], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, entry: value}))
    done = kvbaton_cli("run", "--prefill", tiny[1], "--decode", other, "--prompt-tokens", ids, "--json")
    assert error(done, "incompatible")["fields"]["field"] == field


def test_other_weights_run_when_that_is_allowed_or_explained(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny[0], other)
    _change_one_weight(other)
    run = (
        "run",
        "--prefill",
        tiny[1],
        "--decode",
        other,
        "--prompt-tokens",
        ids,
        "--max-tokens",
        "1",
        "--json",
    )
    assert error(kvbaton_cli(*run), "incompatible")["fields"]["field"] == "weights_digest"
    allowed = kvbaton_cli(*run, "--allow-different", "weights").json()
    assert allowed["allowed_different"] == ["weights"]
    assert kvbaton_cli(*run, "--source-model", tiny[0]).code == 0
    assert (
        error(kvbaton_cli(*run, "--source-model", other), "incompatible")["fields"]["field"]
        == "weights_digest"
    )


def _change_one_weight(folder: Path) -> None:
    file = next(folder.glob("model*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def test_a_model_folder_without_config_is_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    done = kvbaton_cli("run", "--prefill", tiny[1], "--decode", tmp_path, "--prompt-tokens", ids, "--json")
    assert "config.json" in error(done, "model")["message"]


def test_a_folder_that_is_no_package_is_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    done = kvbaton_cli("run", "--prefill", tmp_path, "--decode", tiny[0], "--prompt-tokens", ids, "--json")
    assert str(tmp_path) in error(done, "package")["message"]


def broken(tiny: tuple[Path, Path], parent: Path, file: str, change: Any) -> Path:
    """The tiny package with one file changed."""
    package = parent / "broken.mlpackage"
    shutil.copytree(tiny[1], package)
    path = next(package.rglob(file))
    path.write_bytes(change(path.read_bytes()))
    return package


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("weight.bin", lambda data: data[: len(data) // 2]),
        ("Manifest.json", lambda data: data[:-20]),
        ("model.mlmodel", lambda data: b"\xff" * 40 + data),
    ],
)
def test_a_damaged_package_is_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path, file: str, change: Any
) -> None:
    package = broken(tiny, tmp_path, file, change)
    done = kvbaton_cli("run", "--prefill", package, "--decode", tiny[0], "--prompt-tokens", ids, "--json")
    assert file in error(done, "package")["message"]


def test_an_unknown_op_is_named_when_the_package_is_loaded(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    package = broken(
        tiny, tmp_path, "model.mlmodel", lambda data: data.replace(b"\x0a\x04silu", b"\x0a\x04sulu")
    )
    done = kvbaton_cli("run", "--prefill", package, "--decode", tiny[0], "--prompt-tokens", ids, "--json")
    message = error(done, "program")["message"]
    assert "sulu" in message
    assert "prefill_8" in message


def test_inspect_reads_a_package_made_by_coremltools_alone(kvbaton_cli: Run, tmp_path: Path) -> None:
    import coremltools as ct
    import numpy as np
    from coremltools.converters.mil import Builder as mb

    @mb.program(
        input_specs=[
            mb.TensorSpec(shape=(1, 8)),
            mb.StateTensorSpec((1, 2, 6, 8), dtype=ct.converters.mil.mil.types.fp16),
        ],
        opset_version=ct.target.iOS18,
    )
    def program(x: Any, k_cache: Any) -> Any:
        held = mb.read_state(input=k_cache)
        y = mb.pow(x=mb.cast(x=x, dtype="fp16"), y=np.float16(2))
        return mb.add(x=mb.reduce_sum(x=held, axes=[0, 1, 2]), y=y, name="logits")

    model = ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    model.save(str(tmp_path / "made.mlpackage"))
    inspection = kvbaton_cli("inspect", tmp_path / "made.mlpackage", "--json").json()
    assert inspection["kind"] == "mlpackage"
    (function,) = inspection["functions"]
    assert [f["name"] for f in function["states"]] == ["k_cache"]
    assert function["operations"]["pow"] == 1
    rules = {w["rule"] for w in inspection["warnings"]}
    assert {"pow", "state_width", "state_power_of_two"} <= rules, rules
    assert all(w["source"] and w["where"] for w in inspection["warnings"])


def test_export_refuses_to_replace_without_force(kvbaton_cli: Run, tiny: tuple[Path, Path]) -> None:
    before = (tiny[1] / "Manifest.json").read_bytes()
    assert str(tiny[1]) in error(kvbaton_cli("export", *tiny, "--buckets", "8", "--json"), "usage")["message"]
    assert (tiny[1] / "Manifest.json").read_bytes() == before


def test_export_writes_and_reports(kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.mlpackage"
    report = kvbaton_cli(
        "export", tiny[0], out, "--buckets", "4,12", "--kv-outputs", "per-layer", "--json"
    ).json()
    assert report["buckets"] == [4, 12]
    assert out.is_dir()
    names = {o["name"] for o in kvbaton_cli("inspect", out, "--json").json()["functions"][0]["outputs"]}
    assert {"logits", "key_cache_0", "value_cache_2"} <= names


def test_export_names_an_architecture_it_does_not_know(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny[0], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    refused = error(kvbaton_cli("export", other, tmp_path / "o.mlpackage", "--json"), "model")
    assert "mamba" in refused["message"]


def test_bench_prefill_reports_under_the_documented_names(kvbaton_cli: Run, tiny: tuple[Path, Path]) -> None:
    document = kvbaton_cli("bench", "prefill", tiny[1], "--tokens", "20", "--repeats", "2", "--json").json()
    (row,) = document["rows"]
    assert set(row) >= {
        "engine", "dtype", "package", "function", "tokens", "threads", "seconds", "tokens_per_second",
        "peak_bytes",
    }  # fmt: skip
    assert row["function"] == "prefill_32"
    assert row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]


def test_bench_prefill_compares_with_mlx(kvbaton_cli: Run, tiny: tuple[Path, Path]) -> None:
    done = kvbaton_cli("bench", "prefill", tiny[1], "--tokens", "20", "--compare", tiny[0], "--json")
    rows = done.json()["rows"]
    assert [(r["engine"], r["dtype"]) for r in rows[:3]] == [
        ("cpu", "float16"), ("mlx-cpu", "float16"), ("mlx-cpu", "float32")
    ]  # fmt: skip


def test_bench_handoff_takes_a_models_config(kvbaton_cli: Run, tiny: tuple[Path, Path]) -> None:
    shape = tiny[0] / "config.json"
    done = kvbaton_cli("bench", "handoff", "--shape", shape, "--context", "64", "--repeats", "1", "--json")
    assert done.json()["rows"][0]["bytes"] == 3 * 2 * 2 * 48 * 16 * 2


def strip_metadata(package: Path, out: Path) -> Path:
    """The package as somebody else's exporter would have left it: without kvbaton's metadata."""
    import coremltools as ct

    shutil.copytree(package, out)
    file = next(out.rglob("model.mlmodel"))
    spec = ct.proto.Model_pb2.Model()
    spec.ParseFromString(file.read_bytes())
    spec.description.metadata.userDefined.clear()
    file.write_bytes(spec.SerializeToString())
    return out


FOREIGN = """
name = "theirs"
placement = "left"

[inputs]
tokens = "input_ids"
last_index = "last_index"

[outputs]
logits = "logits"

[[tensor]]
name = "key_cache"
holds = "key"
axes = "layer kv_head row head_dim"

[[tensor]]
name = "value_cache"
holds = "value"
axes = "layer kv_head row head_dim"
"""


def test_a_foreign_package_runs_with_a_layout_and_a_model(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    folder, package = tiny
    foreign = strip_metadata(package, tmp_path / "foreign.mlpackage")
    layout = tmp_path / "theirs.toml"
    layout.write_text(FOREIGN)
    run = (
        "run",
        "--prefill",
        foreign,
        "--decode",
        folder,
        "--prompt-tokens",
        ids,
        "--max-tokens",
        "4",
        "--json",
    )
    assert "kvbaton.layout" in error(kvbaton_cli(*run), "layout")["message"]
    assert "kvbaton.model" in error(kvbaton_cli(*run, "--layout", layout), "layout")["message"]
    theirs = kvbaton_cli(*run, "--layout", layout, "--model", folder).json()
    ours = run_tiny(kvbaton_cli, tiny, "--prompt-tokens", ids, "--max-tokens", "4", "--json").json()
    assert theirs["tokens"] == ours["tokens"]
    layout.write_text(FOREIGN.replace('last_index = "last_index"\n', ""))
    refused = error(kvbaton_cli(*run, "--layout", layout, "--model", folder), "layout")
    assert refused["fields"]["input"] == "last_index"


def test_a_declared_layout_and_another_one_are_both_printed(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path
) -> None:
    refused = error(
        run_tiny(kvbaton_cli, tiny, "--prompt-tokens", ids, "--layout", "anemll", "--json"), "layout"
    )
    assert "kvbaton-stacked" in refused["message"]
    assert "anemll" in refused["message"]
    assert "key_cache" in refused["fields"]["package"]


def test_a_dump_takes_the_place_of_the_package(
    kvbaton_cli: Run, tiny: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    import kvbaton
    import numpy as np
    from safetensors.numpy import save_file

    folder, package = tiny
    cache = kvbaton.Prefill(package)(IDS).cache
    stacked = {
        f"{part}_cache": np.stack([np.array(layer.arrays[part]) for layer in cache.layers])
        for part in ("key", "value")
    }
    dump = tmp_path / "dump.safetensors"
    save_file(stacked, dump)
    run = (
        "run",
        "--prefill",
        dump,
        "--decode",
        folder,
        "--prompt-tokens",
        ids,
        "--max-tokens",
        "4",
        "--json",
    )
    assert "layout" in error(kvbaton_cli(*run), "layout")["message"]
    report = kvbaton_cli(*run, "--layout", "yetter", "--model", folder).json()
    ours = run_tiny(kvbaton_cli, tiny, "--prompt-tokens", ids, "--max-tokens", "4", "--json").json()
    assert report["tokens"] == ours["tokens"]
    assert report["prefill"] is None
    more = (*run, "--layout", "yetter", "--model", folder)
    assert error(kvbaton_cli(*more, "--tokens-seen", "99"), "capacity")["fields"]["rows"] == 99
    other = error(kvbaton_cli(*run, "--layout", "mlx-lm", "--model", folder), "layout")["message"]
    assert all(name in other for name in ("`keys_0`", "`key_cache`", "`value_cache`"))
    # Rows of `yetter` begin in slot 0: a dump whose rows begin elsewhere is none of it.
    for flag, words in (("--pad", "pad of 2"), ("--ring-start", "ring start of 2")):
        refused = error(kvbaton_cli(*more, flag, "2"), "usage")
        assert words in refused["message"]
        assert "`yetter`" in refused["message"]
    assert kvbaton_cli(*more, "--pad", "0", "--ring-start", "0").json()["tokens"] == ours["tokens"]
    dump.write_bytes(dump.read_bytes()[:100])
    assert "dump.safetensors" in error(kvbaton_cli(*more), "usage")["message"]
