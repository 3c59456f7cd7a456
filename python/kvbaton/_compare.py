"""Times MLX's own prefill, each setting in a process of its own: a BLAS can only be chosen at start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .errors import KvbatonError, ModelError, UnavailableError

_BUDGET_SECONDS = 20.0
_REPEATS = 5


def compare_prefill(folder: Path, tokens: int, threads: int) -> list[dict[str, Any]]:
    """Rows as ``bench prefill`` prints them: float16, float32, and float32 over OpenBLAS where it is found.

    MLX's Linux build brings a reference BLAS for float32 and a product of its own for float16; neither uses
    more than one thread, whatever ``threads`` says.
    """
    rows = [_row(folder, tokens, threads, dtype, None) for dtype in ("float16", "float32")]
    library = find_openblas()
    if library is None:
        print(
            "note: OpenBLAS was not found (scripts/openblas.sh gets it): MLX over it is not measured",
            file=sys.stderr,
        )
    else:
        rows.append(_row(folder, tokens, threads, "float32", library))
    return rows


def find_openblas() -> Path | None:
    """OpenBLAS: ``KVBATON_OPENBLAS``, the user's cache folder, or the system's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    machine = os.uname().machine
    candidates = [
        os.environ.get("KVBATON_OPENBLAS"),
        cache / "kvbaton/openblas/libopenblas.so.0",
        f"/usr/lib/{machine}-linux-gnu/openblas-pthread/libopenblas.so.0",
        f"/usr/lib/{machine}-linux-gnu/libopenblas.so.0",
    ]
    return next((Path(c) for c in candidates if c and Path(c).exists()), None)


def openblas_environment(library: Path) -> dict[str, str]:
    """The environment of a process whose MLX multiplies with ``library``."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": f"{library.parent}:{path}" if path else str(library.parent),
    }


def _row(folder: Path, tokens: int, threads: int, dtype: str, library: Path | None) -> dict[str, Any]:
    environment = {**os.environ} if library is None else openblas_environment(library)
    environment["OPENBLAS_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-m", "kvbaton._compare", str(folder), str(tokens), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        kind: type[KvbatonError] = UnavailableError if "ModuleNotFoundError" in last else ModelError
        raise kind(f"MLX could not prefill `{folder}`: {last}", fields={"folder": str(folder)})
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = sorted(measured["seconds"])
    median = seconds[len(seconds) // 2]
    engine = measured["engine"]
    return {
        "engine": engine if library is None else f"{engine}+openblas",
        "dtype": dtype,
        "package": str(folder),
        "function": None,
        "tokens": tokens,
        "threads": threads if library is not None else 1,
        "seconds": {"min": seconds[0], "median": median, "max": seconds[-1]},
        "tokens_per_second": tokens / median,
        "peak_bytes": measured["peak_bytes"],
    }


def _measure(folder: str, tokens: int, dtype: str) -> dict[str, Any]:
    """Prefills ``tokens`` tokens a few times, after a short one that warms."""
    import resource

    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model = load_model(Path(folder))[0]
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    vocab = model.args.vocab_size

    def prefill(count: int) -> float:
        ids = mx.array([[(i * 7919 + 13) % vocab for i in range(count)]])
        caches = make_prompt_cache(model)
        start = time.perf_counter()
        # As generate_step does: the prompt's logits are not needed, so MLX does not compute them.
        model(ids, cache=caches)
        mx.eval([c.state for c in caches])
        return time.perf_counter() - start

    prefill(min(tokens, 16))
    seconds: list[float] = []
    while len(seconds) < _REPEATS and sum(seconds) < _BUDGET_SECONDS:
        seconds.append(prefill(tokens))
    return {
        "engine": "mlx-gpu" if mx.metal.is_available() else "mlx-cpu",
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    }


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
