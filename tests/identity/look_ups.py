"""Finds where a source tree asks for a distribution by upstream's name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# Functions whose first argument is the name of a distribution. ``files`` is one only in
# importlib.metadata: importlib.resources has a ``files`` for packages.
_FUNCTIONS = {
    "version", "metadata", "distribution", "requires", "from_name", "get_distribution",
    "metadata.files",
}  # fmt: skip


def look_ups(tree: Path) -> Iterator[str]:
    """Yield ``path:line`` of each call that looks up the distribution ``vllm``."""
    for path in sorted((tree / "vllm").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if not re.search(r"""["']vllm["']""", source, re.IGNORECASE):
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and _asks_for_vllm(node):
                yield f"{path.relative_to(tree)}:{node.lineno}"


def _asks_for_vllm(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    if not any(function == name or function.endswith(f".{name}") for name in _FUNCTIONS):
        return False
    arguments = [*call.args[:1], *(keyword.value for keyword in call.keywords)]
    return any(
        isinstance(value, ast.Constant)
        and isinstance(value.value, str)
        and value.value.lower() == "vllm"
        for value in arguments
    )
