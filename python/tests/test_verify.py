"""kvbaton.verify: distances against numpy written out, near ties, what is not run, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import cache_models
import kvbaton
import mlx.core as mx
import numpy as np
import pytest
from kvbaton._verify.distributions import compare
from kvbaton._verify.ladder import prefill_mlx
from kvbaton._verify.rungs import free_running_rung, logits_rung, teacher_forced_rung
from kvbaton._verify.walk import Start, Walk, walk
from kvbaton.mlx import make_caches

Models = Callable[[str], Any]


def f32(*values: float) -> Any:
    return np.array(values, np.float32)


def test_distances_are_those_of_the_definitions() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((2, 50)).astype(np.float32) * 3
    step = compare(a, b)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum() for x in (a, b))
    assert step.kl == pytest.approx(float(np.sum(p * np.log(p / q))), rel=1e-9)
    assert step.difference == pytest.approx(float(np.abs(a.astype(np.float64) - b).max()))
    assert step.top5 == len(set(np.argsort(a)[-5:]) & set(np.argsort(b)[-5:])) / 5
    assert (step.token, step.candidate) == (int(a.argmax()), int(b.argmax()))
    assert step.margin == pytest.approx(float(a.max() - a[b.argmax()]), rel=1e-6)
    assert step.candidate_margin == pytest.approx(float(b.max() - b[a.argmax()]), rel=1e-6)


def test_equal_logits_have_no_distance_and_large_ones_do_not_overflow() -> None:
    step = compare(f32(3e4, -3e4, 0), f32(3e4, -3e4, 0))
    assert (step.kl, step.difference, step.margin, step.top5) == (0, 0, 0, 1)
    assert step.agrees


def test_logits_that_are_no_numbers_are_infinitely_far() -> None:
    for bad in (math.nan, math.inf):
        step = compare(f32(1, 2, 3), f32(1, bad, 3))
        assert (step.kl, step.difference) == (math.inf, math.inf)
    rung = logits_rung(Walk(5, [compare(f32(1, 2), f32(1, math.nan))]), kvbaton.Thresholds(), None)
    assert (rung["status"], rung["max_kl"], rung["where"]["row"]) == ("fail", None, 4)


def walked(*steps: tuple[Any, Any]) -> Walk:
    done = Walk(10)
    for reference, candidate in steps:
        step = compare(reference, candidate)
        done.steps.append(step)
        done.reference.append(step.token)
        done.free.append(step.candidate)
    return done


SURE = (f32(5, 1, 0), f32(5, 1, 0))
TIED = (f32(1.005, 1, 0), f32(1, 1.001, 0))
WRONG = (f32(1.02, 1, 0), f32(1, 1.02, 0))


def test_a_step_that_the_reference_holds_nearly_tied_is_no_failure() -> None:
    rung = teacher_forced_rung(walked(SURE, TIED, SURE), kvbaton.Thresholds())
    assert (rung["status"], rung["tie"]) == ("pass", True)
    assert (rung["steps"], rung["agreed"], rung["near_ties"]) == (3, 2, 1)
    assert teacher_forced_rung(walked(SURE), kvbaton.Thresholds())["tie"] is False


def test_a_step_that_it_holds_decided_is_one() -> None:
    rung = teacher_forced_rung(walked(SURE, TIED, WRONG), kvbaton.Thresholds())
    assert (rung["status"], rung["where"]["row"], rung["tie"]) == ("fail", 12, False)
    assert teacher_forced_rung(walked(WRONG), kvbaton.Thresholds(tie=0.03))["status"] == "pass"
    # One of three may differ, if that is said to be enough.
    limits = kvbaton.Thresholds(min_agreement=0.6)
    assert teacher_forced_rung(walked(SURE, SURE, WRONG), limits)["status"] == "pass"


class Scripted:
    """A model whose logits are given: by the number of tokens seen."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.fed: list[int] = []

    def __call__(self, tokens: Any, cache: list[Any]) -> Any:
        self.fed += np.array(tokens)[0].tolist()
        cache[0].state = cache[0].state + tokens.shape[1]
        return mx.array(np.stack([self.rows[int(cache[0].state) - 1]]))[None]


class Counted:
    """A cache that counts tokens."""

    def __init__(self) -> None:
        self.state = mx.array(0)


