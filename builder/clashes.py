"""Names that cannot stand beside each other in a tree, or of which Python would take the other one.

A patch that adds a file applies wherever no file has its name. git then deletes the file that stands
where the patch wants a folder, and Python imports the package of two that have one name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from builder.objects import Tree


def clash(path: str, tree: Tree, read_old: Callable[[str], bytes | None]) -> str:
    """Say what in ``tree`` a new file of this name clashes with; "" for nothing.

    :param read_old: the release that the patch was made on; what is so there already is meant.
    """
    parents = [str(parent) for parent in PurePosixPath(path).parents][:-1]
    if file := next((parent for parent in parents if tree.read(parent) is not None), None):
        return f"{file} is a file there, and would have to be a folder"
    if tree.is_folder(path):
        return f"{path} is a folder there"
    if not path.endswith(".py"):
        return ""
    hidden = (parent for parent in parents if _is_new(f"{parent}.py", tree, read_old))
    if module := next(hidden, None):
        return f"{module}.py is there: Python imports either that or what is in the folder {module}"
    package = f"{path.removesuffix('.py')}/__init__.py"
    return (
        f"{package} is there: Python would import that" if _is_new(package, tree, read_old) else ""
    )


def _is_new(path: str, tree: Tree, read_old: Callable[[str], bytes | None]) -> bool:
    return tree.read(path) is not None and read_old(path) is None
