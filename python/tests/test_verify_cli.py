"""``kvbaton verify``, in processes of its own: the document, exit codes, the page, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import kvbaton
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import tiny_models
from conftest import Finished, Run
from kvbaton._export import export
from test_cli import error

RUNGS = ["bytes", "values", "logits", "teacher_forced", "free_running"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder and its package, functions of 8 and 32 tokens."""
    parent = tmp_path_factory.mktemp("verify")
    folder = tiny_models.build("llama_tied", parent)
    export(folder, parent / "tiny.mlpackage", buckets=(8, 32))
    return folder, parent / "tiny.mlpackage"


@pytest.fixture(scope="module")
def other(tiny: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of other weights of the same shape."""
    parent = tmp_path_factory.mktemp("other")
    folder = parent / "model"
    shutil.copytree(tiny[0], folder)
    tensors = tiny_models.random_weights(tiny_models.CONFIGS["llama_tied"], seed=99)
    tiny_models.write_plain(folder, tiny_models.CONFIGS["llama_tied"], tensors)
    export(folder, parent / "other.mlpackage", buckets=(8, 32))
    return parent / "other.mlpackage"


def ids(length: int, seed: int = 0) -> list[int]:
    return [(5 * i * i + (seed + 1) * i + 3 + seed) % tiny_models.VOCAB for i in range(length)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"name": f"p{n}", "tokens": ids(length, n)} for n, length in enumerate((1, 2, 8, 24))]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def verify(cli: Run, package: Path, folder: Path, prompts: Path, *more: str | Path) -> Finished:
    return cli(
        "verify",
        *("--prefill", package, "--decode", folder, "--prompts", prompts),
        *("--max-tokens", "6", "--dtype", "float32", *more),
    )


def test_the_document_of_a_clean_run(
    kvbaton_cli: Run, tiny: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    folder, package = tiny
    page = tmp_path / "report.html"
    # Of random weights some step may be a near tie, which is no failure.
    done = verify(
        kvbaton_cli, package, folder, prompts, "--repeat", "3", "--tie", "0.05", "--report", page, "--json"
    )
    assert done.code == 0, done.stdout + done.stderr
    document = done.json()
    assert document["verdict"] in ("pass", "tie")
    assert [r["name"] for r in document["rungs"]] == RUNGS
    assert {r["status"] for r in document["rungs"]} == {"pass"}
    assert [p["name"] for p in document["prompts"]] == ["p0", "p1", "p2", "p3"]
    assert [p["prompt_tokens"] for p in document["prompts"]] == [1, 2, 8, 24]
    last = document["prompts"][-1]
    # 3 layers, keys and values, 2 heads of 16 lanes, 23 rows.
    assert last["rungs"][0]["elements"] == 3 * 2 * 2 * 16 * 23
    assert last["producer"] == {"runs": 3, "deterministic": True, "run": None, "where": None}
    assert document["fingerprints"]["package_weights"] == document["fingerprints"]["decoder_weights"]
    assert document["versions"]["mlx-lm"]
    assert document["command"].startswith("kvbaton verify --prefill")
    assert document["thresholds"]["tie"] == 0.05
    text = page.read_text()
    # As readable as any file that is written here, although it was made aside.
    (tmp_path / "plain").write_text("")
    assert page.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert text.startswith("<!doctype html>")
    assert "kvbaton verify --prefill" in text


def test_a_coarse_decoder_has_thresholds_of_its_own(
    kvbaton_cli: Run, tiny: tuple[Path, Path], prompts: Path
) -> None:
    folder, package = tiny
    more = ("--dtype", "bfloat16", "--max-kl", "0.2", "--json")
    document = kvbaton_cli(
        "verify", "--prefill", package, "--decode", folder, "--prompts", prompts, "--max-tokens", "2", *more
    ).json()
    assert document["settings"]["dtype"] == "bfloat16"
    usual = asdict(kvbaton.Thresholds.usual("bfloat16"))
    assert document["thresholds"] == {**usual, "max_kl": 0.2}


def test_values_are_those_of_numpy(kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """Cosines, norms and errors of the document, computed again from MLX's cache and the package's."""
    import kvbaton
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    folder, package = tiny
    tokens = ids(20, 5)
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"tokens": tokens}))
    done = verify(kvbaton_cli, package, folder, file, "--tie", "0.05", "--json")
    values = done.json()["prompts"][0]["rungs"][1]
    model = load_model(folder)[0]
    model.set_dtype(mx.float32)
    caches = make_prompt_cache(model)
    model(mx.array([tokens[:-1]]), cache=caches)
    view = kvbaton.Prefill(package)(tokens[:-1]).cache
    smallest = 1.0
    for layer, cache in enumerate(caches):
        for tensor, array in (("key", cache.keys), ("value", cache.values)):
            expected = np.array(array[0, :, : len(tokens) - 1]).astype(np.float64)
            found = view.layers[layer].arrays[tensor].astype(np.float64)
            entry = next(e for e in values["layers"] if (e["layer"], e["tensor"]) == (layer, tensor))
            assert entry["max_abs"] == pytest.approx(np.abs(found - expected).max(), rel=1e-4)
            norm = np.linalg.norm(expected)
            assert entry["relative"] == pytest.approx(np.linalg.norm(found - expected) / norm, rel=1e-3)
            assert entry["norm_ratio"] == pytest.approx(np.linalg.norm(found) / norm, abs=1e-7)
            for e, f in zip(expected, found, strict=True):
                smallest = min(smallest, np.sum(e * f) / np.linalg.norm(e) / np.linalg.norm(f))
    assert values["min_cosine"] == pytest.approx(smallest, abs=1e-9)


def test_other_weights_are_refused_and_if_allowed_fail(
    kvbaton_cli: Run, tiny: tuple[Path, Path], other: Path, prompts: Path, tmp_path: Path
) -> None:
    refused = verify(kvbaton_cli, other, tiny[0], prompts, "--json")
    assert error(refused, "incompatible")["fields"]["field"] == "weights_digest"
    page = tmp_path / "report.html"
    done = verify(
        kvbaton_cli, other, tiny[0], prompts, "--allow-different", "weights", "--report", page, "--json"
    )
    assert done.code == 1, done.stderr
    document = done.json()
    assert document["verdict"] == "fail"
    assert [r["status"] for r in document["rungs"]][:2] == ["pass", "fail"]
    where = document["rungs"][1]["where"]
    assert (where["tensor"], where["layer"], where["prompt"]) == ("key", 0, 1)
    assert document["settings"]["allowed_different"] == ["weights"]
    assert 'id="where-values">prompt 1, key, layer 0, head ' in page.read_text()


def test_a_model_may_stand_for_what_both_were_made_from(
    kvbaton_cli: Run, tiny: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    """As of a decoder that was quantised from the package's model."""
    decoder = tmp_path / "decoder"
    shutil.copytree(tiny[0], decoder)
    tensors = tiny_models.random_weights(tiny_models.CONFIGS["llama_tied"], seed=99)
    tiny_models.write_plain(decoder, tiny_models.CONFIGS["llama_tied"], tensors)
    refused = verify(kvbaton_cli, tiny[1], decoder, prompts, "--json")
    assert error(refused, "incompatible")["fields"]["field"] == "weights_digest"
    explained = verify(kvbaton_cli, tiny[1], decoder, prompts, "--source-model", tiny[0], "--json")
    # It is not refused, and the values say what such a decoder makes of it.
    assert explained.code == 1, explained.stderr
    document = explained.json()
    assert [r["status"] for r in document["rungs"]][:2] == ["pass", "fail"]
    assert document["settings"]["source_model"] == str(tiny[0])
    wrong = verify(kvbaton_cli, tiny[1], decoder, prompts, "--source-model", decoder, "--json")
    assert error(wrong, "incompatible")["fields"]["field"] == "weights_digest"


def test_a_model_may_be_the_reference(
    kvbaton_cli: Run, tiny: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    """A 4-bit decoder beside a package of the weights it was quantised from: the ordinary pair on a Mac."""
    folder, package = tiny
    decoder = tmp_path / "decoder"
    mlx_lm.convert(str(folder), str(decoder), quantize=True, q_bits=4, q_group_size=32)
    source = ("--source-model", folder, "--json")
    own = verify(kvbaton_cli, package, decoder, prompts, *source)
    assert own.code == 1, own.stderr
    assert [r["status"] for r in own.json()["rungs"]][:2] == ["pass", "fail"]
    assert f"--reference {folder}" in own.stderr
    assert own.json()["settings"]["reference"].startswith("the decoder's own prefill, of other weights")
    done = verify(kvbaton_cli, package, decoder, prompts, "--reference", folder, *source)
    assert done.code == 0, done.stderr
    document = done.json()
    assert document["verdict"] in ("pass", "tie")
    assert {r["status"] for r in document["rungs"]} == {"pass"}
    # The package's own rounding is left, and nothing of the decoder's four bits.
    assert 0 < document["rungs"][1]["max_row_error"] < 0.01
    assert document["settings"]["reference"] == str(folder)
    assert document["fingerprints"]["reference_weights"] == document["fingerprints"]["package_weights"]
    assert document["fingerprints"]["decoder_weights"] != document["fingerprints"]["package_weights"]
    assert "note:" not in done.stderr
    # It must be what the package was made from.
    wrong = verify(kvbaton_cli, package, decoder, prompts, "--reference", decoder, *source)
    assert error(wrong, "incompatible")["fields"]["field"] == "weights_digest"


def test_a_package_against_another(
    kvbaton_cli: Run, tiny: tuple[Path, Path], other: Path, prompts: Path
) -> None:
    """Against itself the values are equal; against other weights they are not, and bytes are none the worse."""
    folder, package = tiny
    same = verify(kvbaton_cli, package, folder, prompts, "--reference", package, "--json").json()
    assert same["verdict"] == "pass"
    assert same["rungs"][1]["max_abs"] == 0
    assert same["rungs"][2]["max_kl"] == 0
    done = verify(
        kvbaton_cli, package, folder, prompts, "--reference", other, "--allow-different", "weights", "--json"
    )
    assert done.code == 1
    assert [r["status"] for r in done.json()["rungs"]][:2] == ["pass", "fail"]


def test_contexts_cut_every_prompt(kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    folder, package = tiny
    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"tokens": ids(40, n)}) + "\n" for n in range(2)))
    done = verify(kvbaton_cli, package, folder, file, "--context", "12,32", "--tie", "0.05", "--json")
    assert done.code == 0, done.stdout
    found = [(p["context"], p["prompt_tokens"]) for p in done.json()["prompts"]]
    assert found == [(12, 6), (32, 26)] * 2
    short = verify(kvbaton_cli, package, folder, file, "--context", "64", "--json")
    assert "40 tokens" in error(short, "usage")["message"]
    assert "58" in error(short, "usage")["message"]


