"""Prompts of one length, decoded side by side; and references that are computed once."""

from __future__ import annotations

import copy
import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvbaton
import numpy as np
import numpy.typing as npt
from kvbaton._verify.ladder import prefill_mlx

Floats = npt.NDArray[np.float32]
Prompts = Sequence[list[int]]

# Rows of a reference that are prefilled at once. MLX writes the scores of attention out on a CPU, hidden ones
# too, so that 256 rows at a time take two thirds of the time of mlx-lm's usual 2,048.
PIECE = 256


def side_by_side(context: int) -> int:
    """How many prompts are fed in one pass: fewer where their caches are large."""
    return max(1, min(8, 8192 // context))


def parts(some: Sequence[int], size: int) -> Iterator[list[int]]:
    """``some`` in parts of at most ``size``."""
    for first in range(0, len(some), size):
        yield list(some[first : first + size])


def stack(caches: Sequence[list[Any]]) -> list[Any]:
    """One cache a layer whose batch axis is the prompts. All have seen as many tokens; theirs stay as they are."""
    import mlx.core as mx

    joined = [copy.copy(cache) for cache in caches[0]]
    for layer, cache in enumerate(joined):
        kind = type(cache).__name__
        if kind not in ("KVCache", "RotatingKVCache"):
            raise kvbaton.errors.IncompatibleError(f"{kind} cannot be batched")
        others = [one[layer] for one in caches]
        if len({(c.offset, c.keys.shape, getattr(c, "_idx", 0)) for c in others}) > 1:
            raise kvbaton.errors.IncompatibleError("prompts of a batch have seen different numbers of tokens")
        cache.keys = mx.concatenate([c.keys for c in others], axis=0)
        cache.values = mx.concatenate([c.values for c in others], axis=0)
        mx.eval(cache.keys, cache.values)
    return joined


def forced_logits(model: Any, caches: Sequence[list[Any]], fed: Prompts) -> Floats:
    """Logits after each of the tokens that every prompt is ``fed``, in one pass: (prompts, tokens, vocabulary)."""
    import mlx.core as mx

    out = model(mx.array(np.array(fed)), cache=stack(caches)).astype(mx.float32)
    mx.eval(out)
    return np.array(out)


def greedy(model: Any, caches: Sequence[list[Any]], last: Sequence[int], steps: int) -> list[list[int]]:
    """The likeliest ``steps`` tokens after each prompt, one step at a time."""
    import mlx.core as mx

    joined = stack(caches)
    said = [list(last)]
    for _ in range(steps):
        logits = model(mx.array([[t] for t in said[-1]]), cache=joined)[:, -1].astype(mx.float32)
        said.append([int(t) for t in np.argmax(np.array(logits), axis=-1)])
    return [list(tokens) for tokens in zip(*said[1:], strict=True)]


class Recorded:
    """A prompt's reference: its prefilled cache, its continuation, and the logits along that."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.logits: Floats = np.load(folder / "logits.npy", mmap_mode="r")
        self.continuation: list[int] = json.loads((folder / "done.json").read_text())["continuation"]

    @classmethod
    def open(cls, folder: Path) -> Recorded | None:
        """The one in ``folder``; ``None`` where none was finished."""
        return cls(folder) if (folder / "done.json").is_file() else None

    def caches(self) -> list[Any]:
        """The decoder's caches after the prefill."""
        from mlx_lm.models.cache import load_prompt_cache

        return list(load_prompt_cache(str(self._folder / "cache.safetensors")))

    def view(self, model: Any, tokens: Sequence[int]) -> kvbaton.CacheView:
        """The same, to be compared."""
        return kvbaton.from_mlx(self.caches(), model, tokens=tokens)


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Keeps other runs of the study from the same work; waits while one is at it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def references(
    model: Any, prompts: Prompts, steps: int, folders: Sequence[Path], shorter: Sequence[Path]
) -> list[Recorded]:
    """A reference a prompt; those that are missing are computed and kept.

    The model prefills each prompt itself, from where it was after the prompt's beginning if ``shorter`` has that,
    continues all greedily, and is then fed what it said. The last is what the candidate does, so that the two
    differ by their caches alone.
    """
    if any(Recorded.open(folder) is None for folder in folders):
        with claimed(folders[0].parent / f"{len(prompts[0])}.lock"):
            lacking = [n for n, folder in enumerate(folders) if Recorded.open(folder) is None]
            if lacking:
                _compute(model, [(prompts[n], folders[n], shorter[n]) for n in lacking], steps)
    return [Recorded(folder) for folder in folders]


def _compute(model: Any, work: Sequence[tuple[list[int], Path, Path]], steps: int) -> None:
    # A step of many prompts reads the weights once.
    caches = [_prefill(model, tokens[:-1], shorter) for tokens, _, shorter in work]
    last = [tokens[-1] for tokens, _, _ in work]
    said = greedy(model, caches, last, steps)
    fed = [[begin, *tokens[:-1]] for begin, tokens in zip(last, said, strict=True)]
    for some in parts(range(len(work)), side_by_side(len(work[0][0]) + steps)):
        logits = forced_logits(model, [caches[n] for n in some], [fed[n] for n in some])
        for n, found in zip(some, logits, strict=True):
            _keep(work[n][1], caches[n], found, said[n])


def _prefill(model: Any, tokens: Sequence[int], shorter: Path) -> list[Any]:
    known = Recorded.open(shorter)
    if known is None:
        return prefill_mlx(model, tokens, piece=PIECE)
    caches = known.caches()
    return prefill_mlx(model, tokens[caches[0].offset :], caches, piece=PIECE)


def _keep(folder: Path, caches: list[Any], logits: Floats, said: list[int]) -> None:
    from mlx_lm.models.cache import save_prompt_cache

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_prompt_cache(str(folder / "cache.safetensors"), caches)
    np.save(folder / "logits.npy", logits)
    (folder / "done.json").write_text(json.dumps({"continuation": said}))