def test_walks_feed_what_they_say() -> None:
    """The candidate's logits are another model's here: only who is fed what is looked at."""
    model = Scripted([f32(0, 9, 0, 0), f32(0, 0, 9, 0), f32(0, 0, 0, 9), f32(9, 0, 0, 0)])
    starts = [Start([Counted()], [7], 4) for _ in range(3)]
    done = walk(model, *starts, 3)
    assert done.position == 5
    assert (done.reference, done.free, done.difference) == ([1, 2, 3], [1, 2, 3], None)
    # Three sides, in turn, of the last token and two of the continuation.
    assert model.fed == [7, 7, 7, 1, 1, 1, 2, 2, 2]
    short = walk(model, *[Start([Counted()], [7], 4) for _ in range(3)], 8, ends={2})
    assert short.reference == [1, 2]


def test_the_first_difference_has_both_sides_logits() -> None:
    class Parting(Scripted):
        """The second and third cache see other logits at their second step."""

        def __call__(self, tokens: Any, cache: list[Any]) -> Any:
            out = super().__call__(tokens, cache)
            if int(cache[0].state) == 2 and cache[0] is not first[0]:
                return mx.array(f32(0, 0, 1, 1.004))[None, None]
            return out

    first = [Counted()]
    model = Parting([f32(0, 9, 0, 0), f32(0, 0, 1.5, 1), f32(9, 0, 0, 0), f32(9, 0, 0, 0)])
    done = walk(model, Start(first, [7], 4), Start([Counted()], [7], 4), Start([Counted()], [7], 4), 3)
    assert done.reference == [1, 2, 0]
    assert done.free == [1, 3, 0]
    rung = free_running_rung(done, kvbaton.Thresholds(), lambda run: "".join(f"<{t}>" for t in run))
    assert (rung["status"], rung["where"]["row"]) == ("fail", 6)
    found = rung["first_difference"]
    assert (found["step"], found["position"], found["near_tie"]) == (1, 6, False)
    assert found["tokens"] == {"reference": 2, "candidate": 3}
    assert found["logits"]["reference"] == pytest.approx([1.5, 1])
    assert found["logits"]["candidate"] == pytest.approx([1, 1.004])
    assert (found["margin"], found["candidate_margin"]) == (
        pytest.approx(0.5),
        pytest.approx(0.004, rel=1e-3),
    )
    assert found["text"] == {"before": "<1>", "reference": "<2><0>", "candidate": "<3><0>"}
    tied = free_running_rung(done, kvbaton.Thresholds(tie=0.6), None)
    assert (tied["status"], tied["tie"], tied["where"]) == ("pass", True, None)


def cached(model: Any, length: int = 12) -> tuple[kvbaton.CacheView, list[int]]:
    tokens = cache_models.prompt(length)
    return kvbaton.from_mlx(prefill_mlx(model, tokens[:-1]), model, tokens=tokens[:-1]), tokens


def test_without_a_model_the_upper_rungs_are_not_run_and_that_is_no_pass(models: Models) -> None:
    view, _ = cached(models("llama"))
    report = kvbaton.verify(view, view)
    assert [r.status for r in report.rungs] == ["pass", "pass", "not_run", "not_run", "not_run"]
    assert (report.verdict, report.ok) == ("incomplete", False)
    assert "give model=" in (report.rung("logits").note or "")
    assert "incomplete" in str(report)


def test_rungs_that_nobody_asked_for_are_said(models: Models) -> None:
    model = models("llama")
    view, tokens = cached(model)
    report = kvbaton.verify(view, view, model, tokens, rungs=("bytes",))
    assert [r.status for r in report.rungs] == ["pass", *["not_run"] * 4]
    assert report.verdict == "incomplete"


def test_views_and_caches_are_left_as_they_were(models: Models) -> None:
    model = models("llama")
    view, tokens = cached(model)
    before = [layer.arrays["key"].copy() for layer in view.layers]
    caches = kvbaton.to_mlx(view, model, tokens).prompt_cache
    assert kvbaton.verify(view, caches, model, tokens, max_tokens=4).verdict == "pass"
    assert {c.offset for c in caches} == {len(tokens) - 1}
    for layer, keys in zip(view.layers, before, strict=True):
        assert np.array_equal(layer.arrays["key"], keys)