def test_words_go_to_stdout(kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path) -> None:
    folder, package = tiny
    (tmp_path / "a.txt").write_text("t1 t2 t3 t4 t5 t9\n")
    done = verify(kvbaton_cli, package, folder, tmp_path, "--tie", "0.05")
    assert done.code == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(("pass: ", "tie: "))
    assert "free-running" in done.stdout


def test_bad_input_is_one_error(
    kvbaton_cli: Run, tiny: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    folder, package = tiny

    def refused(kind: str, *more: str | Path, file: Path = prompts, model: Path = folder) -> str:
        return str(error(verify(kvbaton_cli, package, model, file, "--json", *more), kind)["message"])

    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "has no prompts" in refused("usage", file=empty)
    assert "none.jsonl" in refused("usage", file=tmp_path / "none.jsonl")
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"name": "long one", "tokens": ids(40)}))
    message = refused("prompt_too_long", file=long)
    assert "long one" in message
    assert "40 tokens" in message
    assert "at most 33" in message
    strange = tmp_path / "strange.jsonl"
    strange.write_text(json.dumps({"tokens": [1, 100000]}))
    assert "100000" in refused("usage", file=strange)
    assert "none" in refused("model", model=tmp_path / "none")
    hollow = tmp_path / "hollow"
    hollow.mkdir()
    assert "is a Core ML package" in refused("usage", model=package)
    assert "config.json" in refused("model", model=hollow)
    (hollow / "config.json").write_text("{")
    assert "hollow" in refused("model", model=hollow)
    page = tmp_path / "none" / "report.html"
    assert "does not exist" in refused("usage", "--report", page)
    assert "min_cosine" in refused("usage", "--min-cosine", "nan")
    assert "tie" in refused("usage", "--tie=-1")
    assert "min_agreement is 1.5" in refused("usage", "--min-agreement", "1.5")
    assert not list(tmp_path.glob("*.html"))


