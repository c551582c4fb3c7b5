"""What a patch of this project has to say and may not do, beyond being a patch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

from builder.apply import AppliedSeries
from builder.diff import NULL_BLOB
from builder.errors import SeriesError
from builder.patchfile import Patch
from builder.repository import IDENTITY
from builder.upstreamed import PROBE
from builder.words import counted

_STATUS = re.compile(
    r"Pending|Submitted \[\S.*\]|Backport \[\S.*\]|Inappropriate \[\S.*\]"  # Yocto's words
)
_MINIMUM_REASON = 20  # words
_SIGNATURE = f"{IDENTITY[0]} <{IDENTITY[1]}>"


def lint_patch(patch: Patch) -> Iterator[str]:
    """Yield the faults of one patch, a line each."""
    if not patch.subject or len(patch.subject) > 80:
        yield f"the subject has {len(patch.subject)} characters; 1 to 80 are good"
    reason = patch.body
    for key, value in patch.trailers:
        reason = reason.replace(f"{key}: {value}", "")
    if (words := len(reason.split())) < _MINIMUM_REASON:
        yield (
            f"the message gives {counted(words, 'word')} of reason, {_MINIMUM_REASON} are the least: "
            "say what was wrong, for whom, and why this way"
        )
    status = patch.trailer("Upstream-Status")
    if status is None:
        yield "no Upstream-Status: trailer"
    elif not _STATUS.fullmatch(status):
        yield (
            f"Upstream-Status: {status!r} is none of Pending, Submitted [url], Backport [release or "
            "url], Inappropriate [reason]"
        )
    drop = patch.trailer("Drop-When")
    if drop is None:
        yield "no removal plan: a Drop-When: trailer tells how one finds out that upstream has it"
    elif not PROBE.fullmatch(drop):
        yield (
            f'Drop-When: {drop!r} is no probe: path FILE contains "text", path FILE lacks "text", '
            "path FILE exists, path FILE missing, or never [reason]"
        )
    if patch.trailer("Signed-off-by") != _SIGNATURE:
        yield f"no trailer Signed-off-by: {_SIGNATURE}"
    if patch.author != _SIGNATURE:
        yield f"the author is {patch.author}, not {_SIGNATURE}"
    for change in patch.changes:
        short = [blob for blob in (change.old_blob, change.new_blob) if 0 < len(blob) < 40]
        if short:
            yield f"{change.path}: short blob ids in the index line (export writes full ones)"
        if change.old_path is None and change.path.endswith((".rej", ".orig")):
            yield f"{change.path}: a leftover of `git apply --reject`, or of another tool"
        if change.old_path is None and change.old_blob not in ("", NULL_BLOB):
            yield f"{change.path}: a new file with a pre-image blob"


def lint_common(patch: Patch) -> Iterator[str]:
    """Yield where a shared patch touches upstream's lines: those are per release."""
    for change in patch.changes:
        if change.old_path is not None:
            yield f"{change.path}: a patch in common/ only adds files, this one changes upstream's"


def lint_trees(applied: AppliedSeries, patches: tuple[Patch, ...]) -> Iterator[str]:
    """Yield Python files that do not compile after their patch: a bisection must work."""
    for commit, patch in zip(applied.patches, patches, strict=True):
        for change in patch.changes:
            if change.new_path and change.new_path.endswith(".py"):
                source = applied.repository.run(
                    "cat-file", "blob", f"{commit.commit}:{change.new_path}"
                )
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        # not ast.parse: that takes a `return` outside a function
                        compile(source, change.new_path, "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as error:
                    yield f"{patch.name}: {change.new_path} does not compile after it: {error}"


def check(faults: list[str], where: str) -> None:
    """Raise one error for all faults.

    :raises SeriesError: there are any.
    """
    if faults:
        raise SeriesError(
            f"the lint finds {counted(len(faults), 'fault')}",
            where=where,
            details=tuple(faults),
            next_step="amend the commits in `python -m builder edit`, then `python -m builder export`",
        )
