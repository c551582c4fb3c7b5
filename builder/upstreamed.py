"""Whether upstream has a patch already: wholly, in part, or not at all, and how that is known.

Two witnesses. The patch's own ``Drop-When:`` probe finds a fix that upstream wrote in other words;
it is asked about the release as upstream made it, and counts only if the old release answers
otherwise. The content finds the fix taken as it is: a hunk whose lines stand in the file as the patch
would leave them (reverse application), or whose change upstream made between the two releases in
the same function, white space apart (what ``git patch-id`` compares, hunk by hunk: an sdist has no
commits to compare).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from builder import placement
from builder.classify import Kind, kind_of
from builder.diff import FileChange, Hunk
from builder.errors import MisplacedHunkError, PatchConflictError
from builder.merging import Block, blocks, scope_of
from builder.objects import Objects, Tree
from builder.patchfile import Patch

PROBE = re.compile(
    r'path (?P<path>\S+) (?:contains "(?P<text>.+)"|lacks "(?P<absent>.+)"|exists|missing)'
    r"|never \[\S.*\]"
)


class Extent(StrEnum):
    """How much of a patch upstream has."""

    FULL = "full"
    PARTIAL = "partial"
    NONE = "none"


@dataclass(frozen=True)
class Verdict:
    """What upstream has of a patch.

    :param there: the hunks that upstream has, as ``path, hunk N``.
    :param missing: the others.
    """

    extent: Extent
    reason: str
    there: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def probe_holds(probe: str, read: Callable[[str], bytes | None]) -> bool | None:
    """Ask a ``Drop-When:`` probe about a tree; None where it cannot be asked.

    A text that a file lacks because the whole file is gone proves nothing: the code may stand
    elsewhere now.
    """
    match = PROBE.fullmatch(probe)
    if match is None or match["path"] is None:
        return None
    data = read(match["path"])
    verb = probe.split(" ")[2]
    if verb in ("exists", "missing"):
        return (data is not None) == (verb == "exists")
    if data is None:
        return None
    text = (match["text"] or match["absent"]).encode()
    return (text in data) == (verb == "contains")


def judge(patch: Patch, old: str, new: str, tree: Tree, placed: Collection[str] = ()) -> Verdict:
    """Tell what upstream has of ``patch``, made on the release ``old``, in the release ``new``.

    :param tree: the new release with the patches before this one.
    :param placed: files on which every hunk is known to apply: they are not there in reverse.
    """
    said = _probe_verdict(patch, tree.objects, old, new)
    if said.extent is Extent.FULL:
        return said
    there, missing = [], []
    for change in patch.changes:
        made = _Upstream(change.path, tree.objects, old, new)
        mine, theirs = _content(change, made, tree, is_placed=change.path in placed)
        there += mine
        missing += theirs
    if not there:
        return replace(said, missing=tuple(missing))
    extent, reason = Extent.PARTIAL, (
        f"upstream has {len(there)} of its {len(there) + len(missing)} hunks: {'; '.join(there)}"
    )  # fmt: skip
    if not missing:
        extent, reason = Extent.FULL, "upstream has every hunk of it"
    elif not any(_ships(unit) for unit in missing) and any(_ships(unit) for unit in there):
        extent = Extent.FULL
        reason = "upstream has every hunk that ships; not in upstream: " + "; ".join(missing)
    return Verdict(extent, reason, tuple(there), tuple(missing))


def _ships(unit: str) -> bool:
    return kind_of(unit.rpartition(", ")[0]) is not Kind.NEVER


def _probe_verdict(patch: Patch, objects: Objects, old: str, new: str) -> Verdict:
    probe = patch.trailer("Drop-When")
    if probe is None:
        return Verdict(Extent.NONE, "it has no Drop-When: probe")
    if probe.startswith("never "):
        return Verdict(Extent.NONE, f"Drop-When: {probe}")
    before = probe_holds(probe, lambda path: objects.read(f"{old}:{path}"))
    now = probe_holds(probe, lambda path: objects.read(f"{new}:{path}"))
    if now is None:
        match = PROBE.fullmatch(probe)
        gone = f"{match['path']} is gone" if match else "it is no probe"
        return Verdict(Extent.NONE, f"the probe cannot be asked: {gone} ({probe})")
    if now and before:
        return Verdict(
            Extent.NONE, f"the probe held on the old release too, it proves nothing ({probe})"
        )
    if now:
        return Verdict(Extent.FULL, f"its probe holds: {probe}")
    return Verdict(Extent.NONE, f"its probe does not hold: {probe}")


def _content(
    change: FileChange, made: _Upstream, tree: Tree, *, is_placed: bool
) -> tuple[list[str], list[str]]:
    """Return the units (hunks; the file where it comes or goes) that are there, and the others."""
    current = tree.read(change.path)
    whole = [f"{change.path}, the file"]
    if change.old_path is None:
        post = "".join(line for hunk in change.hunks for line in hunk.postimage)
        is_there = current == post.encode("utf-8", "surrogateescape")
        return (whole, []) if is_there else ([], whole)
    if change.new_path is None:
        return (whole, []) if current is None else ([], whole)
    if not change.hunks:  # it is only renamed
        is_there = current is not None and tree.read(change.old_path) is None
        return (whole, []) if is_there else ([], whole)
    names = [f"{change.path}, hunk {hunk.number}" for hunk in change.hunks]
    if current is None:
        return [], names
    before = tree.objects.read_id(change.old_blob)
    after = tree.objects.read_id(change.new_blob)
    there: list[str] = []
    missing: list[str] = []
    for name, hunk in zip(names, change.hunks, strict=True):
        found = made.has(hunk, after) or (
            not is_placed
            and not _places(change, hunk, current, before)
            and _places(_reversed(change), _reversed_hunk(hunk), current, after)
        )
        (there if found else missing).append(name)
    return there, missing


def _places(change: FileChange, hunk: Hunk, current: bytes, before: bytes | None) -> bool:
    try:
        placement.place(
            "", replace(change, hunks=(hunk,)), current, before, same_blob=current == before
        )
    except (PatchConflictError, MisplacedHunkError):
        return False
    return True


def _reversed(change: FileChange) -> FileChange:
    return replace(
        change,
        old_path=change.new_path,
        new_path=change.old_path,
        old_blob=change.new_blob,
        new_blob=change.old_blob,
    )


def _reversed_hunk(hunk: Hunk) -> Hunk:
    swap = {" ": " ", "-": "+", "+": "-"}
    return replace(
        hunk,
        old_start=hunk.new_start,
        old_length=len(hunk.postimage),
        new_start=hunk.old_start,
        lines=tuple(swap[line[0]] + line[1:] for line in hunk.lines),
    )


class _Upstream:
    """What upstream itself changed in one file between the two releases."""

    def __init__(self, path: str, objects: Objects, old: str, new: str) -> None:
        self._path = path
        self._objects = objects
        self._before = objects.read(f"{old}:{path}")
        self._after = objects.read(f"{new}:{path}")

    def has(self, hunk: Hunk, after: bytes | None) -> bool:
        """Tell whether upstream made each change of the hunk, in the function the hunk means."""
        if after is None or self._before is None or self._after in (None, self._before):
            return False
        # A blank line or a lone bracket comes and goes for many reasons.
        telling = [block for block in _hunk_blocks(hunk) if len("".join(_text(block))) >= 8]
        if not telling or not all(self._may_have(*_text(block)) for block in telling):
            return False
        lines = placement.split_lines(after)
        return all(
            any(
                self._scope(self._lines, theirs) == self._scope(lines, block)
                for theirs in self._changes.get(_text(block), ())
            )
            for block in telling
        )

    def _may_have(self, removed: str, added: str) -> bool:
        """Rule out most blocks without a git process, which takes longer than all the rest."""
        return removed in self._texts[0] and added in self._texts[1]

    @cached_property
    def _texts(self) -> tuple[str, str]:
        """Both releases' files, without white space."""
        before, after = (
            "".join((data or b"").decode("utf-8", "surrogateescape").split())
            for data in (self._before, self._after)
        )
        return before, after

    @cached_property
    def _lines(self) -> list[str]:
        return placement.split_lines(self._after or b"")

    @cached_property
    def _changes(self) -> dict[tuple[str, str], list[Block]]:
        found: dict[tuple[str, str], list[Block]] = {}
        for block in blocks(self._objects, self._before or b"", self._after or b""):
            found.setdefault(_text(block), []).append(block)
        return found

    def _scope(self, lines: list[str], block: Block) -> str:
        return scope_of(self._path, lines, min(block.new_line, max(len(lines) - 1, 0)))


def _text(block: Block) -> tuple[str, str]:
    """Return what goes and what comes, without white space: what patch-id compares."""
    removed, added = ("".join("".join(text).split()) for text in (block.removed, block.added))
    return removed, added


def _hunk_blocks(hunk: Hunk) -> list[Block]:
    """Cut a hunk into its changes; ``new_line`` counts in the post-image of the file."""
    found: list[Block] = []
    removed: list[str] = []
    added: list[str] = []
    line = hunk.new_start - 1
    for text in (*hunk.lines, " "):
        if text[0] == "-":
            removed.append(text[1:])
        elif text[0] == "+":
            added.append(text[1:])
        else:
            if removed or added:
                found.append(Block(0, line, tuple(removed), tuple(added)))
            line += len(added) + 1
            removed, added = [], []
    return found
