"""Readable ``assert`` failures in rank processes: test modules are imported there with pytest's assertion rewriting."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import sys
from types import CodeType

from _pytest.assertion.rewrite import rewrite_asserts

PACKAGE = __name__.partition(".")[0]


class _RewritingLoader(importlib.machinery.SourceFileLoader):
    """Compiles with rewritten asserts. Byte code is not cached: the cache belongs to the plain import."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)


class RewritingFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of the test package as usual and has :class:`_RewritingLoader` load them."""

    def find_spec(self, fullname, path=None, target=None):
        """As ``MetaPathFinder.find_spec``; None for anything outside the test package."""
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _RewritingLoader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Put the finder in front of the import system of this process, once."""
    if not any(isinstance(finder, RewritingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RewritingFinder())
