"""tests/README.md places every public report, and the tests that it names are there."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS / "README.md").read_text()


def test_each_report_is_placed_once():
    assert re.findall(r"^\| (B\d\d) \|", TEXT, re.M) == [f"B{number:02}" for number in range(1, 85)]


def test_each_test_is_there():
    named = re.findall(r"\b(\w+)::(\w+)", TEXT)
    assert len(named) > 150
    sources = {path.stem: path.read_text() for path in TESTS.glob("test_*.py")}
    missing = [
        f"{file}::{name}"
        for file, name in named
        if (file, name) != ("a", "b") and not re.search(rf"^def test_{name}\(", sources.get(f"test_{file}", ""), re.M)
    ]
    assert not missing
