"""The GPU report: an in-toto statement (v1) that a suite ran on one wheel, and with what outcome.

The predicate is in-toto's Test Result v0.1; its ``configuration`` names the policy and the suite by
digest. What that predicate has no field for (each test's figures, the cards) stands under
``vllm-glm5``, which other readers ignore, as in-toto's parsing rules ask of them. A report names no
user, host or path.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from builder import __version__
from builder.errors import ReportRefused

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"
POLICY_NAME = "ci/policy.toml"
SUITE_NAME = "tests/gpu"

_EXTENSION = "vllm-glm5"
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LARGEST = 16 << 20  # bytes; the real suite's report is under 100 kB
_AGAIN = "run the gate again: python -m builder test WHEEL"

Figure = str | int | float | bool | None


class Outcome(StrEnum):
    """How a test ended. ``HANG`` outlived its limit, ``CRASH`` took its process along,
    ``GPU_LOST`` left no card that answers, ``NOT_RUN`` was left out or came after a lost card.
    """

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    HANG = "hang"
    CRASH = "crash"
    GPU_LOST = "gpu-lost"
    NOT_RUN = "not-run"


BAD = frozenset({Outcome.FAILED, Outcome.HANG, Outcome.CRASH, Outcome.GPU_LOST})


@dataclass(frozen=True)
class Gpu:
    """A card that the suite could use; ``capability`` as ``major.minor``, memory in bytes."""

    name: str
    capability: str
    memory: int


@dataclass(frozen=True)
class Machine:
    """Versions of what ran under the wheel; empty where there is none."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: str
    torch: str
    triton: str
    python: str


@dataclass(frozen=True)
class TestResult:
    """One test; ``seconds`` include its fixtures, ``reason`` says why where it did not pass."""

    __test__ = False

    name: str
    outcome: Outcome
    seconds: float
    reason: str
    figures: Mapping[str, Figure]


@dataclass(frozen=True)
class GpuReport:
    """What a report says.

    :param suite_hash: in-toto's ``dirHash`` of the suite's folder.
    :param faults: why the run as a whole is no pass, beside the tests that failed: no GPU, nothing
        ran, the suite cannot be collected.
    """

    wheel_name: str
    wheel_sha256: str
    policy_sha256: str
    suite_hash: str
    started: datetime
    finished: datetime
    machine: Machine
    tests: tuple[TestResult, ...]
    faults: tuple[str, ...]

    def named(self, *outcomes: Outcome) -> tuple[TestResult, ...]:
        """Return the tests that ended in one of these ways."""
        return tuple(test for test in self.tests if test.outcome in outcomes)

    @property
    def passed(self) -> bool:
        """Something ran, and nothing went wrong."""
        return not self.faults and not self.named(*BAD) and bool(self.named(Outcome.PASSED))


def dir_hash(folder: Path) -> str:
    """Return in-toto's ``dirHash`` of a folder, caches of Python and pytest left out.

    The same as ``find . -type f | cut -c3- | LC_ALL=C sort | xargs sha256sum | sha256sum``.
    """
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
        for name, path in sorted(suite_files(folder).items(), key=lambda item: item[0].encode())
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def suite_files(folder: Path) -> dict[str, Path]:
    """Return the files of a suite by their path in it."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file()
        and not {"__pycache__", ".pytest_cache"} & set(path.relative_to(folder).parts)
    }


def render(report: GpuReport) -> bytes:
    """Return the statement, the same bytes for the same report."""
    machine = report.machine
    document = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": report.wheel_name, "digest": {"sha256": report.wheel_sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            **_summary(report),
            "configuration": [
                {"name": POLICY_NAME, "digest": {"sha256": report.policy_sha256}},
                {"name": SUITE_NAME, "digest": {"dirHash": report.suite_hash}},
            ],
            _EXTENSION: {
                "builder": __version__,
                "started": report.started.astimezone(UTC).strftime(_TIME),
                "finished": report.finished.astimezone(UTC).strftime(_TIME),
                "seconds": round((report.finished - report.started).total_seconds()),
                "environment": {
                    "gpus": [
                        {"name": gpu.name, "capability": gpu.capability, "memory": gpu.memory}
                        for gpu in machine.gpus
                    ],
                    "driver": machine.driver,
                    "cuda": machine.cuda,
                    "torch": machine.torch,
                    "triton": machine.triton,
                    "python": machine.python,
                },
                "faults": list(report.faults),
                "tests": [
                    {
                        "name": test.name,
                        "outcome": str(test.outcome),
                        "seconds": round(test.seconds, 3),
                        "reason": test.reason,
                        "figures": {key: _strict(value) for key, value in test.figures.items()},
                    }
                    for test in report.tests
                ],
            },
        },
    }
    return (json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _summary(report: GpuReport) -> dict[str, object]:
    """Return the predicate's own fields; what the reader recomputes and compares."""
    return {
        "result": "PASSED" if report.passed else "FAILED",
        "passedTests": [test.name for test in report.named(Outcome.PASSED)],
        "warnedTests": [test.name for test in report.named(Outcome.SKIPPED)],
        "failedTests": [test.name for test in report.named(*BAD)],
    }


