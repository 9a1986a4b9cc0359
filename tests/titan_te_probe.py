"""Imported by every rank of a training job (``--experimental.custom_import=tests.titan_te_probe``): titan_probe.py, and a
stand-in for TransformerEngine."""

from __future__ import annotations

import contextlib

from tests import te_stand_in, titan_probe  # noqa: F401

_installed = contextlib.ExitStack()  # for as long as the process lives
_installed.enter_context(te_stand_in.installed())
