"""Python read as text: its syntax tree, and whether it compiles. Nothing is imported."""

from __future__ import annotations

import ast
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache


@lru_cache(maxsize=1)  # one file is asked about several times in a row; more trees are only memory
def parsed(source: bytes) -> ast.Module | None:
    """Return the tree, which nobody may change; None where the text is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream's escapes in strings are not our matter
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def compile_fault(source: bytes, path: str) -> str:
    """Return why Python does not compile the text; "" where it does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # not ast.parse: that takes a `return` outside a function
            compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error) or type(error).__name__
    return ""


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python from looking for cycles: trees have none, and walking them takes a fifth of a trial."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
