"""What goes into a channel as one: a wheel, the alias that stands for it, and what lies beside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from builder import digests, policy, signing, sigstore_signing
from builder.alias import alias_bytes, alias_name, is_required, write_alias
from builder.errors import AuditError, BuilderError, ReportRefused
from builder.index import STAGING, Entry
from builder.locations import Project
from builder.policy import Channel, Verdict
from builder.wheel_file import parse, read_metadata

PROVENANCE = "provenance.json"
REPORT = "gpu-report.json"
_SIGNATURES = (signing.SUFFIX, sigstore_signing.SUFFIX)


@dataclass(frozen=True)
class Unit:
    """One wheel that a channel takes.

    :param sha256: of the wheel; what is published has it.
    :param alias: the distribution ``vllm`` for the same version, where it was built or is required.
    :param beside: files by name that belong next to the wheel.
    """

    wheel: Path
    version: str
    sha256: str
    alias: Path | None
    alias_sha256: str | None
    beside: dict[str, bytes]

    def entries(self) -> tuple[Entry, ...]:
        """The alias comes first: who sees the wheel sees the alias too."""
        wheel = Entry(self.wheel, self.beside, self.sha256)
        return (wheel,) if self.alias is None else (self._alias(self.alias), wheel)

    def _alias(self, path: Path) -> Entry:
        return Entry(path, approved=self.alias_sha256)


def approve(
    channel: str, wheel: Path, reports: Sequence[Path], project: Project, now: datetime
) -> Verdict | None:
    """Let a wheel into a channel by the first of the reports that does; staging asks for none.

    A report that the wheel failed is not outweighed by another one.

    :raises ReportRefused: no report lets it in, or none was given.
    :raises PolicyError: the policy does not define that channel.
    """
    if channel == STAGING:
        return None
    rules = policy.load_default(project).channel(channel)
    if not reports:
        raise ReportRefused(
            f"{channel} takes no wheel without its GPU report",
            where=wheel.name,
            next_step=f"{policy.gate_command(rules, wheel)}, then give --report",
        )
    refused: list[ReportRefused] = []
    accepted: Verdict | None = None
    for report in reports:
        try:
            accepted = accepted or policy.require_report(rules, wheel, report, now)
        except ReportRefused as error:
            refused.append(error)
    if accepted is not None:
        for report in reports:
            policy.refuse_failure(rules, accepted.wheel_sha256, report)
        return accepted
    raise refused[0] if len(refused) == 1 else _all_refused(rules, wheel, refused)


def _all_refused(rules: Channel, wheel: Path, refused: list[ReportRefused]) -> ReportRefused:
    return ReportRefused(
        f"none of the reports lets this wheel into {rules.name}",
        where=wheel.name,
        details=tuple(f"{error.where}: {error.what}" for error in refused),
        next_step=policy.gate_command(rules, wheel),
    )


def gather(wheel: Path, verdict: Verdict | None, scratch: Path) -> Unit:
    """Gather what belongs to a wheel: from its folder, and from its verdict.

    The alias is covered by no report: it has the very bytes that its version determines.

    :param scratch: a folder for the alias of a wheel that requires it and has none beside it.
    :raises AuditError: not a wheel, or the alias or the provenance beside it is another one's.
    """
    version = version_of(wheel)
    sha256 = verdict.wheel_sha256 if verdict else sha256_of(wheel)
    beside = {
        f"{wheel.name}.{end}": path.read_bytes()
        for file in (PROVENANCE, REPORT)
        for end in (file, *(f"{file}{suffix}" for suffix in _SIGNATURES))
        if (path := wheel.with_name(f"{wheel.name}.{end}")).is_file()
    }
    if provenance := beside.get(f"{wheel.name}.{PROVENANCE}"):
        _require_subject(provenance, sha256, wheel)
    if verdict is not None:
        beside[f"{wheel.name}.{REPORT}"] = verdict.report_bytes
        for suffix in _SIGNATURES:
            beside.pop(f"{wheel.name}.{REPORT}{suffix}", None)
        if verdict.signature_bytes is not None:
            name = f"{wheel.name}.{REPORT}{verdict.signature_suffix}"
            beside[name] = verdict.signature_bytes
    alias = alias_of(wheel, scratch)
    alias_sha256 = sha256_of(alias) if alias else None
    return Unit(wheel, version, sha256, alias, alias_sha256, beside)


def alias_of(wheel: Path, scratch: Path) -> Path | None:
    """Return the alias of a wheel: the one beside it, or one in ``scratch`` where it needs one.

    Its version determines its bytes, so that a wheel that requires it is never without it.

    :raises AuditError: not a wheel, or what lies beside it is another alias.
    """
    version = version_of(wheel)
    alias = wheel.with_name(alias_name(version))
    if alias.is_file() and alias.name != wheel.name:
        require_alias(alias, version)
        return alias
    return write_alias(version, scratch) if needs_alias(wheel) else None


def needs_alias(wheel: Path) -> bool:
    """Tell whether METADATA requires ``vllm`` of the wheel's own version.

    :raises AuditError: not a whole wheel.
    """
    with wheel.open("rb") as file:
        return is_required(read_metadata(file, wheel), version_of(wheel))


def require_alias(alias: Path, version: str) -> str:
    """Compare an alias with the one that this tool writes; return the sha256.

    :raises AuditError: it is another file.
    """
    ours = hashlib.sha256(alias_bytes(version)).hexdigest()
    if sha256_of(alias) != ours:
        raise AuditError(
            "not the alias that this tool writes for that version",
            where=str(alias),
            next_step="build it again with --with-alias, or move it away",
        )
    return ours


def version_of(wheel: Path) -> str:
    """Return the version in a wheel's file name.

    :raises AuditError: it is not one.
    """
    return str(parse(wheel).version)


def sha256_of(path: Path) -> str:
    """:raises BuilderError: there is no such file."""
    try:
        return digests.sha256_of(path)
    except FileNotFoundError as error:
        raise BuilderError(
            "no such file", where=str(path), next_step="give the path of a wheel"
        ) from error


def _require_subject(statement: bytes, sha256: str, wheel: Path) -> None:
    try:
        subjects = [item["digest"]["sha256"] for item in json.loads(statement)["subject"]]
    except (ValueError, KeyError, TypeError):
        subjects = []
    if subjects != [sha256]:
        raise AuditError(
            "the provenance beside the wheel is not about it",
            where=f"{wheel.name}.{PROVENANCE}",
            details=(f"about  {', '.join(subjects) or 'nothing'}", f"wheel  {sha256}"),
            next_step="build the wheel again, or move that file away",
        )
