"""Reports, keys and policies for tests: real files, real keys."""

from __future__ import annotations

import hashlib
import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

from builder import gpu_report, policy, signing
from builder.gpu_report import Gpu, GpuReport, Machine, Outcome, TestResult

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
H200 = Gpu("NVIDIA H200", "9.0", 150_000_000_000)
RTX = Gpu("NVIDIA RTX PRO 6000", "12.0", 100_000_000_000)

POLICY = """\
allowed-signers = "allowed_signers"

[channels.stable]
capability = ">=9.0"
required-tests = ["test_a.py::*", "test_b.py::test_two[x]"]
may-skip = ["test_a.py::test_two_gpus"]
at-least = { "soak: seconds" = 60 }
max-age-days = 14
signers = ["gate", "gate-2"]

[channels.stable-sm120]
capability = "==12.*"
required-tests = ["test_a.py::*"]
max-age-days = 14
signers = ["gate"]

[channels.nightly]
capability = ">=8.0"
required-tests = ["test_a.py::*"]
max-age-days = 1
signature = "none"
"""


def result(name, outcome=Outcome.PASSED, reason="", **figures):
    return TestResult(name, outcome, 1.5, reason, figures)


TESTS = (
    result("test_a.py::test_one", error=0.25),
    result("test_a.py::test_two_gpus", Outcome.SKIPPED, "needs two GPUs"),
    result("test_b.py::test_two[x]", **{"soak: seconds": 60.0}),
)


def make_key(folder: Path, name: str) -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", folder / name], check=True
    )
    return folder / name


class Gate:
    """A folder with a policy, a suite, a wheel, and a key that the policy allows."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "suite").mkdir()
        (folder / "suite" / "test_a.py").write_text("def test_one(): pass\n")
        (folder / "policy.toml").write_text(POLICY)
        self.key = make_key(folder, "key")
        self.allow(self.key, "gate")
        self.wheel = folder / "vllm_glm5-0.20.2+glm5.1-py3-none-any.whl"
        self.wheel.write_bytes(b"the bytes of a wheel")

    def allow(self, key: Path, principal: str, options: str = "", namespace=signing.REPORT) -> None:
        line = signing.allowed_signers_line(key, principal, namespace)
        if options:
            line = line.replace(" ssh-", f",{options} ssh-", 1)
        (self.folder / "allowed_signers").write_text(f"# ours\n{line}\n")

    @property
    def policy(self) -> policy.Policy:
        return policy.load(self.folder / "policy.toml", self.folder / "suite")

    def report(self, *, tests=TESTS, gpus=(H200,), age=timedelta(hours=1), **changes) -> GpuReport:
        values = {
            "wheel_name": self.wheel.name,
            "wheel_sha256": hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            "policy_sha256": self.policy.sha256,
            "suite_hash": gpu_report.dir_hash(self.folder / "suite"),
            "started": NOW - age - timedelta(minutes=9),
            "finished": NOW - age,
            "machine": Machine(gpus, "580.1", "13.0", "2.11.0+cu130", "3.6.0", "3.12.1"),
            "tests": tests,
            "faults": (),
        }
        return GpuReport(**values | changes)

    def write(self, report: GpuReport, *, key=None, signed=True) -> Path:
        path = self.folder / "gpu-report.json"
        path.write_bytes(gpu_report.render(report))
        signing.signature_path(path).unlink(missing_ok=True)
        if signed:
            signing.sign(path, key or self.key, signing.REPORT)
        return path

    def judge(self, path: Path, channel="stable", now=NOW):
        return policy.require_report(self.policy.channel(channel), self.wheel, path, now)


def edited(path: Path, change) -> None:
    """Change a report as somebody would who wants it to say something else."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
