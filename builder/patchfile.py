"""One patch file: what it changes, what it says, and whether it is a patch this tool takes.

The form is that of ``git format-patch``. git itself reads the mail part (mailsplit, mailinfo,
interpret-trailers), ``diff`` what the patch changes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from builder import atomic
from builder.diff import EXPORT_IT, RESTORE_IT, FileChange, read_diff, refused
from builder.repository import Git

# What git mailinfo prints, and the mail header that it comes from.
_HEADERS = {"Author": "From", "Email": "From", "Date": "Date", "Subject": "Subject"}


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
            raise refused(
                file,
                f"line {line} begins with 'From ' and a date: git takes it for the next mail and "
                "would cut the patch there",
                f"indent or reword line {line}",
            )
        read = git.attempt(
            # -k keeps the subject's [tags]; no scissors line cuts the message
            "mailinfo", "-k", "--no-scissors", "--encoding=UTF-8", "message", "diff", stdin=raw,
        )  # fmt: skip
        if read.returncode:
            said = " ".join(read.stderr.decode(errors="replace").split())
            raise refused(file, f"git cannot read it as a mail: {said}", EXPORT_IT)
        applied = (folder / "diff").read_bytes()
        if not (applied and raw.endswith(applied)):  # what is reviewed has to be what git applies
            if applied in raw and atomic.is_nearly_full(folder, 2 * len(raw)):
                raise atomic.disk_full_error(folder)  # mailinfo cuts the file and says nothing
            raise refused(
                file,
                "its text is not what git would apply: the mail is encoded (base64, "
                "quoted-printable) or in parts",
                EXPORT_IT,
            )
        header = read.stdout.decode()
        fields = dict(line.split(": ", 1) for line in header.split("\n") if ": " in line)
        for field, name in _HEADERS.items():
            if not fields.get(field):  # without a date, am would take today's
                raise refused(file, f"it has no {name}: header", EXPORT_IT)
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
        changes=read_diff(file, _checked_diff(file, applied.decode())),
    )


def _checked_text(file: Path, raw: bytes) -> str:
    if not raw.strip():
        raise refused(file, "the patch is empty", "remove it from the series, or restore it")
    header = raw.partition(b"\n\n")[0] if b"\n\n" in raw else raw
    if b"\r\n" in header[:2000]:
        raise refused(
            file,
            "the file was converted to CRLF line ends",
            "restore it from version control and keep `patches/** -text` in .gitattributes",
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise refused(file, f"line {line} is not UTF-8", "save the file as UTF-8") from error
    if not re.match(r"From [0-9a-f]{40} ", text):
        raise refused(file, "it does not begin like `git format-patch` output", EXPORT_IT)
    if not text.endswith("\n"):
        raise refused(file, "it ends in the middle of a line: truncated", RESTORE_IT)
    if "\ndiff --git " not in text:
        raise refused(file, "it holds no diff: truncated, or an empty commit", EXPORT_IT)
    return text


def _checked_diff(file: Path, applied: str) -> str:
    """Return the diff from its first file on, out of what git mailinfo leaves for git apply."""
    start = re.search(r"^diff --git ", applied, re.MULTILINE)
    above, diff = (applied[: start.start()], applied[start.start() :]) if start else (applied, "")
    if found := re.search(r"^(--- \S.*|\+\+\+ \S.*|@@ -.*)$", above, re.MULTILINE):
        raise refused(
            file,
            f"a change without a 'diff --git' line stands above the others ({found[1]!r}): git "
            "applies it, and no review of the files that the patch names shows it",
            EXPORT_IT,
        )
    if not diff:
        raise refused(file, "it holds no diff: truncated, or an empty commit", EXPORT_IT)
    if re.search(r"^(GIT binary patch|Binary files .* differ)$", diff, re.MULTILINE):
        raise refused(file, "it changes a binary file", "generate the file at build or run time")
    if found := re.search(r"^(?:old|new) mode \d+$", diff, re.MULTILINE):
        raise refused(
            file,
            f"it changes a file's mode ({found[0]})",
            "leave upstream's modes alone; a new file may be 100755",
        )
    if found := re.search(
        r"^(?:(?:new|deleted) file mode|index [0-9a-f]+\.\.[0-9a-f]+) (?!100644$|100755$)(\d+)$",
        diff,
        re.MULTILINE,
    ):
        raise refused(
            file,
            f"it adds, changes or deletes a link or a submodule (mode {found[1]})",
            "leave links alone; a new file has to be a regular file",
        )
    if found := re.search(r"^copy from (.+)$", diff, re.MULTILINE):
        raise refused(file, f"it copies a file ({found[1]}) instead of adding one", EXPORT_IT)
    return diff


def _second_from_line(text: str) -> int:
    for number, line in enumerate(text.splitlines(), start=1):
        if number > 1 and re.match(r"From \S+.*\d\d?:\d\d", line):
            return number
    return 0
