"""What a GPU report must show before a wheel enters a channel (``ci/policy.toml``)."""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from builder import gpu_report, signing, sigstore_signing
from builder.digests import sha256_of
from builder.errors import PolicyError, ReportRefused, SignatureRefused
from builder.gpu_report import BAD, GpuReport, Outcome
from builder.locations import Project
from builder.sigstore_signing import Identity

SKEW = timedelta(minutes=5)  # how far the GPU machine's clock may be ahead of ours

_SOAK = "engine soak: seconds"  # the figure of tests/gpu that the caller of the suite chooses
_KEYS = frozenset({"capability", "required-tests", "may-skip", "at-least", "max-age-days",
                   "signers", "sigstore", "signature"})  # fmt: skip


@dataclass(frozen=True)
class Channel:
    """The rules of one channel.

    :param capability: which compute capabilities count, in PEP 440's words (``>=9.0``).
    :param required_tests: patterns of test names; each must match, and what it matches must pass.
    :param may_skip: patterns of required tests that may be skipped, such as those for two GPUs. A
        pattern that stands in both may be skipped as a whole; of any other one test must pass.
    :param at_least: the least value of a figure by its name, such as the seconds of a soak.
    :param signers: principals of the allowed-signers file.
    :param sigstore: identities whose sigstore bundle counts instead; without them and without
        signers, no signature is asked for.
    :param policy_sha256: of the policy file that a report must carry, as must it ``suite_hash``.
    """

    name: str
    capability: SpecifierSet
    required_tests: tuple[str, ...]
    may_skip: tuple[str, ...]
    at_least: dict[str, float]
    max_age: timedelta
    signers: tuple[str, ...]
    sigstore: tuple[Identity, ...]
    allowed_signers: Path
    policy_sha256: str
    suite_hash: str


@dataclass(frozen=True)
class Policy:
    """The channels that ask for a report. Only staging may be entered without asking here."""

    path: Path
    sha256: str
    allowed_signers: Path
    channels: dict[str, Channel]

    def channel(self, name: str) -> Channel:
        """Return a channel's rules.

        :raises PolicyError: the policy does not define it.
        """
        if name not in self.channels:
            raise PolicyError(
                f"no channel {name!r}; it defines {', '.join(self.channels)}",
                where=str(self.path),
                next_step="name one of those, or add it to the policy",
            )
        return self.channels[name]


@dataclass(frozen=True)
class Verdict:
    """A report that was accepted: the bytes that were read and verified, to publish exactly those.

    :param wheel_sha256: of the wheel as it was read; publish nothing else.
    :param signer: None where the channel asks for no signature.
    :param signature_suffix: what the signature's name adds to the report's.
    """

    channel: str
    wheel_sha256: str
    report: GpuReport
    signer: signing.Signer | None
    report_bytes: bytes
    signature_bytes: bytes | None
    signature_suffix: str = signing.SUFFIX


