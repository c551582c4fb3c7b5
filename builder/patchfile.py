"""One patch file: what it changes, what it says, and whether it is a patch this tool takes.

The form is that of ``git format-patch``. git itself reads the mail part (mailsplit, mailinfo,
interpret-trailers), unidiff the diff.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from builder import atomic
from builder.errors import PatchFormatError
from builder.repository import Git

NULL_BLOB = "0" * 40
EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
# What git mailinfo prints, and the mail header that it comes from.
_HEADERS = {"Author": "From", "Email": "From", "Date": "Date", "Subject": "Subject"}


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


@dataclass(frozen=True)
class Patch:
    """A parsed patch file."""

    file: Path
    sha256: str
    subject: str
    author: str
    date: str
    body: str
    trailers: tuple[tuple[str, str], ...]
    changes: tuple[FileChange, ...]

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def size(self) -> int:
        return self.file.stat().st_size

    def trailer(self, key: str) -> str | None:
        return next((value for name, value in self.trailers if name == key), None)


def _refused(file: Path, what: str, next_step: str) -> PatchFormatError:
    return PatchFormatError(what, where=file.name, next_step=next_step)


RESTORE_IT = "restore the file from version control, or export it again"
EXPORT_IT = (
    "take it out of the series, make its change a commit in the work tree of `python -m builder "
    "edit`, then `python -m builder export`"
)


def read_patch(file: Path, scratch: Path) -> Patch:
    """Read and check one patch file.

    :param scratch: an existing folder for git's temporary files.
    :raises PatchFormatError: it is empty, truncated, converted, binary, or touches what no patch
        may touch.
    """
    raw = file.read_bytes()
    text = _checked_text(file, raw)
    with atomic.scratch_folder(scratch) as folder:
        git = Git(folder)
        count = git.run("mailsplit", "--keep-cr", f"-o{folder}", "--", str(file)).decode().strip()
        if count != "1":
            line = _second_from_line(text)
            raise _refused(
                file,
                f"line {line} begins with 'From ' and a date: git takes it for the next mail and "
                "would cut the patch there",
                f"indent or reword line {line}",
            )
        header = git.run(
            # -k keeps the subject's [tags]; no scissors line cuts the message
            "mailinfo", "-k", "--no-scissors", "--encoding=UTF-8", "message", "diff", stdin=raw,
        ).decode()  # fmt: skip
        fields = dict(line.split(": ", 1) for line in header.split("\n") if ": " in line)
        for field, name in _HEADERS.items():
            if not fields.get(field):  # without a date, am would take today's
                raise _refused(file, f"it has no {name}: header", EXPORT_IT)
        body = (folder / "message").read_bytes().decode()
        message = f"{fields.get('Subject', '')}\n\n{body}"
        parsed = git.run("interpret-trailers", "--parse", "--no-divider", stdin=message.encode())
    return Patch(
        file=file,
        sha256=hashlib.sha256(raw).hexdigest(),
        subject=fields.get("Subject", ""),
        author=f"{fields.get('Author', '')} <{fields.get('Email', '')}>",
        date=fields.get("Date", ""),
        body=body.strip(),
        trailers=tuple(
            (key, value.strip())
            for key, _, value in (
                line.partition(":") for line in parsed.decode().splitlines() if ":" in line
            )
        ),
        changes=_changes(file, text),
    )


def _checked_text(file: Path, raw: bytes) -> str:
    if not raw.strip():
        raise _refused(file, "the patch is empty", "remove it from the series, or restore it")
    header = raw.partition(b"\n\n")[0] if b"\n\n" in raw else raw
    if b"\r\n" in header[:2000]:
        raise _refused(
            file,
            "the file was converted to CRLF line ends",
            "restore it from version control and keep `patches/** -text` in .gitattributes",
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise _refused(file, f"line {line} is not UTF-8", "save the file as UTF-8") from error
    if not re.match(r"From [0-9a-f]{40} ", text):
        raise _refused(file, "it does not begin like `git format-patch` output", EXPORT_IT)
    if not text.endswith("\n"):
        raise _refused(file, "it ends in the middle of a line: truncated", RESTORE_IT)
    if "\ndiff --git " not in text:
        raise _refused(file, "it holds no diff: truncated, or an empty commit", EXPORT_IT)
    diff = text[text.index("\ndiff --git ") :]
    if re.search(r"^(GIT binary patch|Binary files .* differ)$", diff, re.MULTILINE):
        raise _refused(file, "it changes a binary file", "generate the file at build or run time")
    if found := re.search(r"^(?:old|new) mode \d+$", diff, re.MULTILINE):
        raise _refused(
            file,
            f"it changes a file's mode ({found[0]})",
            "leave upstream's modes alone; a new file may be 100755",
        )
    if found := re.search(
        r"^(?:(?:new|deleted) file mode|index [0-9a-f]+\.\.[0-9a-f]+) (?!100644$|100755$)(\d+)$",
        diff,
        re.MULTILINE,
    ):
        raise _refused(
            file,
            f"it adds, changes or deletes a link or a submodule (mode {found[1]})",
            "leave links alone; a new file has to be a regular file",
        )
    if found := re.search(r"^copy from (.+)$", diff, re.MULTILINE):
        raise _refused(file, f"it copies a file ({found[1]}) instead of adding one", EXPORT_IT)
    return text


def _second_from_line(text: str) -> int:
    for number, line in enumerate(text.splitlines(), start=1):
        if number > 1 and re.match(r"From \S+.*\d\d?:\d\d", line):
            return number
    return 0


def _changes(file: Path, text: str) -> tuple[FileChange, ...]:
    from unidiff.errors import UnidiffParseError  # noqa: PLC0415
    from unidiff.patch import PatchSet  # noqa: PLC0415 - slow to import

    diff = text[text.index("\ndiff --git ") + 1 :]
    try:
        parsed = PatchSet(diff)
    except UnidiffParseError as error:
        raise _refused(
            file,
            f"the diff is damaged or truncated: {error}",
            RESTORE_IT,
        ) from error
    sections = re.split(r"^(?=diff --git )", diff, flags=re.MULTILINE)[1:]
    if len(sections) != len(parsed):
        raise _refused(file, "the diff is damaged or truncated", RESTORE_IT)
    changes = []
    for section, item in zip(sections, parsed, strict=True):
        head = section.partition("\n@@ ")[0]
        index = re.search(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)", head, re.MULTILINE)
        mode = re.search(r"^(?:new file mode|index [0-9a-f.]+) (\d{6})$", head, re.MULTILINE)
        old = _path(file, item.source_file, "a/")
        new = _path(file, item.target_file, "b/")
        if "\nnew file mode" in head:
            old = None
        if "\ndeleted file mode" in head:
            new = None
        if old is None and new is None:
            raise _refused(file, "a change without a path: damaged", RESTORE_IT)
        old_blob, new_blob = (index[1], index[2]) if index else ("", "")
        if not item and not _needs_no_hunk(old, new, old_blob, new_blob):
            raise _refused(file, f"the change of {new or old} has no hunks: truncated", RESTORE_IT)
        changes.append(
            FileChange(
                old_path=old,
                new_path=new,
                old_blob=old_blob,
                new_blob=new_blob,
                mode=mode[1] if mode else "100644",
                hunks=tuple(
                    Hunk(
                        number=number,
                        old_start=hunk.source_start,
                        old_length=hunk.source_length,
                        new_start=hunk.target_start,
                        heading=hunk.section_header,
                        lines=_hunk_lines(hunk),
                    )
                    for number, hunk in enumerate(item, start=1)
                ),
            )
        )
    return tuple(changes)


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
        raise _refused(file, f"the path {path!r} does not begin with {prefix}", EXPORT_IT)
    path = path.removeprefix(prefix)
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts:
        raise _refused(file, f"it touches {path!r}, outside the tree", "remove that change")
    if any(part.lower() == ".git" for part in parts):
        raise _refused(file, f"it touches {path!r}: git's own files", "remove that change")
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
