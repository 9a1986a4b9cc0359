#!/usr/bin/env bash
# Runs the tests, from nothing:
#
#   ./scripts/test.sh [--all] [--world-limit N] [pytest options, or paths relative to the repository]
#
# Without options: the default suite. --all: slow tests too, and more examples of the random ones. --world-limit N:
# skip tests on more than N ranks. Environment: PYTHON, an interpreter to use without installing anything.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$ROOT/scripts/setup_venv.sh"
cd "$ROOT"
exec "$PYTHON" -m pytest "$@"
