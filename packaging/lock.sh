#!/usr/bin/env bash
# Pin the tools that build and publish releases by hash, for every platform.
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m venv build/uv
build/uv/bin/pip install --quiet --disable-pip-version-check uv
lock() {  # Python version, name
  build/uv/bin/uv pip compile --quiet --upgrade --universal --no-build --generate-hashes --emit-build-options \
    --no-config --default-index https://pypi.org/simple --custom-compile-command "make release-requirements" \
    --python-version "$1" --output-file "packaging/$2-requirements.txt" "packaging/$2.in"
}
lock 3.10 build
lock 3.11 release