def test_a_cache_without_logits_that_cannot_drop_a_token_says_so(models: Models) -> None:
    model = models("qwen3_next")
    view, tokens = cached(model)
    report = kvbaton.verify(view, view, model, tokens[:-1])
    assert report.rung("bytes").status == "pass"
    assert [report.rung(n).status for n in ("logits", "teacher_forced", "free_running")] == ["not_run"] * 3
    assert "recurrent" in (report.rung("logits").note or "")
    assert report.verdict == "incomplete"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"rungs": ("bits",)},
        {"max_tokens": 2.5},
        {"tokens": [1, 2]},
        {"tokens": [*cache_models.prompt(11), 1.5]},
        {"tokens": [*cache_models.prompt(11), -1]},
        {"tokens": [*cache_models.prompt(11), cache_models.VOCAB]},
        {"remaining": [2**40]},
        {"remaining": [1], "candidate": "caches"},
    ],
)
def test_bad_requests_are_refused(models: Models, options: dict[str, Any]) -> None:
    model = models("llama")
    view, tokens = cached(model)
    candidate: Any = view
    if options.pop("candidate", None):
        candidate = kvbaton.to_mlx(view, model, tokens).prompt_cache
    with pytest.raises(kvbaton.errors.UsageError):
        kvbaton.verify(view, candidate, model, options.pop("tokens", tokens), **options)


def test_tokens_that_the_vocabulary_lacks_are_named(models: Models) -> None:
    """MLX would read whatever is in memory there. So of caches, and where the view alone knows its tokens."""
    model = models("llama")
    view, tokens = cached(model)
    caches = kvbaton.to_mlx(view, model, tokens).prompt_cache
    says = f"token 1000000 at position 11 is not in the vocabulary of {cache_models.VOCAB}"
    with pytest.raises(kvbaton.errors.UsageError, match=says):
        kvbaton.verify(caches, caches, model, [*tokens[:-1], 1000000])
    said = kvbaton.from_mlx(caches, tokens=[*tokens[:-2], 1000000])
    with pytest.raises(kvbaton.errors.UsageError, match="token 1000000 at position 10"):
        kvbaton.verify(said, said, model)


@pytest.mark.parametrize("name", ["min_cosine", "min_agreement"])
def test_shares_above_one_are_refused(name: str) -> None:
    with pytest.raises(kvbaton.errors.UsageError, match=f"{name}=1.5"):
        kvbaton.Thresholds(**{name: 1.5})
    kvbaton.Thresholds(**{name: 1})


@pytest.mark.parametrize(("wrong", "steps", "share"), [(4, 5, 0.2), (9, 10, 0.1), (1, 3, 2 / 3)])
def test_the_share_that_is_asked_for_is_enough(wrong: int, steps: int, share: float) -> None:
    done = walked(*[WRONG] * wrong, *[SURE] * (steps - wrong))
    assert teacher_forced_rung(done, kvbaton.Thresholds(min_agreement=share))["status"] == "pass"
    above = kvbaton.Thresholds(min_agreement=share + 1e-9)
    assert teacher_forced_rung(done, above)["status"] == "fail"


def test_values_without_a_row_in_common_are_not_run(models: Models) -> None:
    """Caches that nobody filled: nothing in them was wrong, and nothing was looked at."""
    model = models("llama")
    view, tokens = cached(model)
    report = kvbaton.verify(view, make_caches(model), model, tokens)
    assert report.rung("bytes").status == "fail"
    assert report.rung("values").status == "not_run"
    assert "no row of the keys of layer 0 is in both" in (report.rung("values").note or "")


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_thresholds_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(kvbaton.errors.UsageError, match="max_kl"):
        kvbaton.Thresholds(max_kl=value)


def test_what_is_usual_depends_on_the_decoder_s_type(models: Models) -> None:
    assert kvbaton.Thresholds() == kvbaton.Thresholds.usual("float32") == kvbaton.Thresholds.usual("float16")
    coarse = kvbaton.Thresholds.usual("bfloat16")
    # One unit in the last place of a bfloat16 logit from 32 on is a quarter.
    assert 0.25 < coarse.tie < 0.5
    # A row that is all zeros is off by the whole of its norm.
    assert coarse.max_row_error < 1
    with pytest.raises(kvbaton.errors.LayoutError, match="float12"):
        kvbaton.Thresholds.usual("float12")
    model = models("llama")
    view, tokens = cached(model)
    assert kvbaton.verify(view, view, model, tokens).to_dict()["thresholds"] == asdict(kvbaton.Thresholds())
    model = cache_models.build("llama", mx.bfloat16, 7)
    assert kvbaton.verify(view, view, model, tokens).to_dict()["thresholds"] == asdict(coarse)
    mine = kvbaton.Thresholds(max_kl=0.5)
    mixed = kvbaton.verify(view, view, model, tokens, thresholds=mine).to_dict()
    assert mixed["thresholds"] == asdict(mine)