def _strict(value: Figure) -> Figure:
    """JSON has no NaN and no infinity; a figure that is one is worth reading all the same."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse(data: bytes, where: str) -> GpuReport:
    """Read a report.

    :raises ReportRefused: it is no statement of this kind, or it contradicts itself.
    """
    if len(data) > _LARGEST:
        _refuse(f"{len(data) / 1e6:.0f} MB are no report", where)
    try:
        document = json.loads(data, object_pairs_hook=_once, parse_constant=_no_constant)
        report = _report(document)
        differing = [
            key for key, value in _summary(report).items() if document["predicate"][key] != value
        ]
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            RecursionError) as error:  # fmt: skip
        raise ReportRefused(
            f"not a GPU report: {type(error).__name__} {error}", where=where, next_step=_AGAIN
        ) from error
    if differing:
        _refuse(f"the report contradicts itself in {', '.join(differing)}", where)
    return report


def _refuse(what: str, where: str) -> NoReturn:
    raise ReportRefused(what, where=where, next_step=_AGAIN)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Two readers must not read two things: a key stands once."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice where it counts once")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _report(document: dict[str, Any]) -> GpuReport:
    if document["_type"] != STATEMENT_TYPE or document["predicateType"] != PREDICATE_TYPE:
        raise ValueError("it is another kind of statement")
    (subject,) = document["subject"]
    predicate = document["predicate"]
    digests = _once([(item["name"], item["digest"]) for item in predicate["configuration"]])
    own = predicate[_EXTENSION]
    environment = own["environment"]
    tests = tuple(
        TestResult(
            name=_text(item["name"]),
            outcome=Outcome(item["outcome"]),
            seconds=float(item["seconds"]),
            reason=_text(item["reason"]),
            figures={_text(key): _figure(value) for key, value in item["figures"].items()},
        )
        for item in own["tests"]
    )
    if len({test.name for test in tests}) != len(tests):
        raise ValueError("a test stands twice in it")
    return GpuReport(
        wheel_name=_text(subject["name"]),
        wheel_sha256=_text(subject["digest"]["sha256"]),
        policy_sha256=_text(digests[POLICY_NAME]["sha256"]),
        suite_hash=_text(digests[SUITE_NAME]["dirHash"]),
        started=_time(own["started"]),
        finished=_time(own["finished"]),
        machine=Machine(
            gpus=tuple(
                Gpu(_text(gpu["name"]), _text(gpu["capability"]), int(gpu["memory"]))
                for gpu in environment["gpus"]
            ),
            driver=_text(environment["driver"]),
            cuda=_text(environment["cuda"]),
            torch=_text(environment["torch"]),
            triton=_text(environment["triton"]),
            python=_text(environment["python"]),
        ),
        tests=tests,
        faults=tuple(_text(item) for item in own["faults"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _figure(value: object) -> Figure:
    if isinstance(value, int):
        float(value)  # OverflowError: what no float holds is compared and shown nowhere
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"{value!r} is no figure")


def _time(value: object) -> datetime:
    return datetime.strptime(_text(value), _TIME).replace(tzinfo=UTC)
