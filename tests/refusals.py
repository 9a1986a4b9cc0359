"""The list of everything that is refused, read from the code: ``python -m tests.refusals`` writes tests/REFUSALS.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = ROOT / "tests" / "REFUSALS.md"
PACKAGES = ("gtp_dtensor", "titan_integration")
INTRODUCTION = """# What is refused, with its message

Every error that the library and the torchtitan integration raise themselves, read from the code by `python -m tests.refusals`,
which writes this file; `test_refusals.py` fails where the two differ. In braces: what a message is filled with. What of it
FSDP2 would accept, and why we do not: see README.md here.
"""


def message_of(node: ast.expr | None) -> str:
    """The text of a message as it is written, with what is filled in as {expression}."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            text = part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
            parts.append(text)
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message_of(node.left) + message_of(node.right)
    return "" if node is None else f"{{{ast.unparse(node)}}}"


def raised_in(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """(function, error, message) of each ``raise`` of a new error, in order."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from raised_in(node, (*names, node.name))
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
            yield ".".join(names), ast.unparse(call.func), message_of(call.args[0] if call.args else None)
        yield from raised_in(node, names)


def as_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def listed() -> str:
    """What the file should hold."""
    lines = [INTRODUCTION]
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            rows = list(raised_in(ast.parse(file.read_text())))
            if rows:
                lines += [f"\n## {file.relative_to(ROOT)}\n", "| in | error | message |", "|---|---|---|"]
                lines += [f"| {where or '(module)'} | {error} | {as_cell(message)} |" for where, error, message in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    LIST.write_text(listed())
