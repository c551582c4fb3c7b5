"""A 3-way merge that is not trusted alone: every change has to stand where the patch meant it.

git's merge aligns lines, not meanings. Where upstream rewrote the function that a patch changes and
like lines stand in another one, it edits that one and reports success; where upstream took half of
a change, it adds the other half. So after a merge the difference that it made is compared, change by
change, with the difference that the patch makes: the same lines, in the same functions or classes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from builder import branches, placement, scope
from builder.objects import Objects
from builder.repository import GitError

_U0 = re.compile(rb"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
CONFLICT = re.compile(r"<{7} .*?^>{7} [^\n]*\n?", re.MULTILINE | re.DOTALL)
# What names a part of a file where there are no functions.
_SECTION = {
    ".md": re.compile(r"#+ .*"),
    ".toml": re.compile(r"\[.*\]"),
    ".cfg": re.compile(r"\[.*\]"),
    ".ini": re.compile(r"\[.*\]"),
}


@dataclass(frozen=True)
class Block:
    """Lines that follow each other and are replaced by others; line numbers count from 0."""

    old_line: int
    new_line: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Merge:
    """What git's merge of one file gives; with conflicts, ``text`` holds them in diff3's form."""

    text: bytes
    conflicts: tuple[str, ...]


@dataclass(frozen=True)
class Landing:
    """Where one change of a patch stands in the merged file (``line`` counts from 1)."""

    line: int
    offset: int
    scope: str
    around: str


def merge(
    objects: Objects, base: bytes, ours: bytes, theirs: bytes, labels: tuple[str, str, str]
) -> Merge | None:
    """Merge the change ``base -> theirs`` into ``ours``; None where git takes it for binary.

    :param labels: how the conflict markers call ours, base and theirs.
    """
    folder = objects.scratch.folder
    for name, data in (("ours", ours), ("base", base), ("theirs", theirs)):
        (folder / name).write_bytes(data)
    named = [part for label in labels for part in ("-L", label)]
    # myers, as the patches were made: no rule of the user's or of another git version
    result = objects.scratch.attempt(
        "merge-file", "--stdout", "--diff3", *named, "ours", "base", "theirs"
    )
    if result.returncode > 127:
        return None
    found: tuple[str, ...] = ()
    if result.returncode:
        found = tuple(CONFLICT.findall(result.stdout.decode("utf-8", "surrogateescape")))
    return Merge(result.stdout, found)


def blocks(objects: Objects, old: bytes, new: bytes) -> list[Block]:
    """Return what differs, as git aligns it."""
    folder = objects.scratch.folder
    (folder / "old").write_bytes(old)
    (folder / "new").write_bytes(new)
    result = objects.scratch.attempt(
        "diff", "--no-index", "--unified=0", "--no-color", "--no-ext-diff", "--text",
        "--diff-algorithm=myers", "--", "old", "new",
    )  # fmt: skip
    if result.returncode > 1:
        raise GitError(
            "git diff failed",
            where=str(folder),
            details=tuple(result.stderr.decode(errors="replace").splitlines()[:5]),
            next_step="free some space and run the command again",
        )
    before, after = placement.split_lines(old), placement.split_lines(new)
    found = []
    for match in _U0.finditer(result.stdout):
        start, size, new_start, new_size = (1 if n is None else int(n) for n in match.groups())
        first, new_first = start - bool(size), new_start - bool(new_size)
        found.append(
            Block(
                first,
                new_first,
                tuple(before[first : first + size]),
                tuple(after[new_first : new_first + new_size]),
            )
        )
    return found


def scope_of(path: str, lines: Sequence[str], line: int) -> str:
    """Return the function, class or section around ``line`` (from 0), "" where there is none."""
    section = next((rule for end, rule in _SECTION.items() if path.endswith(end)), None)
    if section is None:
        return scope.scope_at(path, lines, line)
    above = reversed(lines[: line + 1])
    return next((text.strip() for text in above if section.match(text)), "")


def around(files: branches.Compared, line: int, new_line: int) -> str:
    """Say whether upstream changed a function around a line: "" where it did not.

    A function that upstream changed, or split in two, may not do any more what the patch relies on,
    though the lines of the hunk are all there. So may one that another one holds.
    """
    functions = (
        scope.functions_at(files.path, lines, at)
        for lines, at in ((files.before, line), (files.now, new_line))
    )
    for meant, found in zip(*functions, strict=False):
        old, new = (
            [text.strip() for text in lines[item.first - 1 : item.last] if text.strip()]
            for lines, item in ((files.before, meant), (files.now, found))
        )
        if old != new:
            gone = len([text for text in old if text not in new])
            come = len([text for text in new if text not in old])
            moved = files.strayed(line, new_line)
            branch = f"; {moved}" if moved else ""
            return f"upstream changed {found.name} around it (+{come} -{gone} lines){branch}"
    return ""


def is_written_anew(before: Sequence[str], now: Sequence[str]) -> str:
    """Say how little of a file is left, where it is less than half: it may be another file now."""
    old, new = (Counter(text.strip() for text in lines if text.strip()) for lines in (before, now))
    kept, size = (old & new).total(), old.total()
    return f"{kept} of its {size} lines are left" if 2 * kept < size else ""


def verify(
    objects: Objects, path: str, base: bytes, theirs: bytes, ours: bytes, result: bytes
) -> tuple[list[str], list[Landing]]:
    """Compare what the merge changed with what the patch meant to change.

    Returns the faults, a line each, and where each change landed. No faults means: the same changes
    in the same order, each in the function, class or section that the patch changes, and in no other
    branch of a function that still has the one that the patch means.
    """
    meant, made = blocks(objects, base, theirs), blocks(objects, ours, result)
    before, after = placement.split_lines(base), placement.split_lines(theirs)
    current, merged = placement.split_lines(ours), placement.split_lines(result)
    if [(b.removed, b.added) for b in meant] != [(b.removed, b.added) for b in made]:
        return [_other_change(meant, made)], []
    untouched = branches.Compared(path, before, current)
    patched = branches.Compared(path, after, merged)
    faults = []
    landings = []
    for want, got in zip(meant, made, strict=True):
        places = [
            (files, first + n, second + n)
            for files, first, second, lines in (
                (untouched, want.old_line, got.old_line, want.removed),
                (patched, want.new_line, got.new_line, want.added),
            )
            for n, text in enumerate(lines)
            if text.strip()
        ]
        pairs = [
            (scope_of(path, files.before, at), scope_of(path, files.now, to))
            for files, at, to in places
        ]
        differ = next(((a, b) for a, b in pairs if a != b), None)
        moved = None if differ else _branch_left(places)
        if differ:
            faults.append(
                f"line {got.new_line + 1}: the change belongs to {differ[0] or 'the top level'}, the "
                f"merge put it into {differ[1] or 'the top level'}"
            )
        elif moved:
            faults.append(f"line {got.new_line + 1}: the change is in another branch: {moved}")
        elif (copies := _copies(want, got, before, current)) > 1:
            faults.append(
                f"line {got.new_line + 1}: the lines around the change stand there {copies} times, "
                "and nothing tells which the patch means"
            )
        landings.append(
            Landing(
                line=got.new_line + 1,
                offset=got.old_line - want.old_line,
                scope=next((b for _, b in pairs if b), ""),
                around=around(untouched, want.old_line, got.old_line),
            )
        )
    return faults, landings


def _branch_left(
    places: Sequence[tuple[branches.Compared, int, int]],
) -> branches.Strayed | None:
    """Return the first place that is in another branch than it was, while that one is there."""
    strayed = (files.strayed(line, new_line) for files, line, new_line in places)
    return next((found for found in strayed if found and found.is_left), None)


def _other_change(meant: list[Block], made: list[Block]) -> str:
    """Say which change of the patch the merge did not make."""
    wanted = [(b.removed, b.added) for b in meant]
    got = [(b.removed, b.added) for b in made]
    missing = [pair for pair in wanted if pair not in got]
    if not missing:
        return "the merge made other changes than the patch"
    removed, added = missing[0]
    line = next((text.strip() for text in (*added, *removed) if text.strip()), "a blank line")
    return (
        f"the merge made {len(wanted) - len(missing)} of the {len(wanted)} changes of the patch; "
        f"not this one: {line}"
    )


def _copies(want: Block, got: Block, before: Sequence[str], current: Sequence[str]) -> int:
    """Count where the change could stand as well, if it stands at no unique place.

    Its own lines with one neighbour on each side are looked for in the pre-image; where they are
    unique there, the file of the new release must not hold them more than once.
    """
    size = len(want.removed)

    def window(lines: Sequence[str], line: int) -> list[str]:
        return list(lines[max(line - 2, 0) : line + size + 2])

    def count(lines: Sequence[str], text: list[str]) -> int:
        return sum(
            list(lines[n : n + len(text)]) == text for n in range(len(lines) - len(text) + 1)
        )

    there = window(current, got.old_line)
    if there != window(before, want.old_line) or count(before, there) != 1:
        return 1
    return count(current, there)


def line_ends(data: bytes) -> str:
    """Return "crlf", "lf", or "" for a file that mixes them or has none."""
    returns, feeds = data.count(b"\r\n"), data.count(b"\n")
    if not feeds or returns not in (0, feeds):
        return ""
    return "crlf" if returns else "lf"


def with_line_ends(data: bytes, kind: str) -> bytes:
    """Return the text with that kind of line ends; other carriage returns stay."""
    plain = data.replace(b"\r\n", b"\n")
    return plain.replace(b"\n", b"\r\n") if kind == "crlf" else plain
