#!/usr/bin/env bash
# wheel.sh DIR PYTHON...: builds wheel and sdist from what git has, checks both, and lets the wheel prove itself: for each
# Python, alone in a new environment, in a folder outside the checkout, the quickstart is copied and run. DIR is new or
# empty. Without --index-url or the like in pip's own configuration, torch is what PyPI has (README: CUDA, 4 GB).
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$(mkdir -p "$1" && realpath "$1") && shift
root=$PWD
export PIP_DISABLE_PIP_VERSION_CHECK=1 CI=1

"$1" -m venv "$dir/build"
"$dir/build/bin/pip" install --quiet --upgrade pip
"$dir/build/bin/pip" install --quiet build twine
mkdir "$dir/source" && git archive HEAD | tar -x -C "$dir/source"  # neither what git ignores nor an old build/
"$dir/build/bin/python" -m build --outdir "$dir/dist" "$dir/source" > "$dir/build.log" 2>&1 || { tail "$dir/build.log"; exit 1; }
"$dir/build/bin/twine" check --strict "$dir"/dist/*
wheel=$(echo "$dir"/dist/*.whl)

for python in "$@"; do
  SECONDS=0
  version=$("$python" -c 'import platform; print(platform.python_version())')
  here=$dir/$version
  "$python" -m venv "$here/venv"
  "$here/venv/bin/pip" install --quiet --upgrade pip
  "$here/venv/bin/pip" install --quiet --no-compile -c "$root/constraints.txt" "$wheel[cpu]"
  installed=$SECONDS
  (
    cd "$here"
    venv/bin/olive-ext quickstart "a copy" > command
    PATH=$here/venv/bin:$PATH bash -e command > log 2>&1 || { tail log; exit 1; }
    venv/bin/olive-ext schema recipe > /dev/null
    venv/bin/python - <<'PYTHON'
import json
import pathlib
import sys

import olive_ext

assert pathlib.Path(olive_ext.__file__).is_relative_to(sys.prefix), olive_ext.__file__
found = [json.loads(path.read_text()) for path in pathlib.Path("a copy").rglob("*metrics.json")]
assert any("quickstart_choice-acc" in str(metrics) for metrics in found), found
PYTHON
  )
  echo "Python $version: quickstart run from the wheel, 1 passed in $SECONDS.0s ($installed to install)"
done
