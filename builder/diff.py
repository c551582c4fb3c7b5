"""The diff of a patch file: each file's change, its paths, its hunks, and nothing left over.

The heads are read here as git reads them, the hunks by unidiff; ``apply`` compares the commit that
git makes with what was read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from builder.errors import PatchFormatError

NULL_BLOB = "0" * 40
EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


@dataclass(frozen=True)
class Hunk:
    """One hunk; ``lines`` keep their first character (space, ``-``, ``+``) and their line end."""

    number: int
    old_start: int
    old_length: int
    new_start: int
    heading: str
    lines: tuple[str, ...]

    @property
    def preimage(self) -> tuple[str, ...]:
        return tuple(line[1:] for line in self.lines if line[0] in " -")

    @property
    def postimage(self) -> tuple[str, ...]:
        return tuple(line[1:] for line in self.lines if line[0] in " +")

    @property
    def touched(self) -> tuple[int, ...]:
        """Return the offsets in the pre-image of the lines that go, and of those beside new ones.

        A line that is only inserted belongs to what stands before it or to what stands behind it.
        """
        offsets: set[int] = set()
        offset = 0
        for line in self.lines:
            if line[0] == "+":
                offsets |= {offset - 1, offset}
                continue
            if line[0] == "-":
                offsets.add(offset)
            offset += 1
        return tuple(sorted(n for n in offsets if 0 <= n < offset))


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file. ``old_path`` is None for a new file, ``new_path`` for a
    deleted one; both differ in a rename. Blob ids are those of the index line.
    """

    old_path: str | None
    new_path: str | None
    old_blob: str
    new_blob: str
    mode: str
    hunks: tuple[Hunk, ...]

    @property
    def path(self) -> str:
        path = self.new_path or self.old_path
        assert path is not None  # noqa: S101 - a change without any path is refused on reading
        return path

    @property
    def added(self) -> int:
        return sum(line[0] == "+" for hunk in self.hunks for line in hunk.lines)

    @property
    def removed(self) -> int:
        return sum(line[0] == "-" for hunk in self.hunks for line in hunk.lines)


def refused(file: Path, what: str, next_step: str) -> PatchFormatError:
    return PatchFormatError(what, where=file.name, next_step=next_step)


RESTORE_IT = "restore the file from version control, or export it again"
EXPORT_IT = (
    "take it out of the series, make its change a commit in the work tree of `python -m builder "
    "edit`, then `python -m builder export`"
)


# All that git writes between a file's `diff --git` line and its first hunk, and is taken here.
_HEAD_LINE = re.compile(
    r"diff --git .|index [0-9a-f]+\.\.|(?:new|deleted) file mode \d|(?:dis)?similarity index \d"
    r"|rename (?:from|to) .|--- .|\+\+\+ ."
)
_SIGNATURE = re.compile(r"^-- \n\d[^\n]*\n\n?\Z", re.MULTILINE)


def read_diff(file: Path, diff: str) -> tuple[FileChange, ...]:
    """Read a diff that begins with ``diff --git``.

    :param file: the patch file, for the errors.
    :raises PatchFormatError: it is damaged, or says something that git would leave out.
    """
    end = _SIGNATURE.search(diff)
    changes = []
    for section in re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE)[1:]:
        head, at, body = section.partition("\n@@ ")
        index = re.search(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)", head, re.MULTILINE)
        mode = re.search(r"^(?:new file mode|index [0-9a-f.]+) (\d{6})$", head, re.MULTILINE)
        old, new = _paths(file, head if at else _without_end(head, end))
        if "\nnew file mode" in head:
            old = None
        if "\ndeleted file mode" in head:
            new = None
        if old is None and new is None:
            raise refused(file, "a change without a path: damaged", RESTORE_IT)
        old_blob, new_blob = (index[1], index[2]) if index else ("", "")
        if not at and not _needs_no_hunk(old, new, old_blob, new_blob):
            raise refused(file, f"the change of {new or old} has no hunks: truncated", RESTORE_IT)
        change = FileChange(
            old_path=old,
            new_path=new,
            old_blob=old_blob,
            new_blob=new_blob,
            mode=mode[1] if mode else "100644",
            hunks=_hunks(file, f"@@ {_without_end(body, end)}") if at else (),
        )
        _require_context(file, change)
        changes.append(change)
    return tuple(changes)


def _without_end(text: str, end: re.Match[str] | None) -> str:
    """Return a section without the mail signature that older exports and plain git put behind."""
    return text.removesuffix(end[0]) if end else text


