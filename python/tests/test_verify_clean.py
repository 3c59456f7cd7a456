"""A clean hand-off of a real model on 64 prompts: what ``kvbaton verify`` says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Run

PROMPTS, STEPS = 64, 16


def passages(count: int) -> list[dict[str, str]]:
    """Text of 120 to 520 characters from Python's language reference, which ships with Python."""
    from pydoc_data.topics import topics

    paragraphs = [p.strip() for n in sorted(topics) for p in topics[n].split("\n\n") if len(p.strip()) > 60]
    found = []
    for number in range(count):
        at = number * len(paragraphs) // count
        text = "\n\n".join(paragraphs[at : at + 12])[: 120 + number * 37 % 400]
        found.append({"name": f"passage-{number}", "prompt": text})
    return found


@pytest.mark.slow
def test_a_clean_hand_off_passes_on_64_prompts(
    kvbaton_cli: Run, package: Path, model_folder: Path, tmp_path: Path
) -> None:
    """In float32, so that what differs is the package's fp16 alone."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(p) + "\n" for p in passages(PROMPTS)))
    done = kvbaton_cli(
        "verify",
        *("--prefill", package, "--decode", model_folder, "--prompts", file, "--ignore-chat-template"),
        *("--max-tokens", str(STEPS), "--dtype", "float32", "--json"),
    )
    document = done.json()
    assert done.code == 0, document["reason"]
    assert document["verdict"] in ("pass", "tie")
    rungs = {r["name"]: r for r in document["rungs"]}
    assert rungs["bytes"]["passed"] == rungs["values"]["passed"] == PROMPTS
    assert rungs["bytes"]["differing"] == 0
    # Far within the thresholds: a package that only just passes is another package.
    assert rungs["values"]["min_cosine"] > 0.9999
    assert rungs["logits"]["max_kl"] < 1e-3
    values, logits = rungs["values"], rungs["logits"]
    forced, free = rungs["teacher_forced"], rungs["free_running"]
    print(
        f"{document['verdict']}: {forced['agreed']} of {forced['steps']} steps agree, "
        f"{forced['near_ties']} are near ties; {free['identical']} of {PROMPTS} continuations identical; "
        f"smallest cosine {values['min_cosine']:.7f}, a row off by {values['max_row_error']:.3f}, "
        f"divergence at most {logits['max_kl']:.1e}, a logit off by {logits['max_difference']:.3f}"
    )
    # What differs at all differs where the reference is undecided.
    assert forced["steps"] - forced["agreed"] == forced["near_ties"]
