"""``bench run``, ``calibrate`` and ``plan``: documents, picks, files, pages, and bad input."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import tiny_models
from conftest import Run
from kvbaton._export import export
from test_cli import error

PLAN = ("plan", "--model", "qwen3-4b", "--machine", "m5-pro")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and its package, functions of 32 and 128 tokens."""
    parent = tmp_path_factory.mktemp("cost")
    folder = tiny_models.build("llama_tied", parent)
    export(folder, parent / "tiny.mlpackage", buckets=(32, 128))
    return folder, parent / "tiny.mlpackage"


@pytest.fixture(scope="module")
def decoding(tiny: tuple[Path, Path], kvbaton_cli: Run) -> Path:
    """A package of the tiny model that decodes, with a context of 256 rows."""
    package = tiny[1].with_name("decode.mlpackage")
    done = kvbaton_cli("export", tiny[0], package, "--kind", "decode", "--context", "256")
    assert done.code == 0, done.stderr
    return package


@pytest.fixture(scope="module")
def calibrated(
    tiny: tuple[Path, Path], decoding: Path, kvbaton_cli: Run, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What ``calibrate`` found out about this machine with the tiny model."""
    folder, package = tiny
    file = tmp_path_factory.mktemp("machine") / "machine.toml"
    more = ("--lengths", "16,100", "--repeats", "2", "--dtype", "float32", "--out", file)
    more = (*more, "--decode-package", decoding)
    done = kvbaton_cli("calibrate", "--decode", folder, "--prefill", package, *more)
    assert done.code == 0, done.stderr
    assert "coreml" in done.stdout
    return file


def test_plan_reports_under_the_documented_names(kvbaton_cli: Run) -> None:
    document = kvbaton_cli(*PLAN, "--context", "4096", "--json").json()
    assert document["pick"] == "mlx"
    assert document["reason"].startswith("do not hand over")
    assert document["break_even_tokens"] is None
    assert [r["name"] for r in document["routes"]] == ["coreml-mlx", "mlx", "coreml", "mlx-coreml"]
    for route in document["routes"]:
        assert set(route) >= {
            "time_to_first_token_seconds",
            "exposed_seconds",
            "total_seconds",
            "peak_bytes",
            "prefill_seconds",
            "handoff_bytes",
            "joules",
            "basis",
        }
    split, alone = document["routes"][:2]
    assert (split["available"], split["unavailable"]) == (False, "no --prefill was given")
    assert alone["basis"] == "published"
    assert document["machine"]["origin"] == "published"
    assert "Not measured by kvbaton" in document["machine"]["note"]
    # 36 layers of 8 heads with 128 lanes, keys and values, two bytes each.
    assert split["handoff_bytes"] == 4095 * 36 * 8 * 128 * 2 * 2


def test_published_figures_are_marked_in_text_too(kvbaton_cli: Run) -> None:
    done = kvbaton_cli(*PLAN, "--context", "1025")
    assert done.code == 0
    assert "published by others, never measured by kvbaton" in done.stdout
    # The figure itself: 1,024 tokens in 0.322 s.
    assert re.search(r"^mlx +322\.00 ms", done.stdout, re.M), done.stdout


def test_a_busy_gpu_makes_the_neural_engine_worth_it(
    kvbaton_cli: Run, tiny: tuple[Path, Path], calibrated: Path
) -> None:
    folder, package = tiny
    common = ("plan", "--model", folder, "--prefill", package, "--machine", calibrated, "--dtype", "float32")
    more = ("--context", "100", "--max-tokens", "1", "--json")
    busy = kvbaton_cli(*common, *more, "--gpu-busy", "0.999").json()
    # Prefill on the executor costs what it did; everything MLX does takes a thousand times as long.
    idle = kvbaton_cli(*common, *more).json()
    assert busy["routes"][1]["prefill_seconds"] == pytest.approx(1000 * idle["routes"][1]["prefill_seconds"])
    assert busy["routes"][0]["prefill_seconds"] == pytest.approx(idle["routes"][0]["prefill_seconds"])
    assert busy["pick"] == "coreml-mlx"


def test_calibrated_figures_come_back_where_they_were_measured(
    kvbaton_cli: Run, tiny: tuple[Path, Path], calibrated: Path
) -> None:
    folder, package = tiny
    machine = tomllib.loads(calibrated.read_text())
    assert machine["origin"] == "measured"
    lengths = {(f["engine"], f["tokens"]) for f in machine["prefill"]}
    # The package pads to its functions.
    assert lengths == {("mlx", 15), ("mlx", 99), ("coreml", 32), ("coreml", 128)}
    assert {h["warm"] for h in machine["handoff"]} == {True, False}
    common = ("plan", "--model", folder, "--prefill", package, "--machine", calibrated, "--dtype", "float32")
    plan = kvbaton_cli(*common, "--context", "100", "--json").json()
    for route, engine, tokens in ((0, "coreml", 128), (1, "mlx", 99)):
        (known,) = [
            f["seconds"] for f in machine["prefill"] if (f["engine"], f["tokens"]) == (engine, tokens)
        ]
        assert plan["routes"][route]["prefill_seconds"] == pytest.approx(known, rel=1e-6)
        assert plan["routes"][route]["basis"] == "measured"


def test_run_takes_what_plan_picks_and_says_what_it_did(
    kvbaton_cli: Run, tiny: tuple[Path, Path], decoding: Path, calibrated: Path, tmp_path: Path
) -> None:
    folder, package = tiny
    file = tmp_path / "ids"
    file.write_text(" ".join(str((7 * i * i + 3) % tiny_models.VOCAB) for i in range(60)))
    common = ("run", "--prefill", package, "--decode", folder, "--dtype", "float32", "--prompt-tokens", file)
    common = (*common, "--max-tokens", "5", "--json", "--decode-package", decoding)
    auto = (*common, "--route", "auto", "--machine", calibrated)
    busy = kvbaton_cli(*auto, "--gpu-busy", "0.999").json()
    # MLX takes a thousand times as long, so Core ML does both.
    assert busy["route"]["pick"] == "coreml"
    assert busy["decode"]["engine"] == "cpu"
    for document, name in ((busy, "coreml"), (kvbaton_cli(*auto).json(), None)):
        route = document["route"]
        estimate = next(r for r in route["estimated"] if r["name"] == (name or route["pick"]))
        assert set(route["measured"]) <= set(estimate)
        first = document["time_to_first_token_seconds"]
        assert route["measured"]["time_to_first_token_seconds"] == first
        assert route["reason"]
        assert route["machine"]["origin"] == "measured"
    answers = {}
    for name in ("coreml-mlx", "mlx", "coreml", "mlx-coreml"):
        document = kvbaton_cli(*common, "--route", name).json()
        assert "route" not in document
        answers[name] = document["tokens"]
        assert document["handed_off_tokens"] == (0 if name == "mlx" else 59)
        assert document["decode"]["engine"].startswith("cpu" if name.endswith("coreml") else "mlx")
        assert document["prefill"]["engine"].startswith("mlx" if name.startswith("mlx") else "cpu")
    assert answers["coreml-mlx"] == answers["mlx"]
    assert answers["coreml"] == answers["mlx-coreml"]


def test_a_decode_package_has_its_routes(
    kvbaton_cli: Run, tiny: tuple[Path, Path], decoding: Path, calibrated: Path
) -> None:
    folder, package = tiny
    common = ("plan", "--model", folder, "--machine", calibrated, "--dtype", "float32", "--json")
    more = ("--prefill", package, "--decode-package", decoding, "--context", "100")
    routes = {r["name"]: r for r in kvbaton_cli(*common, *more, "--max-tokens", "10").json()["routes"]}
    assert all(r["available"] and r["total_seconds"] > 0 for r in routes.values())
    # 256 rows are its context.
    long = kvbaton_cli(*common, *more, "--max-tokens", "200").json()
    assert "holds 256 rows, 300 are wanted" in long["routes"][3]["unavailable"]


def test_a_route_needs_its_packages(kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    folder, package = tiny
    file = tmp_path / "ids"
    file.write_text("1 2 3")
    named = ("--decode", folder, "--prompt-tokens", file, "--json")
    done = kvbaton_cli("run", "--prefill", package, *named, "--route", "mlx-coreml")
    assert "needs --decode-package" in error(done, "usage")["message"]
    done = kvbaton_cli("run", "--prefill", folder, *named, "--route", "auto")
    assert "--prefill must be a Core ML package" in error(done, "usage")["message"]


def test_bench_run_times_every_mode(kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    folder, package = tiny
    page = tmp_path / "out.html"
    document = kvbaton_cli(
        *("bench", "run", "--prefill", package, "--decode", folder, "--context", "20,100"),
        *("--max-tokens", "4", "--repeats", "2", "--dtype", "float32", "--report", page, "--json"),
    ).json()
    rows = document["rows"]
    assert {(r["context"], r["streamed"], r["warm"]) for r in rows} == {
        (n, s, w) for n in (20, 100) for s in (True, False) for w in (True, False)
    }
    timed = ("prefill", "exposed", "first_step", "decode", "time_to_first_token")
    for row in rows:
        for name in timed:
            timing = row[f"{name}_seconds"]
            assert 0 < timing["min"] <= timing["median"] <= timing["max"]
        assert row["same_tokens"]
        # 3 layers of 2 heads with 16 lanes, keys and values, float32.
        assert row["bytes"] == 3 * 2 * 16 * 2 * 4 * (row["context"] - 1)
        whole = row["time_to_first_token_seconds"]["max"]
        assert whole >= row["prefill_seconds"]["min"] + row["exposed_seconds"]["min"]
    assert set(document["versions"]) >= {"mlx", "mlx-lm", "python"}
    assert document["memcpy"]["warm_gigabytes_per_second"] > 0
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "http://www.w3.org/2000/svg" in text
    assert not re.search(r'(?:src|href)="(?!data:)', text), "a page loads nothing"
    assert "<script" not in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--context", "0"), "0 tokens"),
        (("--context", "100", "--gpu-busy", "1"), "--gpu-busy 1"),
        (("--context", "100", "--gpu-busy", "-0.1"), "--gpu-busy -0.1"),
        (("--context", "100", "--max-tokens", "0"), "--max-tokens 0"),
        (("--context", "100", "--objective", "energy"), "power is not known"),
        (("--context", "100", "--machine", "m99"), "`m99`"),
        (("--context", "100", "--model", "gpt-9"), "`gpt-9`"),
    ],
)
def test_plans_that_make_no_sense_are_refused(kvbaton_cli: Run, more: tuple[str, ...], words: str) -> None:
    arguments = [*PLAN, "--json"]
    for flag, value in zip(more[::2], more[1::2], strict=True):
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [f"{flag}={value}"]
    kind = "empty_prompt" if "0 tokens" in words else "usage"
    assert words in error(kvbaton_cli(*arguments), kind)["message"]


def test_a_package_of_another_model_is_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    done = kvbaton_cli(*PLAN, "--context", "100", "--prefill", tiny[1], "--json")
    assert "not that of the model" in error(done, "incompatible")["message"]


def test_measurements_that_cannot_be_made_are_refused(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, package = tiny
    bench = ("bench", "run", "--prefill", package, "--decode", folder, "--json")
    assert "--context 1" in error(kvbaton_cli(*bench, "--context", "1"), "usage")["message"]
    assert "--repeats" in error(kvbaton_cli(*bench, "--repeats", "0"), "usage")["message"]
    assert "--cooldown" in error(kvbaton_cli(*bench, "--cooldown=-1"), "usage")["message"]
    too_long = error(kvbaton_cli(*bench, "--context", "4000"), "prompt_too_long")
    assert "3999 tokens" in too_long["message"]
    file = tmp_path / "machine.toml"
    calibrate = ("calibrate", "--decode", folder, "--prefill", package, "--out", file, "--json")
    assert "--lengths 1" in error(kvbaton_cli(*calibrate, "--lengths", "1"), "usage")["message"]
    error(kvbaton_cli(*calibrate, "--lengths", "4000"), "prompt_too_long")
    longest = str(2**64 - 1)
    assert longest in error(kvbaton_cli(*calibrate, "--lengths", f"16,{longest}"), "usage")["message"]
    assert not file.exists()
    file.write_text("no machine")
    assert str(file) in error(kvbaton_cli(*calibrate, "--lengths", "16"), "usage")["message"]
    assert file.read_text() == "no machine"


def test_a_page_that_cannot_be_written_is_an_error(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, package = tiny
    more = ("--context", "16", "--repeats", "1", "--report", tmp_path / "no/out.html", "--json")
    done = kvbaton_cli("bench", "run", "--prefill", package, "--decode", folder, *more)
    assert "no/out.html" in error(done, "usage")["message"]
