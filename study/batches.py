"""Prompts of one length, decoded side by side; and a reference that is computed once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvbaton
import numpy as np
import numpy.typing as npt
from kvbaton._verify.ladder import prefill_mlx

Floats = npt.NDArray[np.float32]


class Batch:
    """Caches of several prompts of one length as one cache, and the logits after the last token of each."""

    def __init__(self, model: Any, caches: Sequence[list[Any]], last: Sequence[int]) -> None:
        self._model = model
        self._caches = stack(caches)
        self.logits = self.step(last)

    def step(self, tokens: Sequence[int]) -> Floats:
        """Runs one token of each prompt; (prompts, vocabulary)."""
        import mlx.core as mx

        out = self._model(mx.array([[int(t)] for t in tokens]), cache=self._caches)[:, -1]
        out = out.astype(mx.float32)
        mx.eval(out, [c.state for c in self._caches])
        self.logits: Floats = np.array(out)
        return self.logits


def stack(caches: Sequence[list[Any]]) -> list[Any]:
    """One cache a layer whose batch axis is the prompts. All have seen as many tokens."""
    import mlx.core as mx

    joined = caches[0]
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


class Recorded:
    """A reference that was computed before: prefilled caches, and logits of every step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logits = np.load(folder / "logits.npy", mmap_mode="r")

    @classmethod
    def open(cls, folder: Path) -> Recorded | None:
        """The one in ``folder``; ``None`` where none was finished."""
        return cls(folder) if (folder / "done.json").is_file() else None

    def logits(self, step: int) -> Floats:
        """Logits of a step: (prompts, vocabulary)."""
        return np.asarray(self._logits[step], np.float32)

    def view(self, model: Any, prompt: int, tokens: Sequence[int]) -> kvbaton.CacheView:
        """A prompt's cache after its prefill."""
        from mlx_lm.models.cache import load_prompt_cache

        caches = load_prompt_cache(str(self._folder / f"{prompt}.safetensors"))
        return kvbaton.from_mlx(caches, model, tokens=tokens)


def record(model: Any, prompts: Sequence[list[int]], steps: int, folder: Path) -> Recorded:
    """Prefills each prompt with the model itself and decodes all greedily; keeps what came of it."""
    from mlx_lm.models.cache import save_prompt_cache

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    caches = []
    for number, tokens in enumerate(prompts):
        caches.append(prefill_mlx(model, tokens[:-1]))
        save_prompt_cache(str(folder / f"{number}.safetensors"), caches[-1])
    batch = Batch(model, caches, [tokens[-1] for tokens in prompts])
    logits = np.empty((steps, *batch.logits.shape), np.float32)
    for index in range(steps):
        logits[index] = batch.logits
        if index + 1 < steps:
            batch.step([int(np.argmax(row)) for row in batch.logits])
    np.save(folder / "logits.npy", logits)
    (folder / "done.json").write_text(json.dumps({"prompts": len(prompts), "steps": steps}))
    return Recorded(folder)
