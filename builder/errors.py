"""One exception class, and one exit code, per cause.

Every error says what happened, where, and which command or action helps. The codes are part of the
interface (docs/errors.md) and never change their meaning.
"""

from __future__ import annotations

from typing import ClassVar


class BuilderError(Exception):
    """A failure that a user can cause or repair; shown without a traceback.

    :param what: one sentence, what went wrong.
    :param where: the file, patch, member or URL concerned.
    :param details: lines that help to see the cause, such as expected and found text.
    :param next_step: the command to run or the thing to do next.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        details: tuple[str, ...] = (),
        next_step: str,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.details = details
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        lines += [f"  {line}" for line in self.details]
        lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Return the same facts for ``--json``."""
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "what": self.what,
            "where": self.where,
            "details": list(self.details),
            "next": self.next_step,
        }


class UnknownTagError(BuilderError):
    """No pin or no series for that tag."""

    exit_code = 3


class HashMismatchError(BuilderError):
    """A file's bytes are not the pinned ones."""

    exit_code = 4


class PackageIndexError(BuilderError):
    """The package index cannot be reached, answers nonsense or without an end, or lacks the file."""

    exit_code = 5


class DiskFullError(BuilderError):
    """No space left for a file that was being written."""

    exit_code = 6


class UnsafeArchiveError(BuilderError):
    """An archive member would leave the folder it is unpacked into."""

    exit_code = 7


class PatchFormatError(BuilderError):
    """A patch file is not one this tool accepts (empty, truncated, CRLF, binary ...)."""

    exit_code = 8


class PatchConflictError(BuilderError):
    """A hunk's pre-image is not in the file."""

    exit_code = 9


class MisplacedHunkError(BuilderError):
    """A hunk would land, but not in the place that the patch means."""

    exit_code = 10


class SeriesError(BuilderError):
    """The series file and the patch files disagree, or a patch fails the lint."""

    exit_code = 11


class DirtyWorktreeError(BuilderError):
    """A work tree holds changes that the command would lose."""

    exit_code = 12


class UnfaithfulModeError(BuilderError):
    """The asked-for build mode cannot carry what the series changes."""

    exit_code = 13


class ToolchainError(BuilderError):
    """git, nvcc or another program that the step needs is missing or too old."""

    exit_code = 14


class BuildFailedError(BuilderError):
    """Upstream's own build failed."""

    exit_code = 15


class AuditError(BuilderError):
    """The wheel differs from the official one in something that no patch explains."""

    exit_code = 16


class VersionExistsError(BuilderError):
    """The index holds other bytes under that version."""

    exit_code = 17


class PinError(BuilderError):
    """A pin is malformed, or would be changed without --force."""

    exit_code = 18


class RevisionError(BuilderError):
    """What ships has changed and the revision N of +glm5.N has not."""

    exit_code = 19


class SourceMismatchError(BuilderError):
    """A git tag or a work tree is not the pinned release."""

    exit_code = 20


class MixedInstallError(BuilderError):
    """An environment holds another vLLM than its metadata says (doctor)."""

    exit_code = 21


class ExportMismatchError(BuilderError):
    """The patch files are not what an export would write."""

    exit_code = 22


class ReportRefused(BuilderError):  # noqa: N818 - the word that the policy, its users and docs use
    """A GPU report does not let this wheel into that channel; ``what`` is the reason."""

    exit_code = 23


class SignatureRefused(ReportRefused):
    """A signature is missing, altered, expired, by a key nobody allowed, or for another purpose."""

    exit_code = 24


class PolicyError(BuilderError):
    """The policy file is malformed, or names a channel that it does not define."""

    exit_code = 25


class GateFailedError(BuilderError):
    """The GPU suite did not pass; the report was written and says why."""

    exit_code = 26


class EnvironmentMismatchError(BuilderError):
    """What an environment imports is not the content of the wheel under test."""

    exit_code = 27


class RebaseStoppedError(BuilderError):
    """A rebase waits for a person: a conflict, or a patch that upstream has."""

    exit_code = 30


class RebaseStateError(BuilderError):
    """The rebase cannot be begun, continued or aborted as asked: nothing was changed."""

    exit_code = 31


class ContractError(BuilderError):
    """What a series leans on in upstream's code is not what it was."""

    exit_code = 32


class UploadRefusedError(BuilderError):
    """A package server refuses who uploads: a wrong password, or no right to."""

    exit_code = 40


class UnsupportedByServerError(BuilderError):
    """What was asked for is not possible on that kind of package server."""

    exit_code = 41


class UploadFailedError(BuilderError):
    """An upload was cut, or a package server does not list what it was sent."""

    exit_code = 42


class IndexLayoutError(BuilderError):
    """A channel's folder is another channel's too: by a link, or as one index lies in another."""

    exit_code = 43
