"""What a series touches, by path: that decides which build mode is faithful."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from enum import StrEnum

from builder.apply import AppliedSeries
from builder.errors import SeriesError, UnfaithfulModeError
from builder.metadata import CARRIED


class Kind(StrEnum):
    """How a path of upstream's tree gets into the wheel."""

    SHIPS = "ships as it is"
    METADATA = "metadata"
    BUILD = "build file"
    COMPILED = "compiled"
    NEVER = "never ships"


class Mode(StrEnum):
    """How a wheel is built."""

    AUTO = "auto"
    REPACK = "repack"
    SETUP_PY = "setup-py"
    SOURCE = "source"


_COMPILED_FOLDERS = ("csrc/", "cmake/", "rust/")
_COMPILED_NAMES = {"CMakeLists.txt", "Cargo.toml", "Cargo.lock", "rust-toolchain.toml", "build.rs"}
_COMPILED_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp", ".pyx", ".rs")
_BUILD_NAMES = {"setup.py", "setup.cfg", "MANIFEST.in"}


@dataclass(frozen=True)
class TouchedPath:
    """A path that differs between the release and the patched tree.

    :param patches: the names of the patches that touch it, in order.
    """

    path: str
    kind: Kind
    present: bool
    mode: int
    patches: tuple[str, ...]


def kind_of(path: str) -> Kind:
    """Classify by name alone; pyproject.toml counts as metadata until its content says more."""
    name = path.rpartition("/")[2]
    if path.startswith(_COMPILED_FOLDERS) or name in _COMPILED_NAMES:
        return Kind.COMPILED
    if re.match(r"vllm[^/]*/", path):
        if not _is_taken(path):
            return Kind.NEVER
        if name.endswith(_COMPILED_SUFFIXES):
            return Kind.COMPILED
        # 0.16 generates Python from it while it builds
        return Kind.BUILD if name.endswith(".proto") else Kind.SHIPS
    if path in _BUILD_NAMES:
        return Kind.BUILD
    if path in ("pyproject.toml", "README.md", "LICENSE") or re.fullmatch(
        r"requirements/[^/]+\.txt", path
    ):
        return Kind.METADATA
    return Kind.NEVER


def _is_taken(path: str) -> bool:
    """Tell whether setuptools takes a file of a folder that is called like the package.

    A folder with a dot is no package, and without one above it nothing in it ships; below a package
    it holds data. Of data, what lies in a folder of CVS, RCS or Subversion is left out.
    """
    folders = path.split("/")[:-1]
    if "." in folders[0]:
        return False
    is_module = path.endswith(".py") and not any("." in folder for folder in folders)
    return is_module or not {"CVS", "RCS", ".svn"}.intersection(folders)


def _shipped_mode(path: str, mode: int) -> int:
    """Return a member's permission bits: setuptools drops a module's exec bit, not a data file's."""
    return 0o644 if path.endswith(".py") else mode & 0o777


def touched_paths(applied: AppliedSeries) -> tuple[TouchedPath, ...]:
    """Return every path that the series as a whole changes, with the patches behind it."""
    git = applied.repository
    if applied.head == applied.base:
        return ()
    owners: dict[str, list[str]] = {}
    for patch in applied.patches:
        names = git.run(
            "diff-tree", "-r", "-z", "--no-renames", "--name-only", "--no-commit-id", patch.commit
        )
        for path in filter(None, names.decode().split("\0")):
            owners.setdefault(path, []).append(patch.name)
    fields = git.run(
        "diff-tree", "-r", "-z", "--no-renames", applied.base, applied.head
    ).decode().split("\0")  # fmt: skip
    touched = []
    for header, path in zip(fields[::2], fields[1::2], strict=False):
        mode = int(header.split(" ")[1], 8)
        kind = kind_of(path)
        if path == "pyproject.toml" and not _only_project_table(applied):
            kind = Kind.BUILD
        touched.append(
            TouchedPath(
                path, kind, mode != 0, _shipped_mode(path, mode), tuple(owners.get(path, ()))
            )
        )
    return tuple(sorted(touched, key=lambda item: item.path))


def _only_project_table(applied: AppliedSeries) -> bool:
    """Tell whether pyproject.toml differs only in keys of [project] that METADATA follows.

    :raises SeriesError: a patch makes it invalid.
    """
    tables = []
    for commit in (applied.base, applied.head):
        found = applied.repository.attempt("cat-file", "blob", f"{commit}:pyproject.toml")
        if found.returncode:
            return False
        try:
            data = tomllib.loads(found.stdout.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SeriesError(
                f"not valid TOML after the series: {error}",
                where="pyproject.toml",
                next_step="correct the patch in `python -m builder edit`, then export",
            ) from error
        project = data.pop("project", {})
        tables.append((data, {key: project[key] for key in project if key not in CARRIED}))
    return tables[0] == tables[1]


@dataclass(frozen=True)
class ModeChoice:
    """The mode to build with, the first one that is faithful, and why."""

    mode: Mode
    faithful: Mode
    reason: str


def choose_mode(touched: tuple[TouchedPath, ...], asked: Mode) -> ModeChoice:
    """Pick the build mode.

    :raises UnfaithfulModeError: the asked-for mode cannot carry what the series changes.
    """
    by_kind = {kind: [item for item in touched if item.kind is kind] for kind in Kind}
    if compiled := by_kind[Kind.COMPILED]:
        faithful, cause = Mode.SOURCE, compiled[0]
        reason = f"{cause.path} is compiled"
    elif build := by_kind[Kind.BUILD]:
        faithful, cause = Mode.SETUP_PY, build[0]
        reason = f"{cause.path} steers upstream's build"
    else:
        faithful, cause = Mode.REPACK, None
        reason = "the series changes only files that ship as they are, and metadata"
    if asked is Mode.AUTO:
        return ModeChoice(faithful, faithful, reason)
    order = [Mode.REPACK, Mode.SETUP_PY, Mode.SOURCE]
    if order.index(asked) < order.index(faithful):
        assert cause is not None  # noqa: S101 - repack is always reached
        raise UnfaithfulModeError(
            f"--mode {asked} cannot carry the series: {reason} (from {', '.join(cause.patches)})",
            where=cause.path,
            next_step=f"use --mode {faithful}, or --mode auto",
        )
    return ModeChoice(asked, faithful, f"asked for; {reason}")
