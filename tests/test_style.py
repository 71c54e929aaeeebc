"""Expressions that are hard to read: nested conditions, and comprehensions with several loops."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def hard_expressions(tree: ast.AST) -> list[int]:
    """Return the line of each violation."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            nested = [node.test, node.body, node.orelse]
            if any(isinstance(part, ast.IfExp) for part in nested):
                lines.append(node.lineno)
        if isinstance(node, COMPREHENSIONS):
            conditions = sum(len(loop.ifs) for loop in node.generators)
            if len(node.generators) > 1 or conditions > 1:
                lines.append(node.lineno)
    return lines


def violations() -> dict[str, list[int]]:
    """Return the lines of the violations of each Python file in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    violations_by_file = {}
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if path.is_file():
            lines = hard_expressions(ast.parse(path.read_text(encoding="utf-8"), name))
            if lines:
                violations_by_file[name] = lines
    return violations_by_file


@pytest.mark.parametrize(
    "code",
    [
        "a if b else c if d else e",
        "[x for row in rows for x in row]",
        "{x for x in row if x if y}",
    ],
)
def test_hard_expression_is_a_violation(code):
    assert hard_expressions(ast.parse(code)) == [1]


def test_readable_expression_is_not_a_violation():
    assert not hard_expressions(ast.parse("[x if y else z for x in row if x]"))


def test_repository_has_no_hard_expressions():
    assert not violations(), "write a loop, an if statement or a helper with a name"
