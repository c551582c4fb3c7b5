"""Signing reports and provenance: what the command does, and what OpenSSH itself says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import timedelta

import pytest

from builder import policy, signing, sigstore_signing
from builder.errors import ReportRefused, SignatureRefused, ToolchainError
from tests.commands import run_builder
from tests.gate.reports import NOW, Gate, make_key

TOOLCHAIN, REPORT_REFUSED = 14, 23
SIGSTORE_CHANNEL = """
[channels.stable-ci]
capability = ">=9.0"
required-tests = ["test_a.py::*"]
may-skip = ["test_a.py::test_two_gpus"]
max-age-days = 14
sigstore = [
    { identity = "https://example.org/ci", issuer = "https://example.org" },
    { identity = "https://example.org/other", issuer = "https://example.org" },
]
"""


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path)


@pytest.fixture
def ci_gate(gate):
    with (gate.folder / "policy.toml").open("a") as file:
        file.write(SIGSTORE_CHANNEL)
    return gate


def test_openssh_accepts_the_signature_and_the_printed_line(gate):
    path = gate.write(gate.report(), signed=False)
    done = run_builder("sign", path, "--key", gate.key)
    assert done.stdout == f"signed   {path}.sig\n"
    line = run_builder("sign", "--key", gate.key, "--show-line", "--principal", "me").stdout
    (gate.folder / "signers").write_text(line)
    command = ["ssh-keygen", "-Y", "verify", "-f", gate.folder / "signers", "-I", "me",
               "-n", "gpu-report@vllm-glm5", "-s", f"{path}.sig"]  # fmt: skip
    with path.open("rb") as data:
        subprocess.run(command, stdin=data, check=True, capture_output=True)
    with (gate.folder / "policy.toml").open("rb") as other:
        assert subprocess.run(command, stdin=other, check=False, capture_output=True).returncode


@pytest.mark.parametrize("name", ["a b", "*", "a,!b", "a\nb ssh-ed25519 AAAA", ""])
def test_a_line_has_one_name(gate, name):
    done = run_builder("sign", "--key", gate.key, "--show-line", "--principal", name, check=False)
    assert done.returncode == 2
    assert done.stdout == ""


def test_provenance_has_a_namespace_of_its_own(gate):
    provenance = gate.folder / "wheel.provenance.json"
    provenance.write_text("{}\n")
    run_builder("sign", provenance, "--key", gate.key, "--kind", "provenance")
    signature = signing.signature_path(provenance).read_bytes()
    gate.allow(gate.key, "gate", namespace=signing.PROVENANCE)
    arguments = (provenance.read_bytes(), signature, gate.folder / "allowed_signers")
    options = {"principals": {"gate"}, "now": NOW, "where": "x"}
    assert signing.verify(*arguments, signing.PROVENANCE, **options).principal == "gate"
    with pytest.raises(SignatureRefused, match="for this purpose"):
        signing.verify(*arguments, signing.REPORT, **options)


def test_a_key_in_an_agent(gate):
    """Only the public key is named; the private one never leaves the agent."""
    agent = subprocess.run(["ssh-agent", "-s"], capture_output=True, text=True, check=True).stdout
    pairs = [part.strip() for line in agent.splitlines() for part in line.split(";")]
    values = dict(part.split("=", 1) for part in pairs if part.startswith("SSH_A"))
    environment = os.environ | values
    try:
        subprocess.run(["ssh-add", "-q", gate.key], env=environment, check=True)
        gate.key.unlink()
        path = gate.write(gate.report(), signed=False)
        run_builder("sign", path, "--key", f"{gate.key}.pub", env=environment)
        assert gate.judge(path).signer.principal == "gate"
    finally:
        os.kill(int(values["SSH_AGENT_PID"]), 15)


@pytest.mark.parametrize("key", ["missing", "text"])
def test_a_file_that_is_no_key(gate, key):
    (gate.folder / "text").write_text("no key")
    path = gate.write(gate.report(), signed=False)
    done = run_builder("sign", path, "--key", gate.folder / key, check=False)
    assert done.returncode == TOOLCHAIN
    assert "ssh-keygen did not sign with that key" in done.stderr
    assert not signing.signature_path(path).exists()


def test_what_is_no_report_is_not_signed_as_one(gate):
    path = gate.folder / "policy.toml"
    done = run_builder("sign", path, "--key", gate.key, check=False)
    assert done.returncode == REPORT_REFUSED
    assert not signing.signature_path(path).exists()


def test_no_ssh_keygen(gate):
    path = gate.write(gate.report(), signed=False)
    environment = os.environ | {"PATH": str(gate.folder)}
    done = run_builder("sign", path, "--key", gate.key, env=environment, check=False)
    assert done.returncode == TOOLCHAIN
    assert "ssh-keygen is not installed" in done.stderr


def test_two_keys_of_one_principal(gate):
    """As in the weeks in which an old key is replaced."""
    old = (gate.folder / "allowed_signers").read_text()
    new = make_key(gate.folder, "new")
    gate.allow(new, "gate")
    with (gate.folder / "allowed_signers").open("a") as file:
        file.write(old)
    for key in (gate.key, new):
        assert gate.judge(gate.write(gate.report(), key=key)).signer.principal == "gate"


def test_sigstore_is_optional(gate, monkeypatch):
    for name in ("sigstore", "sigstore.errors", "sigstore.models"):
        monkeypatch.setitem(sys.modules, name, None)
    path = gate.write(gate.report(), signed=False)
    with pytest.raises(ToolchainError, match="sigstore is not installed") as caught:
        sigstore_signing.sign(path)
    assert "[sigstore]" in caught.value.next_step
    assert gate.judge(gate.write(gate.report()))


def test_no_identity(gate):
    """The library itself, on a machine that has none."""
    path = gate.write(gate.report(), signed=False)
    clean = {k: v for k, v in os.environ.items()
             if not k.startswith(("ACTIONS_", "GITHUB_", "CI", "GITLAB_"))}  # fmt: skip
    done = run_builder("sign", path, "--sigstore", env=clean, check=False)
    assert done.returncode == TOOLCHAIN
    assert "offers sigstore no identity" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_channel_of_identities_wants_a_bundle(ci_gate):
    path = ci_gate.write(ci_gate.report())  # by an SSH key, which this channel does not take
    with pytest.raises(SignatureRefused, match="not signed, and stable-ci requires it"):
        ci_gate.judge(path, "stable-ci")
    for junk in (b"", b"{}", b"\xff", b'{"mediaType": "x"}'):
        sigstore_signing.bundle_path(path).write_bytes(junk)
        with pytest.raises(SignatureRefused, match="not a bundle"):
            ci_gate.judge(path, "stable-ci")


@pytest.mark.parametrize(("signed_by", "accepted"), [("/other", True), ("/foreign", False)])
def test_each_allowed_identity_is_tried(ci_gate, monkeypatch, signed_by, accepted):
    """Our side alone: what a bundle says is sigstore's to judge, and needs its servers."""
    import sigstore.models
    import sigstore.verify
    from sigstore.errors import VerificationError

    class Verifier:
        @classmethod
        def production(cls):
            return cls()

        def verify_artifact(self, data, bundle, wanted):
            assert data == path.read_bytes()
            if wanted._identity != f"https://example.org{signed_by}":
                raise VerificationError("identity does not match")

    monkeypatch.setattr(sigstore.verify, "Verifier", Verifier)
    monkeypatch.setattr(sigstore.models.Bundle, "from_json", lambda raw: raw)
    path = ci_gate.write(ci_gate.report(), signed=False)
    sigstore_signing.bundle_path(path).write_bytes(b"a bundle")
    if not accepted:
        with pytest.raises(ReportRefused, match="no allowed identity signed"):
            ci_gate.judge(path, "stable-ci")
        return
    verdict = ci_gate.judge(path, "stable-ci")
    assert verdict == policy.Verdict(
        channel="stable-ci",
        wheel_sha256=verdict.report.wheel_sha256,
        report=ci_gate.report(),
        signer=signing.Signer("https://example.org/other", kind="sigstore"),
        report_bytes=path.read_bytes(),
        signature_bytes=b"a bundle",
        signature_suffix=".sigstore.json",
    )


