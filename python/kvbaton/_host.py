"""The command line's Python half: what it asks for when only Python can do it."""

from __future__ import annotations

import dataclasses
import gc
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import _native
from .cache import CacheView
from .errors import KvbatonError, ModelError, UnavailableError, UsageError, make
from .mlx import cache_addresses, check_ids, copied_bytes, describe, make_caches, prefill_to_mlx, to_mlx
from .prefill import Prefill
from .report import HandoffReport, PrefillReport

_KINDS = {
    "quantize": "usage",
    "buckets": "usage",
    "output": "usage",
    "dependency": "unavailable",
    "overflow": "overflow",
}
_PREFILL_STEP = 2048  # tokens that mlx-lm prefills at once
_COLDEST = 1e-30  # a temperature whose inverse float32 holds, times any difference of scores
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

    def prefiller(self, folder: Path, dtype: str | None) -> MlxPrefiller:
        """Loads a model that prefills."""
        return MlxPrefiller(Path(folder), dtype)

    def tokenizer(self, folder: Path) -> Tokenizer | None:
        """Loads a folder's tokenizer, if it has one."""
        return Tokenizer(Path(folder)) if _has_tokenizer(Path(folder)) else None

    def export(self, model: Path, out: Path, **options: Any) -> str:
        """Writes a package, or several, and returns the report as JSON."""
        from ._export import ExportError, export

        try:
            report = export(Path(model), Path(out), **options)
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

    def bench_page(self, document: str) -> str:
        """A bench's report as one HTML page."""
        from . import _bench_page

        return _bench_page.render(json.loads(document))

    def probe_adoption(self) -> str:
        """Whether MLX adopts foreign memory, as JSON."""
        from ._mlx.adopting import probe

        return json.dumps(probe().to_dict())

    def probe_inverse(self) -> str:
        """Whether a runtime writes into memory that MLX owns, as JSON."""
        from ._mlx.inverse import probe

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


def _load(folder: Path, dtype: str | None) -> tuple[Any, Any]:
    """A model in ``dtype``, or as it is, and its tokenizer, if it has one."""
    try:
        import mlx.core as mx
        import mlx_lm
        from mlx_lm.utils import load_model
    except ImportError as error:
        raise UnavailableError(f"mlx-lm is needed: {error}", hint="pip install 'kvbaton[mlx]'") from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"`{folder}` has no config.json", fields={"folder": str(folder)})
    tokenizer: Any = None
    try:
        if _has_tokenizer(folder):
            model, tokenizer = mlx_lm.load(str(folder))[:2]
        else:
            model = load_model(folder)[0]
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise ModelError(
            f"mlx-lm cannot load `{folder}`: {' '.join(str(error).split())}",
            fields={"folder": str(folder)},
        ) from error
    if dtype is not None:
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
    describe(model)  # once, so that the hand-off finds it done
    return model, tokenizer


def _mlx_engine() -> str:
    import mlx.core as mx

    return "mlx-gpu" if mx.metal.is_available() else "mlx-cpu"


def _encode(tokenizer: Any, prompt: str, ignore_chat_template: bool) -> list[int]:
    """The ids of a prompt, as a user's message unless the chat template is to be ignored."""
    if ignore_chat_template or getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _prefilled(model: Any, tokens: Sequence[int]) -> list[Any]:
    """mlx-lm's caches of ``tokens``, prefilled in the steps that it takes."""
    import mlx.core as mx

    caches = make_caches(model)
    for first in range(0, len(tokens), _PREFILL_STEP):
        model(mx.array([list(tokens[first : first + _PREFILL_STEP])]), cache=caches)
        # The logits are never evaluated, as in mlx-lm.
        mx.eval([c.state for c in caches])
        mx.clear_cache()
    return caches


def _sampler(temperature: float) -> Any:
    """mlx-lm's sampler, which also takes temperatures near 0 for what they are: the likeliest token."""
    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    if temperature == 0:
        return make_sampler(temp=0.0)
    draw = make_sampler(temp=max(temperature, _COLDEST))
    # Relative to the likeliest and in float32: divided by a small number, all would be infinite alike.
    return lambda scores: draw((scores - scores.max(axis=-1, keepdims=True)).astype(mx.float32))