def test_what_cannot_be_used_is_said_before_anything_is_loaded(kvbaton_cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n')
    more = ("--prefill", "none.mlpackage", "--decode", "none", "--prompts", file, "--json")
    for flags in (
        ("--max-tokens", "0"),
        ("--repeat", "0"),
        ("--max-tokens", "8", "--context", "8"),
        ("--max-tokens", str(2**64 - 1), "--context", "8"),
    ):
        error(kvbaton_cli("verify", *more, *flags), "usage")
    if Path("/proc").is_dir():
        # A folder in which nobody can make a file, root included.
        unwritable = kvbaton_cli("verify", *more, "--report", "/proc/report.html")
        assert "cannot be written to" in error(unwritable, "usage")["message"]
    error(kvbaton_cli("verify", *more), "package")


def test_exit_codes(
    kvbaton_cli: Run, tiny: tuple[Path, Path], other: Path, prompts: Path, tmp_path: Path
) -> None:
    """0 it passed, 1 it did not, 2 the request was wrong, 3 we failed."""
    folder, package = tiny
    assert verify(kvbaton_cli, package, folder, prompts, "--tie", "0.05").code == 0
    failed = verify(kvbaton_cli, other, folder, prompts, "--allow-different", "weights")
    assert failed.code == 1
    assert failed.stdout.startswith("fail: ")
    assert failed.stderr == ""
    wrong = verify(kvbaton_cli, package, folder, tmp_path / "none.jsonl")
    assert (wrong.code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: ")
    # A name that is longer than a file's may be: found out when the report is renamed to it.
    ours = verify(kvbaton_cli, package, folder, prompts, "--report", tmp_path / ("r" * 300), "--json")
    assert "cannot write" in error(ours, "io", code=3)["message"]
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_report_goes_through_links_and_into_pipes(
    kvbaton_cli: Run, tiny: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    folder, package = tiny
    real, link, pipe = (tmp_path / name for name in ("real.html", "link.html", "pipe.html"))
    real.write_text("the one before")
    link.symlink_to("real.html")
    done = verify(kvbaton_cli, package, folder, prompts, "--tie", "0.05", "--report", link)
    assert done.code == 0, done.stderr
    assert link.is_symlink()
    assert real.read_text().startswith("<!doctype html>")
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        done = verify(kvbaton_cli, package, folder, prompts, "--tie", "0.05", "--report", pipe)
        # Had it been replaced, nobody would ever write to it.
        if not pipe.is_fifo():
            reader.kill()
        assert reader.communicate(timeout=60)[0].startswith("<!doctype html>")
    assert done.code == 0, done.stderr


def test_what_is_lost_on_the_way_to_stdout_is_no_pass(
    tiny: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    words = ["verify", "--prefill", tiny[1], "--decode", tiny[0], "--prompts", prompts]
    more = ["--max-tokens", "2", "--dtype", "float32", "--tie", "0.05", "--json"]
    command = [sys.executable, "-m", "kvbaton", *map(str, words), *more]
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert done.returncode == 3
        assert done.stderr.startswith("error: cannot write to stdout")
    # Closed before we began: nobody asked for it.
    closed = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (closed.returncode, closed.stderr) == (0, "")


def test_names_cannot_break_a_message_into_lines(
    kvbaton_cli: Run, tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"name": "a\n\x1b[31mb", "tokens": [1, 100000]}))
    done = verify(kvbaton_cli, tiny[1], tiny[0], file)
    assert done.code == 2
    assert len(done.stderr.splitlines()) == 1
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("name", ["repeat", "context", "max-tokens"])
def test_flags_that_are_no_numbers_are_refused(kvbaton_cli: Run, prompts: Path, name: str) -> None:
    more = ("--prefill", "none.mlpackage", "--decode", "none", "--prompts", prompts, "--json")
    error(kvbaton_cli("verify", *more, f"--{name}", "many"), "usage")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_an_interrupted_run_leaves_the_report_of_the_one_before(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    """The signal arrives when the run has begun: it has read the prompts, which come through a pipe."""
    folder, package = tiny
    pipe, page = tmp_path / "prompts.jsonl", tmp_path / "report.html"
    os.mkfifo(pipe)
    page.write_text("the one before")
    command = [sys.executable, "-m", "kvbaton", "verify", "--prefill", package, "--decode", folder]
    more = ["--prompts", pipe, "--max-tokens", "24", "--report", page, "--json"]
    with subprocess.Popen(
        [*map(str, command), *map(str, more)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        with pipe.open("w") as lines:
            for n in range(4000):
                lines.write(json.dumps({"tokens": ids(24, n)}) + "\n")
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=240)
    assert running.returncode == 3, stderr
    assert json.loads(stdout)["error"]["kind"] == "interrupted"
    assert "Traceback" not in stderr
    assert page.read_text() == "the one before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl", "report.html"]
