#!/usr/bin/env bash
# Run the tests of mlx-lm's cache classes against older versions of mlx-lm, each in an environment of its own in
# .cache/. The installed version is tested by `make test`.
#
# usage: test-mlx-lm-versions.sh [version …]     default: 0.31.3 0.30.7
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
[ $# -gt 0 ] || set -- 0.31.3 0.30.7
for version in "$@"; do
    venv=.cache/mlx-lm-$version
    if [ ! -e "$venv/.ready" ]; then
        echo "== mlx-lm $version: making $venv"
        "$python" -m venv --clear "$venv"
        "$venv/bin/pip" install --quiet "mlx-lm==$version" 'mlx[cpu]' 'numpy>=2' 'pytest>=9'
        # The package itself, where it was built.
        package=$("$python" -c 'import kvbaton, pathlib; print(pathlib.Path(kvbaton.__file__).parents[1])')
        echo "$package" > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/kvbaton.pth"
        touch "$venv/.ready"
    fi
    echo "== mlx-lm $version"
    scripts/with-openblas.sh "$venv/bin/python" -m pytest -q -m 'not slow' \
        python/tests/test_cache_classes.py python/tests/test_cache_cases.py python/tests/test_coreml_inputs.py
done
