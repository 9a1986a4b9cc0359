"""The list of refusals is that of the code."""

import ast
import sys

import pytest

from tests.refusals import LIST, listed, raised_in


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons write expressions with other quotes")
def test_the_list_is_that_of_the_code():
    assert LIST.read_text() == listed(), (
        "run `python -m tests.refusals` and look at what it changes in tests/REFUSALS.md"
    )


def test_every_form_of_message_is_read():
    code = """
class A:
    def f(self):
        if self:
            raise ValueError(f"{self.x} is bad: " + "do this" f" or {that(1)}")
        raise NotImplementedError
def g():
    raise error
def h():
    raise RuntimeError(text) from error
"""
    assert list(raised_in(ast.parse(code))) == [
        ("A.f", "ValueError", "{self.x} is bad: do this or {that(1)}"),
        ("h", "RuntimeError", "{text}"),
    ]