def _paths(file: Path, head: str) -> tuple[str | None, str | None]:
    """Return the old and the new path of a file's change, read as git reads them."""
    lines = [line for line in head.split("\n") if line]
    if odd := next((line for line in lines if not _HEAD_LINE.match(line)), None):
        raise refused(file, f"the diff is damaged: {odd!r} in the head of a file", RESTORE_IT)
    named = {
        key: [line.removeprefix(key) for line in lines if line.startswith(key)]
        for key in ("--- ", "+++ ", "rename from ", "rename to ")
    }
    if any(len(names) > 1 for names in named.values()):
        raise refused(file, f"the diff is damaged: {lines[0]!r} names two files", RESTORE_IT)
    if named["--- "] and named["+++ "]:
        # a name with a space has a tab behind it
        old, new = (named[key][0].removesuffix("\t") for key in ("--- ", "+++ "))
        first = new.replace("b/", "a/", 1) if old == "/dev/null" else old
        second = old.replace("a/", "b/", 1) if new == "/dev/null" else new
        paths = _path(file, old, "a/"), _path(file, new, "b/")
        if lines[0] != f"diff --git {first} {second}" or (
            None not in paths and paths[0] != paths[1] and not named["rename to "]
        ):
            raise refused(file, f"the diff is damaged: {lines[0]!r} is of other files", RESTORE_IT)
        return paths
    if named["rename from "] and named["rename to "]:
        source, target = (_unquoted(named[key][0]) for key in ("rename from ", "rename to "))
        return _path(file, f"a/{source}", "a/"), _path(file, f"b/{target}", "b/")
    # No hunk and no rename: the line names one file twice, so it is cut in the middle.
    names = lines[0].removeprefix("diff --git ")
    middle = len(names) // 2
    paths = _path(file, names[:middle], "a/"), _path(file, names[middle + 1 :], "b/")
    if paths[0] != paths[1]:
        raise refused(file, f"the diff is damaged or truncated: {lines[0]!r}", RESTORE_IT)
    return paths


def _hunks(file: Path, body: str) -> tuple[Hunk, ...]:
    from unidiff.errors import UnidiffParseError  # noqa: PLC0415
    from unidiff.patch import PatchSet  # noqa: PLC0415 - slow to import

    try:
        (item,) = PatchSet(f"--- a\n+++ b\n{body}")
    except (UnidiffParseError, ValueError) as error:
        raise refused(file, f"the diff is damaged or truncated: {error}", RESTORE_IT) from error
    lines = body.split("\n")
    position = 0
    for hunk in item:
        if lines[position].startswith("@@ "):
            position += 1 + sum(line.line_type != "" for line in hunk)
    if odd := next((line for line in lines[position:] if line), None):
        raise refused(
            file,
            f"{odd!r} stands behind a hunk that is over: git would leave it out without a word",
            RESTORE_IT,
        )
    return tuple(
        Hunk(
            number=number,
            old_start=hunk.source_start,
            old_length=hunk.source_length,
            new_start=hunk.target_start,
            heading=hunk.section_header,
            lines=_hunk_lines(hunk),
        )
        for number, hunk in enumerate(item, start=1)
    )


def _require_context(file: Path, change: FileChange) -> None:
    """Refuse a hunk of ``-U0``: only its line number says where it belongs, and git takes none."""
    for hunk in change.hunks:
        if hunk.lines[0][0] == " " or change.old_path is None:
            continue
        in_an_empty_file = hunk.old_start == 0 and EMPTY_BLOB.startswith(change.old_blob)
        if hunk.old_start > 1 or not (hunk.old_length or in_an_empty_file):
            raise refused(
                file,
                f"hunk {hunk.number} of {change.path} shows no line above its change (-U0): "
                "nothing tells where it belongs",
                EXPORT_IT,
            )


def _needs_no_hunk(old: str | None, new: str | None, old_blob: str, new_blob: str) -> bool:
    """Tell an empty file that comes or goes, or a mere rename, from a change that was cut off."""
    if old is None or new is None:
        blob = new_blob if old is None else old_blob
        return bool(blob) and EMPTY_BLOB.startswith(blob)
    return old != new and not new_blob


def _path(file: Path, name: str, prefix: str) -> str | None:
    if name == "/dev/null":
        return None
    path = _unquoted(name)
    if not path.startswith(prefix):
        raise refused(file, f"the path {path!r} does not begin with {prefix}", EXPORT_IT)
    path = path.removeprefix(prefix)
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts:
        raise refused(file, f"it touches {path!r}, outside the tree", "remove that change")
    if any(part.lower() == ".git" for part in parts):
        raise refused(file, f"it touches {path!r}: git's own files", "remove that change")
    return path


def _unquoted(path: str) -> str:
    """Return the path that git writes in C's quotes where it is not plain ASCII."""
    if not (path.startswith('"') and path.endswith('"')):
        return path
    names = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13}

    def character(match: re.Match[bytes]) -> bytes:
        code = match[1]
        if code.isdigit():
            return bytes([int(code, 8) & 0xFF])
        return bytes([names[code]]) if code in names else code

    raw = re.sub(rb"\\([0-7]{3}|.)", character, path[1:-1].encode())
    return raw.decode("utf-8", "surrogateescape")


def _hunk_lines(hunk: object) -> tuple[str, ...]:
    lines: list[str] = []
    for line in hunk:  # type: ignore[attr-defined]
        if line.line_type == "\\":  # "\ No newline at end of file" belongs to the line before
            lines[-1] = lines[-1].removesuffix("\n")
        elif line.line_type:  # none: a blank line between this file's change and the next
            lines.append(f"{line.line_type}{line.value}")
    return tuple(lines)
