#!/usr/bin/env bash
# Tries the wheel in dist/ like a new user: in a fresh environment and an empty folder. Test files,
# if named, run there too.
#
#   PYTHON=python3.13 scripts/try_wheel.sh constraints/py312.txt [tests/core_types_test.py ...]
set -euo pipefail

wheel=$(realpath dist/*.whl)
constraints=$(realpath "$1")
tests=("${@:2}")
root=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
"$scratch/venv/bin/pip" install --quiet --disable-pip-version-check --no-compile \
  -c "$constraints" "$wheel"
mkdir "$scratch/empty"
cd "$scratch/empty"
unset PYTHONPATH
export PATH="$scratch/venv/bin:$PATH"

if python -m zipfile --list "$wheel" | grep -E '(^|/)(tests?|conftest)(/|_|\.)'; then
  echo "the wheel has tests in it" >&2
  exit 1
fi
python - <<'PYTHON'
import adloco_jax.configs.diloco
from importlib import resources

assert "site-packages" in adloco_jax.__file__
assert resources.files("adloco_jax").joinpath("py.typed").is_file()
adloco_jax.configs.diloco.get_config()
PYTHON
adloco --version
adloco configs | grep quickstart
adloco plan quickstart
adloco train quickstart --config.num_rounds=2 --workdir run
test -s run/report/index.html -a -s run/export/model.safetensors
adloco generate run --samples 1 --tokens 20

if [ ${#tests[@]} -gt 0 ]; then
  pip install --quiet --disable-pip-version-check --no-compile -c "$constraints" \
    pytest pytest-xdist beartype hypothesis
  cd "$root"
  python -m pytest -q -n auto --maxprocesses=4 --dist=worksteal -p no:cacheprovider "${tests[@]}"
fi
