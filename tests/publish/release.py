"""Wheels with provenance and signed reports, and the policy that takes them."""

from __future__ import annotations

import hashlib
import json
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from builder import gpu_report, signing
from builder.gpu_report import GpuReport, Machine, Outcome
from builder.locations import Project
from tests.gate.reports import H200, POLICY, TESTS, make_key, result
from tests.index.wheels import write_wheel

VERSION = "0.20.2+glm5.1"
X86 = "cp38-abi3-manylinux_2_35_x86_64"
ARM = "cp38-abi3-manylinux_2_35_aarch64"
BIG = {"vllm/__init__.py": "", "vllm/x.so": random.Random(4).randbytes(8 << 20)}
FAILING = (result("test_a.py::test_one", Outcome.FAILED, "off by 0.3"), *TESTS[1:])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Release:
    """A project with a policy, the key of its gate, and what was built and tested."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.dist = folder / "dist"
        (self.root / "ci").mkdir(parents=True)
        (self.root / "tests" / "gpu").mkdir(parents=True)
        (self.root / "tests" / "gpu" / "test_a.py").write_text("def test_one(): pass\n")
        (self.root / "ci" / "policy.toml").write_text(POLICY)
        self.key = make_key(folder, "key")
        line = signing.allowed_signers_line(self.key, "gate", signing.REPORT)
        (self.root / "ci" / "allowed_signers").write_text(f"{line}\n")

    @property
    def project(self) -> Project:
        return Project(self.root)

    def wheel(self, version=VERSION, folder="", **options) -> Path:
        wheel = write_wheel(self.dist / folder, version, **options)
        statement = {"subject": [{"name": wheel.name, "digest": {"sha256": sha256(wheel)}}]}
        wheel.with_name(f"{wheel.name}.provenance.json").write_text(json.dumps(statement))
        return wheel

    def report(self, wheel: Path, *, tests=TESTS, gpus=(H200,), sign=True, name="") -> Path:
        """Write the report that the gate would write for this wheel, really signed."""
        now = datetime.now(UTC).replace(microsecond=0)
        report = GpuReport(
            wheel_name=wheel.name,
            wheel_sha256=sha256(wheel),
            policy_sha256=sha256(self.root / "ci" / "policy.toml"),
            suite_hash=gpu_report.dir_hash(self.root / "tests" / "gpu"),
            started=now - timedelta(hours=2),
            finished=now - timedelta(hours=1),
            machine=Machine(gpus, "580.1", "13.0", "2.11.0+cu130", "3.6.0", "3.12.1"),
            tests=tests,
            faults=(),
        )
        path = wheel.with_name(name or f"report-{wheel.stem}.json")
        path.write_bytes(gpu_report.render(report))
        signing.signature_path(path).unlink(missing_ok=True)
        if sign:
            signing.sign(path, self.key, signing.REPORT)
        return path
