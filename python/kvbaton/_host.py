"""The command line's Python half: what it asks for when only Python can do it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import _native
from .cache import CacheView
from .errors import KvbatonError, ModelError, UnavailableError, UsageError, make
from .mlx import cache_addresses, copied_bytes, describe, make_caches, prefill_to_mlx, to_mlx
from .prefill import Prefill
from .report import HandoffReport

_KINDS = {"buckets": "usage", "output": "usage", "dependency": "unavailable", "overflow": "overflow"}
_HINTS = {"dependency": "pip install 'kvbaton[export]'"}


def _from_export(error: Any) -> KvbatonError:
    """An error of the exporter in the command line's terms."""
    kind = _KINDS.get(error.kind, "model")
    hint = "choose another name, or add --force" if "exists" in str(error) else _HINTS.get(error.kind)
    return make(kind, str(error), hint, json.dumps(error.fields))


class Host:
    """Loads models, exports packages and times MLX."""

    def model_spec(self, folder: Path) -> str:
        """What a model folder says of itself, as JSON."""
        from ._export import ExportError, read_model_spec

        try:
            return json.dumps(read_model_spec(Path(folder)))
        except ExportError as error:
            raise _from_export(error) from error

    def decoder(self, folder: Path, dtype: str | None) -> MlxDecoder:
        """Loads a model and its tokenizer."""
        return MlxDecoder(Path(folder), dtype)

    def export(
        self,
        model: Path,
        out: Path,
        buckets: list[int],
        kv_outputs: Any,
        force: bool,
        progress: Callable[[str, int, int], None],
    ) -> str:
        """Writes a package and returns the report as JSON."""
        from ._export import ExportError, export

        try:
            report = export(
                Path(model), Path(out), buckets=buckets, kv_outputs=kv_outputs, force=force, progress=progress
            )
        except ExportError as error:
            raise _from_export(error) from error
        return json.dumps(dataclasses.asdict(report), default=str)

    def compare_prefill(self, folder: Path, tokens: int, threads: int) -> str:
        """Times MLX's own prefill of a model; rows as JSON."""
        from ._compare import compare_prefill

        return json.dumps(compare_prefill(Path(folder), tokens, threads))

    def page(self, document: str) -> str:
        """A report as one HTML page."""
        from ._verify.page import render

        return render(json.loads(document))

    def probe_adoption(self) -> str:
        """Whether MLX adopts foreign memory, as JSON."""
        from ._mlx.adopting import probe

        return json.dumps(probe().to_dict())

    def versions(self) -> str:
        """Versions of what decodes, as JSON."""
        import platform
        from importlib.metadata import PackageNotFoundError, version

        found = {"python": platform.python_version(), "platform": platform.platform()}
        for name in ("mlx", "mlx-lm", "numpy"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "unknown"
        return json.dumps(found)


class MlxDecoder:
    """A model that mlx-lm has loaded."""

    def __init__(self, folder: Path, dtype: str | None) -> None:
        try:
            import mlx.core as mx
            import mlx_lm
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise UnavailableError(f"mlx-lm is needed: {error}", hint="pip install 'kvbaton[mlx]'") from error
        if not (folder / "config.json").is_file():
            raise ModelError(f"`{folder}` has no config.json", fields={"folder": str(folder)})
        self._mx = mx
        self._tokenizer: Any = None
        try:
            if _has_tokenizer(folder):
                self._model, self._tokenizer = mlx_lm.load(str(folder))[:2]
            else:
                self._model = load_model(folder)[0]
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise ModelError(
                f"mlx-lm cannot load `{folder}`: {' '.join(str(error).split())}",
                fields={"folder": str(folder)},
            ) from error
        if dtype is not None:
            self._model.set_dtype(getattr(mx, dtype))
            mx.eval(self._model.parameters())
        describe(self._model)  # once, so that the hand-off finds it done
        self._folder = folder
        self._caches: list[Any] = []

    @property
    def engine(self) -> str:
        """``mlx-gpu`` where MLX has Metal, else ``mlx-cpu``."""
        return "mlx-gpu" if self._mx.metal.is_available() else "mlx-cpu"

    def encode(self, prompt: str, ignore_chat_template: bool) -> list[int]:
        """The ids of a prompt, as a user's message unless the chat template is to be ignored."""
        if self._tokenizer is None:
            raise UsageError(
                f"`{self._folder}` has no tokenizer",
                hint="give ids with --prompt-tokens",
                fields={"folder": str(self._folder)},
            )
        if ignore_chat_template or getattr(self._tokenizer, "chat_template", None) is None:
            return list(self._tokenizer.encode(prompt))
        messages = [{"role": "user", "content": prompt}]
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def receive(self, cache: _native.NativeView | None, tokens: Sequence[int]) -> str:
        """Takes the cache of all tokens but the last over and returns the report as JSON."""
        if cache is None:
            start = time.perf_counter()
            self._caches = make_caches(self._model)
            report = HandoffReport.empty(time.perf_counter() - start)
        else:
            handoff = to_mlx(CacheView(cache), self._model, tokens)
            self._caches, report = handoff.prompt_cache, handoff.report
        return json.dumps(report.to_dict())

    def receive_streamed(self, prefill: _native.NativePrefill, tokens: Sequence[int]) -> tuple[str, str]:
        """Prefills all tokens but the last and takes their rows over meanwhile; both reports as JSON."""
        handoff = prefill_to_mlx(Prefill.of_native(prefill), tokens, self._model)
        self._caches = handoff.prompt_cache
        assert handoff.prefill is not None, "a prompt of one token is not prefilled"
        return json.dumps(dataclasses.asdict(handoff.prefill)), json.dumps(handoff.report.to_dict())

    def verify(
        self,
        cache: _native.NativeView | None,
        reference: _native.NativeView | None,
        tokens: Sequence[int],
        options: str,
    ) -> str:
        """All rungs of one prompt, as JSON: what ``cache`` makes the model say, against what ``reference``
        does, or the model's own prefill. Without a cache, as of a prompt of one token, from empty ones."""
        from ._verify.ladder import Caches, HandedOver, Job, Side, climb, prefill_mlx
        from ._verify.rungs import Thresholds

        chosen = json.loads(options)
        model = self._model
        source = None if cache is None else CacheView(cache)
        expected: Side
        if reference is None:
            expected = Caches(prefill_mlx(model, tokens[:-1]), model, tokens, own=True)
        else:
            expected = HandedOver(CacheView(reference), model, tokens)
        found: Side = Caches(make_caches(model), model, tokens)
        if source is not None:
            found = HandedOver(source, model, tokens, through=True)
        tokenizer = self._tokenizer
        job = Job(
            model=model,
            thresholds=Thresholds(**chosen["thresholds"]),
            max_tokens=chosen["max_tokens"],
            source=source,
            ends=frozenset(getattr(tokenizer, "eos_token_ids", None) or ()),
            text=None if tokenizer is None else lambda run: str(tokenizer.decode(list(run))),
        )
        return json.dumps(climb(expected, found, job))

    def generate(
        self, remaining: Sequence[int], max_tokens: int, temperature: float
    ) -> Iterator[tuple[int, str] | str]:
        """Yields ``(id, text)`` a token, then the summary as JSON.

        The first step runs by itself, so that its time and the bytes it copied are its own.
        """
        from mlx_lm.generate import generate_step
        from mlx_lm.sample_utils import make_sampler

        mx = self._mx
        sampler = make_sampler(temp=temperature)
        ends = set(getattr(self._tokenizer, "eos_token_ids", None) or ())
        text = _Text(self._tokenizer)
        tokens: list[int] = []
        before = cache_addresses(self._caches)
        start = time.perf_counter()
        # Not by generate_step, which runs one step ahead: the first token would go into the cache twice.
        logits = self._model(mx.array([list(remaining)]), cache=self._caches)[:, -1, :]
        sampled = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(sampled, [c.state for c in self._caches])
        token = int(sampled[0])
        first_step = time.perf_counter() - start
        copied = copied_bytes(before, self._caches) if before else 0
        tokens.append(token)
        yield token, text.add(token, token in ends)
        if max_tokens > 1 and token not in ends:
            for step in generate_step(
                mx.array([token]),
                self._model,
                max_tokens=max_tokens - 1,
                sampler=sampler,
                prompt_cache=self._caches,
            ):
                token = int(step[0])
                tokens.append(token)
                yield token, text.add(token, token in ends)
                if token in ends:
                    break
        seconds = time.perf_counter() - start
        tail = text.finish()
        if tail:
            yield tokens[-1], tail
        yield json.dumps(
            {
                "tokens": tokens,
                "text": text.whole,
                "first_step_seconds": first_step,
                "seconds": seconds,
                "first_step_copied_bytes": copied,
            }
        )


class _Text:
    """Text of a growing run of tokens, as far as it is certain; empty without a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer
        if self._detokenizer is not None:
            self._detokenizer.reset()
        self.whole = ""

    def add(self, token: int, ends: bool) -> str:
        """The text that ``token`` makes certain; a token that ends the answer has none."""
        if self._detokenizer is None or ends:
            return ""
        self._detokenizer.add_token(token)
        return self._take()

    def finish(self) -> str:
        """What was still open."""
        if self._detokenizer is None:
            return ""
        self._detokenizer.finalize()
        return self._take()

    def _take(self) -> str:
        assert self._detokenizer is not None
        text = str(self._detokenizer.last_segment)
        self.whole += text
        return text


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return any((folder / name).is_file() for name in names)