def load(path: Path, suite: Path) -> Policy:
    """Read a policy; the channels expect reports of the suite in that folder.

    :raises PolicyError: it is malformed.
    """
    try:
        data = path.read_bytes()
        document = tomllib.loads(data.decode())
        sha256, suite_hash = hashlib.sha256(data).hexdigest(), gpu_report.dir_hash(suite)
        allowed = path.parent / _string(document["allowed-signers"])
        channels = {
            name: _channel(name, table, allowed, sha256, suite_hash)
            for name, table in document["channels"].items()
        }
    except FileNotFoundError as error:
        raise PolicyError(
            "no policy there", where=str(path), next_step="give --policy a file like ci/policy.toml"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"no {error} in it" if isinstance(error, KeyError) else str(error)
        raise PolicyError(what, where=str(path), next_step="correct the policy") from error
    return Policy(path, sha256, allowed, channels)


def load_default(project: Project) -> Policy:
    """Read the policy of this checkout, or the one that was installed with the tool."""
    return load(project.policy, project.suite)


def _channel(
    name: str, table: dict[str, Any], allowed: Path, sha256: str, suite_hash: str
) -> Channel:
    if odd := set(table) - _KEYS:
        raise ValueError(f"{name}: unknown {', '.join(sorted(odd))}")
    signature = table.get("signature", "required")
    if signature not in {"required", "none"}:
        raise ValueError(f'{name}: signature is "required" or "none"')
    if signature == "none" and name.startswith("stable"):
        raise ValueError(f"{name}: a stable channel always requires a signature")
    signers = _strings(table.get("signers", []))
    identities = tuple(
        Identity(_string(item["identity"]), _string(item["issuer"]))
        for item in table.get("sigstore", [])
    )
    if (signature == "required") != bool(signers or identities):
        raise ValueError(
            f"{name}: signers are listed where a signature is required, and only there"
        )
    required = _strings(table["required-tests"])
    if not required:
        raise ValueError(f"{name}: required-tests is empty: it would let in what nothing tested")
    return Channel(
        name=name,
        capability=capability_range(table["capability"]),
        required_tests=required,
        may_skip=_strings(table.get("may-skip", [])),
        at_least={name: float(least) for name, least in table.get("at-least", {}).items()},
        max_age=timedelta(days=float(table["max-age-days"])),
        signers=signers,
        sigstore=identities,
        allowed_signers=allowed,
        policy_sha256=sha256,
        suite_hash=suite_hash,
    )


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


def _strings(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return tuple(_string(item) for item in value)


def capability_range(text: str) -> SpecifierSet:
    """Read ``12.0`` (exactly that), or a range in PEP 440's words: ``>=9.0``, ``==12.*``.

    :raises ValueError: it is neither.
    """
    try:
        return SpecifierSet(f"=={text}" if re.fullmatch(r"\d+\.(\d+|\*)", text) else text)
    except InvalidSpecifier as error:
        raise ValueError(f"not a range of compute capabilities: {text!r}") from error


def gate_command(channel: Channel, wheel: Path) -> str:
    """Return the command whose report the channel takes, if the wheel passes.

    Without the variable the soak is a short one, and the next run ends in the same refusal.
    """
    seconds = channel.at_least.get(_SOAK)
    variable = f"VLLM_GLM5_SOAK_SECONDS={math.ceil(seconds)} " if seconds else ""
    return f"{variable}python -m builder test {wheel}"


def require_report(channel: Channel, wheel: Path, report: Path, now: datetime) -> Verdict:
    """Return the accepted report of a wheel; the signature lies beside the report as ``.sig``.

    :param now: an aware time; the age of the report and the validity of the key are judged by it.
    :raises ReportRefused: with the reason; a signature's faults as ``SignatureRefused``.
    """
    where = str(report)
    data = _read(report, gate_command(channel, wheel))
    # First: nothing else that unsigned bytes say is worth a word.
    signed = _verified(channel, report, data, now)
    signer, signature, suffix = signed or (None, None, signing.SUFFIX)
    found = gpu_report.parse(data, where)
    sha256 = sha256_of(wheel)
    if found.wheel_sha256 != sha256:
        raise ReportRefused(
            "the report is about another wheel",
            where=where,
            details=(f"tested  {found.wheel_sha256}  {found.wheel_name}",
                     f"given   {sha256}  {wheel.name}"),
            next_step=gate_command(channel, wheel),
        )  # fmt: skip
    if found.wheel_name != wheel.name:  # which says for which machine and Python it is
        raise ReportRefused(
            "the wheel was tested under another file name",
            where=where,
            details=(f"tested  {found.wheel_name}", f"given   {wheel.name}"),
            next_step="give it the name back that its build gave it",
        )
    if faults := check(channel, found, now):
        raise ReportRefused(
            f"the report does not let this wheel into {channel.name}: {faults[0]}",
            where=where,
            details=tuple(faults[1:]),
            next_step=gate_command(channel, wheel),
        )
    return Verdict(channel.name, sha256, found, signer, data, signature, suffix)


def refuse_failure(channel: Channel, wheel_sha256: str, report: Path) -> None:
    """Refuse a wheel of which a report, signed or not, says that it failed this very suite.

    :raises ReportRefused: which test it was.
    """
    try:
        found = gpu_report.parse(_read(report), str(report))
    except ReportRefused:
        return
    same = (found.wheel_sha256, found.suite_hash) == (wheel_sha256, channel.suite_hash)
    if same and (bad := [*found.faults, *(t.name for t in found.named(*BAD))]):
        raise ReportRefused(
            f"the wheel failed the gate at another time: {bad[0]}",
            where=str(report),
            details=tuple(bad[1:]),
            next_step="find out why; leave that report out only where the machine was at fault",
        )


def _read(report: Path, next_step: str = "python -m builder test WHEEL") -> bytes:
    try:
        return report.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ReportRefused("no report there", where=str(report), next_step=next_step) from error


def _verified(
    channel: Channel, report: Path, data: bytes, now: datetime
) -> tuple[signing.Signer, bytes, str] | None:
    """Return signer, signature and its suffix; None where the channel asks for none."""
    where = str(report)
    if not channel.signers and not channel.sigstore:
        return None
    key, bundle = signing.signature_path(report), sigstore_signing.bundle_path(report)
    if channel.signers and key.is_file():
        signature = key.read_bytes()
        signer = signing.verify(
            data, signature, channel.allowed_signers, signing.REPORT,
            principals=channel.signers, now=now, where=where,
        )  # fmt: skip
        return signer, signature, signing.SUFFIX
    if channel.sigstore and bundle.is_file():
        signature = bundle.read_bytes()
        signer = sigstore_signing.verify(data, signature, channel.sigstore, where)
        return signer, signature, sigstore_signing.SUFFIX
    raise SignatureRefused(
        f"the report is not signed, and {channel.name} requires it",
        where=str(key if channel.signers else bundle),
        next_step=f"on the machine that tested it: python -m builder sign {report} --key KEY",
    )


def check(channel: Channel, report: GpuReport, now: datetime) -> list[str]:
    """Return why a report does not satisfy a channel's rules; nothing where it does."""
    faults = [*report.faults]
    faults += [f"{t.name}: {t.outcome}: {t.reason}" for t in report.named(*BAD)]
    if not report.named(Outcome.PASSED):
        faults.append("no test passed")
    faults += _unmet(channel, report)
    faults += _too_small(channel, report)
    faults += capability_faults(channel.capability, report)
    age = now - report.finished
    if age > channel.max_age:
        faults.append(
            f"it is {age.total_seconds() / 86400:.1f} days old, older than "
            f"{channel.max_age.total_seconds() / 86400:g} days"
        )
    if age < -SKEW or report.finished < report.started:
        faults.append(f"it was finished at {report.finished:%Y-%m-%d %H:%M} UTC, in the future")
    if report.policy_sha256 != channel.policy_sha256:
        faults.append(f"it was made under another policy ({report.policy_sha256[:12]})")
    if report.suite_hash != channel.suite_hash:
        faults.append(f"it was made with another suite ({report.suite_hash[:12]})")
    return faults


def capability_faults(capability: SpecifierSet, report: GpuReport) -> list[str]:
    """Return which cards are not of the asked-for capability; having none is a fault."""
    faults = []
    for gpu in report.machine.gpus:
        try:
            inside = capability.contains(Version(gpu.capability))
        except InvalidVersion:
            inside = False
        if not inside:
            faults.append(f"{gpu.name} has compute capability {gpu.capability}, not {capability}")
    return faults or ([] if report.machine.gpus else ["it names no GPU"])


def _unmet(channel: Channel, report: GpuReport) -> list[str]:
    faults = []
    for pattern in channel.required_tests:
        tests = [test for test in report.tests if _matches(test.name, (pattern,))]
        skipped_all = bool(tests)
        for test in tests:
            if test.outcome is Outcome.PASSED:
                skipped_all = False
            elif test.outcome is Outcome.SKIPPED and _matches(test.name, channel.may_skip):
                continue
            elif test.outcome not in BAD:  # those are named already
                faults.append(f"{test.name} is required: {test.outcome}: {test.reason}")
        if not tests:
            faults.append(f"no test {pattern}, which is required")
        elif skipped_all and pattern not in channel.may_skip:
            faults.append(f"no test {pattern} passed, of which one at least is required")
    return faults


def _too_small(channel: Channel, report: GpuReport) -> list[str]:
    faults = []
    for name, least in channel.at_least.items():
        values = [test.figures[name] for test in report.tests if name in test.figures]
        numbers = [value for value in values if isinstance(value, int | float)]
        if not numbers:
            faults.append(f"it has no figure {name!r}, which must be at least {least:g}")
        elif not max(numbers) >= least:
            faults.append(f"{name}: {max(numbers):g}, and at least {least:g} is asked for")
    return faults


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Parameters stand in brackets, which are fnmatch's own: an exact name counts as well."""
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