def test_one_key_under_two_names(gate):
    """The gate's report and the builder's provenance, on a machine that does both."""
    path = gate.write(gate.report())
    builder = signing.allowed_signers_line(gate.key, "builder", signing.PROVENANCE)
    ours = signing.allowed_signers_line(gate.key, "gate", signing.REPORT)
    allowed = gate.folder / "allowed_signers"
    for lines in ((builder, ours), (ours, builder)):
        allowed.write_text("\n".join(lines) + "\n")
        assert gate.judge(path).signer.principal == "gate"
    allowed.write_text(f"{builder}\n")
    with pytest.raises(SignatureRefused, match="signed by builder"):
        gate.judge(path)


OLD = """#!/bin/sh
# What OpenSSH before 9.1 says of a time in UTC.
for argument; do
  case "$argument" in
    -Overify-time=*Z) echo 'Invalid "verify-time" option' >&2; exit 1;;
  esac
done
exec {program} "$@"
"""


@pytest.mark.parametrize("zone", ["UTC0", "Asia/Tokyo", "America/Los_Angeles"])
def test_an_older_openssh_in_any_time_zone(gate, monkeypatch, zone):
    """Ubuntu 22.04 has 8.9."""
    path = gate.write(gate.report())
    programs = gate.folder / "programs"
    programs.mkdir()
    old = programs / "ssh-keygen"
    old.write_text(OLD.format(program=shutil.which("ssh-keygen")))
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("TZ", zone)
    gate.allow(gate.key, "gate", 'valid-before="202611291200"')
    assert gate.judge(path, now=NOW - timedelta(seconds=1))
    with pytest.raises(SignatureRefused):  # the control
        gate.judge(path, now=NOW + timedelta(seconds=1))