class MlxPrefiller:
    """A model that mlx-lm has loaded, to prefill with."""

    def __init__(self, folder: Path, dtype: str | None) -> None:
        self._model, _ = _load(folder, dtype)

    @property
    def engine(self) -> str:
        """``mlx-gpu`` where MLX has Metal, else ``mlx-cpu``."""
        return _mlx_engine()

    def prefill(self, tokens: Sequence[int]) -> _native.NativeView:
        """Runs all of ``tokens`` and gives their cache."""
        from .mlx import from_mlx

        check_ids(self._model, tokens)
        return from_mlx(_prefilled(self._model, tokens), self._model, tokens=tokens)._native


class Tokenizer:
    """A tokenizer of a run whose decoder has none."""

    def __init__(self, folder: Path) -> None:
        try:
            from mlx_lm.tokenizer_utils import load
        except ImportError as error:
            raise UnavailableError(f"mlx-lm is needed: {error}", hint="pip install 'kvbaton[mlx]'") from error
        try:
            self._tokenizer = load(folder)
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            raise ModelError(
                f"the tokenizer of `{folder}` cannot be loaded: {' '.join(str(error).split())}",
                fields={"folder": str(folder)},
            ) from error
        self._text = _Text(self._tokenizer)

    @property
    def ends(self) -> list[int]:
        """Ids that end an answer."""
        return sorted(getattr(self._tokenizer, "eos_token_ids", None) or ())

    def encode(self, prompt: str, ignore_chat_template: bool) -> list[int]:
        """The ids of a prompt."""
        return _encode(self._tokenizer, prompt, ignore_chat_template)

    def add(self, token: int) -> str:
        """The text that ``token`` makes certain."""
        return self._text.add(token, False)

    def finish(self) -> str:
        """What was still open."""
        return self._text.finish()


class MlxDecoder:
    """A model that mlx-lm has loaded."""

    def __init__(self, folder: Path, dtype: str | None) -> None:
        self._model, self._tokenizer = _load(folder, dtype)
        self._folder = folder
        self._caches: list[Any] = []

    @property
    def engine(self) -> str:
        """``mlx-gpu`` where MLX has Metal, else ``mlx-cpu``."""
        return _mlx_engine()

    @property
    def dtype(self) -> str:
        """The type of the model's weights and cache."""
        from .mlx import dtype_name

        return dtype_name(self._model)

    def adoption(self) -> str:
        """Whether MLX takes memory over for nothing, and how that is known, as JSON."""
        from ._mlx.adopting import probe

        measured = probe()
        return json.dumps({"free": measured.free, "because": measured.sentence})

    def adopt(self, cache: _native.NativeView, tokens: Sequence[int]) -> str:
        """As `receive`, but on the memory of ``cache`` itself, unless something speaks against it."""
        view = CacheView(cache)
        view.adoptable = True
        handoff = to_mlx(view, self._model, tokens, adopt=True)
        self._caches = handoff.prompt_cache
        return json.dumps(handoff.report.to_dict())

    def encode(self, prompt: str, ignore_chat_template: bool) -> list[int]:
        """The ids of a prompt, as a user's message unless the chat template is to be ignored."""
        if self._tokenizer is None:
            raise UsageError(
                f"`{self._folder}` has no tokenizer",
                hint="give ids with --prompt-tokens",
                fields={"folder": str(self._folder)},
            )
        return _encode(self._tokenizer, prompt, ignore_chat_template)

    def receive(self, cache: _native.NativeView | None, tokens: Sequence[int]) -> str:
        """Takes the cache of all tokens but the last over and returns the report as JSON."""
        check_ids(self._model, tokens)
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

    def prefill(self, tokens: Sequence[int]) -> str:
        """MLX's own prefill of all tokens but the last, in the steps that mlx-lm takes; the report as JSON."""
        check_ids(self._model, tokens)
        count = len(tokens) - 1
        start = time.perf_counter()
        self._caches = _prefilled(self._model, tokens[:-1])
        seconds = time.perf_counter() - start
        report = PrefillReport(self.engine, "mlx-lm", count, seconds, count / seconds)
        return json.dumps(dataclasses.asdict(report))

    def forget(self, memory: bool) -> None:
        """Lets go of the caches; with ``memory``, also of what MLX keeps for the next ones."""
        import mlx.core as mx

        self._caches = []
        gc.collect()
        if memory:
            mx.clear_cache()

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
        check_ids(model, tokens)
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
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        sampler = _sampler(temperature)
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
