"""What lets a wheel into a channel, and each reason why not."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from fnmatch import fnmatchcase

import pytest

from builder import gpu_report, locations, policy, signing, unit
from builder.errors import PolicyError, ReportRefused, SignatureRefused
from builder.gpu_report import Outcome
from tests.gate.reports import H200, NOW, POLICY, RTX, TESTS, Gate, edited, make_key, result


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path)


def test_accepted(gate):
    path = gate.write(gate.report())
    verdict = gate.judge(path)
    assert verdict.signer == signing.Signer("gate")
    assert verdict.report == gate.report()
    assert verdict.report_bytes == path.read_bytes()
    assert verdict.signature_bytes == path.with_name(path.name + ".sig").read_bytes()


def test_a_test_result_statement_that_names_the_wheel_policy_and_suite(gate):
    document = json.loads(gate.write(gate.report()).read_text())
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    predicate = document["predicate"]
    assert predicate["result"] == "PASSED"
    assert predicate["passedTests"] == ["test_a.py::test_one", "test_b.py::test_two[x]"]
    assert predicate["warnedTests"] == ["test_a.py::test_two_gpus"]


def test_dir_hash_is_that_of_the_spec(tmp_path):
    """in-toto's shell line gives the same, whatever the folders are called."""
    import subprocess

    for name in ("b/x.py", "B.py", "a-1/y", "a/z", "a_b", "ä.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    line = "find . -type f | cut -c3- | LC_ALL=C sort | xargs -r sha256sum | sha256sum"
    spec = subprocess.run(line, shell=True, cwd=tmp_path, capture_output=True, check=True).stdout
    assert gpu_report.dir_hash(tmp_path) == spec.decode().split()[0]
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.pyc").write_text("")
    assert gpu_report.dir_hash(tmp_path) == spec.decode().split()[0]


def change_outcome(document):
    own = document["predicate"]["vllm-glm5"]["tests"][0]
    own["outcome"] = "passed"
    document["predicate"] |= {"result": "PASSED", "failedTests": [],
                              "passedTests": [t["name"] for t in document["predicate"]
                              ["vllm-glm5"]["tests"] if t["outcome"] == "passed"]}  # fmt: skip


def test_an_edited_report_is_refused(gate):
    failing = (result("test_a.py::test_one", Outcome.FAILED, "wrong"), *TESTS[1:])
    path = gate.write(gate.report(tests=failing))
    with pytest.raises(ReportRefused, match="wrong"):
        gate.judge(path)
    edited(path, change_outcome)
    with pytest.raises(SignatureRefused, match="not over these bytes"):
        gate.judge(path)
    # Control: the edit itself is one that the rules would take.
    signing.sign(path, gate.key, signing.REPORT)
    assert gate.judge(path)


def test_one_changed_byte_is_refused(gate):
    path = gate.write(gate.report())
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(SignatureRefused, match="not over these bytes"):
        gate.judge(path)


def test_an_unsigned_report_is_refused(gate):
    with pytest.raises(SignatureRefused, match="not signed, and stable requires it"):
        gate.judge(gate.write(gate.report(), signed=False))


@pytest.mark.parametrize("junk", [b"", b"no signature", b"\xff\x00" * 40])
def test_a_damaged_signature_is_refused(gate, junk):
    path = gate.write(gate.report())
    path.with_name(path.name + ".sig").write_bytes(junk)
    with pytest.raises(SignatureRefused, match="not over these bytes"):
        gate.judge(path)


def test_a_foreign_key_is_refused(gate):
    path = gate.write(gate.report(), key=make_key(gate.folder, "foreign"))
    with pytest.raises(SignatureRefused, match="a key that is not allowed"):
        gate.judge(path)


def test_an_allowed_key_of_another_principal_is_refused(gate):
    gate.allow(gate.key, "builder")
    with pytest.raises(SignatureRefused, match="signed by builder, whom this channel does not"):
        gate.judge(gate.write(gate.report()))


def test_an_expired_key_is_refused(gate):
    path = gate.write(gate.report())
    gate.allow(gate.key, "gate", 'valid-before="202611291130Z"')
    with pytest.raises(SignatureRefused) as caught:
        gate.judge(path)
    assert any("expired" in line for line in caught.value.details)
    assert gate.judge(path, now=NOW - timedelta(minutes=31))


def test_a_signature_for_another_purpose_is_refused(gate):
    path = gate.write(gate.report())
    signing.sign(path, gate.key, signing.PROVENANCE)
    with pytest.raises(SignatureRefused, match="for this purpose"):
        gate.judge(path)


def test_a_key_that_may_sign_only_provenance_is_refused(gate):
    gate.allow(gate.key, "gate", namespace=signing.PROVENANCE)
    with pytest.raises(SignatureRefused, match="may not sign this"):
        gate.judge(gate.write(gate.report()))


def test_a_report_of_another_wheel_is_refused(gate):
    path = gate.write(gate.report())
    gate.wheel.write_bytes(b"other bytes under the same name")
    with pytest.raises(ReportRefused, match="about another wheel"):
        gate.judge(path)


@pytest.mark.parametrize("report", ["none", "missing", "short", "two short"])
def test_the_next_command_soaks_as_long_as_the_channel_asks(gate, report, monkeypatch):
    """The suite's own 20 seconds would be refused again, after another run of it."""
    asked = '{ "engine soak: seconds" = 3600 }'
    (gate.folder / "policy.toml").write_text(POLICY.replace('{ "soak: seconds" = 60 }', asked))
    monkeypatch.setattr(policy, "load_default", lambda project: gate.policy)
    reports = {
        "none": [],
        "missing": [gate.folder / "nowhere.json"],
        "short": [gate.write(gate.report())],
    }
    reports["two short"] = reports["short"] * 2
    project = locations.Project(gate.folder)
    with pytest.raises(ReportRefused) as caught:
        unit.approve("stable", gate.wheel, reports[report], project, NOW)
    command = f"python -m builder test {gate.wheel}"
    assert caught.value.next_step.startswith(f"VLLM_GLM5_SOAK_SECONDS=3600 {command}")
    with pytest.raises(ReportRefused) as caught:  # this channel asks for no soak
        unit.approve("stable-sm120", gate.wheel, reports[report], project, NOW)
    assert caught.value.next_step.startswith(command)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"age": timedelta(days=15)}, "15.0 days old"),
        ({"age": timedelta(hours=-1)}, "in the future"),
        ({"policy_sha256": "0" * 64}, "another policy"),
        ({"suite_hash": "0" * 64}, "another suite"),
        ({"gpus": ()}, "names no GPU"),
        ({"gpus": (H200, H200.__class__("NVIDIA L4", "8.9", 1))}, "NVIDIA L4 has compute"),
        ({"gpus": (H200.__class__("x", "hopper", 1),)}, "hopper"),
        ({"faults": ("the suite cannot be collected",)}, "cannot be collected"),
        ({"tests": ()}, "no test passed"),
        ({"tests": TESTS[:2]}, r"no test test_b.py::test_two\[x\], which is required"),
        (
            {"tests": (*TESTS[:2], result(TESTS[2].name, **{"soak: seconds": 59}))},
            "soak: seconds: 59, and at least 60",
        ),
        ({"tests": (*TESTS[:2], result(TESTS[2].name))}, "no figure 'soak: seconds'"),
        ({"tests": TESTS[1:]}, "no test test_a.py::. passed"),
        ({"tests": (*TESTS[:2], result("test_b.py::test_two[x]", Outcome.SKIPPED, "why"))}, "why"),
        ({"tests": (*TESTS, result("test_a.py::test_3", Outcome.NOT_RUN, "left out"))}, "left out"),
        ({"tests": (*TESTS, result("test_z.py::test_z", Outcome.FAILED, "boom"))}, "boom"),
        ({"tests": (*TESTS, result("test_z.py::test_z", Outcome.HANG, "60 s"))}, "hang: 60 s"),
        ({"tests": (*TESTS, result("test_z.py::test_z", Outcome.CRASH, "SIGSEGV"))}, "SIGSEGV"),
        ({"tests": (*TESTS, result("test_z.py::test_z", Outcome.GPU_LOST, "x"))}, "gpu-lost"),
    ],
)
def test_a_signed_report_that_breaks_a_rule_is_refused(gate, changes, reason):
    with pytest.raises(ReportRefused, match=reason) as caught:
        gate.judge(gate.write(gate.report(**changes)))
    assert not isinstance(caught.value, SignatureRefused)


def test_what_no_channel_requires_may_be_left_out(gate):
    left_out = (*TESTS, result("test_z.py::test_z", Outcome.NOT_RUN, "not selected"))
    assert gate.judge(gate.write(gate.report(tests=left_out)))


def test_sm120_takes_only_its_own_cards(gate):
    path = gate.write(gate.report(tests=TESTS[:1]))
    with pytest.raises(ReportRefused, match=r"H200 has compute capability 9\.0, not ==12"):
        gate.judge(path, "stable-sm120")
    assert gate.judge(gate.write(gate.report(tests=TESTS[:1], gpus=(RTX,))), "stable-sm120")


def test_a_channel_without_signatures(gate):
    path = gate.write(gate.report(tests=TESTS[:1]), signed=False)
    assert gate.judge(path, "nightly").signer is None


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("subject"),
        lambda d: d["subject"].append(d["subject"][0]),
        lambda d: d.update(predicateType="https://slsa.dev/provenance/v1"),
        lambda d: d["predicate"]["vllm-glm5"]["tests"][0].update(outcome="perfect"),
        lambda d: d["predicate"]["vllm-glm5"]["tests"].append(
            d["predicate"]["vllm-glm5"]["tests"][0]
        ),
        lambda d: d["predicate"]["configuration"].append(d["predicate"]["configuration"][0]),
        lambda d: d["predicate"]["vllm-glm5"].update(tests=None),
        lambda d: d["predicate"]["vllm-glm5"].update(finished="yesterday"),
        lambda d: d["predicate"].update(vllm=1, passedTests=[]),
        lambda d: d["predicate"].update(result="WARNED"),
    ],
)
def test_a_signed_file_that_is_no_whole_report_is_refused(gate, change):
    path = gate.write(gate.report())
    edited(path, change)
    signing.sign(path, gate.key, signing.REPORT)
    with pytest.raises(ReportRefused):
        gate.judge(path)


def leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield (*path, key)
        if isinstance(item, (dict, list)):
            yield from leaves(item, (*path, key))


JUNK = [None, -1, 1e400, -(10**400), "", "x", [], {}, True, "2026-11-29T11:00:00Z", [[]], {"a": {}}]


@pytest.mark.parametrize("junk", JUNK, ids=repr)
def test_junk_anywhere_is_refused_or_says_the_same(gate, junk):
    """No traceback, and what a reader takes from the other fields stays consistent."""
    data = gpu_report.render(gate.report())
    for path in leaves(json.loads(data)):
        document = json.loads(data)
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = junk
        try:
            found = gpu_report.parse(
                json.dumps(document).replace("Infinity", "1e400").encode(), "x"
            )
        except ReportRefused:
            continue
        assert {test.name for test in found.named(Outcome.PASSED)} == {
            "test_a.py::test_one", "test_b.py::test_two[x]",
        }  # fmt: skip


@pytest.mark.parametrize(("value", "said"), [(-(10**400), "not a GPU report"), (-9e99, "-9e")])
def test_a_figure_that_no_number_holds(gate, value, said):
    soak = result(TESTS[2].name, **{"soak: seconds": value})
    with pytest.raises(ReportRefused, match=said):
        gate.judge(gate.write(gate.report(tests=(*TESTS[:2], soak))))


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'{"a":1,"a":2}', b"[" * 100_000])
def test_bytes_that_are_no_report_are_refused(gate, data):
    path = gate.folder / "gpu-report.json"
    path.write_bytes(data)
    signing.sign(path, gate.key, signing.REPORT)
    with pytest.raises(ReportRefused, match="not a GPU report"):
        gate.judge(path)


def test_a_missing_report_is_refused(gate):
    with pytest.raises(ReportRefused, match="no report there"):
        gate.judge(gate.folder / "gpu-report.json")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('signers = ["gate", "gate-2"]', 'signature = "none"', "always requires a signature"),
        ('signers = ["gate", "gate-2"]', "", "signers are listed"),
        ('signers = ["gate", "gate-2"]', "signers = []", "signers are listed"),
        ('required-tests = ["test_a.py::*", "test_b', 'required-tests = [] #["', "is empty"),
        ('">=9.0"', '"hopper"', "compute capabilities"),
        ("max-age-days = 14", "", "max-age-days"),
        ("max-age-days = 14", "max-days = 14", "unknown max-days"),
        ("max-age-days = 14", "max-age-days = inf", "infinity"),
        ("max-age-days = 14", "max-age-days = nan", "NaN|nan"),
        ('capability = ">=9.0"', "capability = 9.0", "expected string"),
        ('allowed-signers = "allowed_signers"', "", "allowed-signers"),
        ("[channels.stable]", "[channels.stable", "TOML|Expected|end"),
    ],
)
def test_a_malformed_policy_is_refused(gate, old, new, reason):
    assert old in POLICY
    (gate.folder / "policy.toml").write_text(POLICY.replace(old, new, 1))
    with pytest.raises(PolicyError, match=reason):
        _ = gate.policy


@pytest.mark.parametrize("name", ["stable", "stable-sm120"])
def test_one_card_is_enough_for_the_shipped_policy(gate, name):
    """All passed but for what may be skipped; each of the others is missed."""
    project = locations.default_project()
    channel = policy.load_default(project).channel(name)
    found = [
        f"{path.name}::{test}"
        for path in sorted(project.suite.glob("test_*.py"))
        for test in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    skipped = [t for t in found if any(fnmatchcase(t, p) for p in channel.may_skip)]
    assert "test_many_gpus.py::test_each_size_computes_what_one_card_does" in skipped
    assert len(skipped) < len(found) / 2
    passed = [test for test in found if test not in skipped]

    def faults(without=()):
        tests = [
            result(t, Outcome.SKIPPED, "no") if t in (*skipped, *without) else result(t)
            for t in found
        ]
        soak = tests.pop(next(n for n, test in enumerate(tests) if "soak" in test.name))
        tests.append(result(soak.name, soak.outcome, **{"engine soak: seconds": 3600.0}))
        report = gate.report(
            tests=tuple(tests), gpus=(RTX if name == "stable-sm120" else H200,),
            policy_sha256=channel.policy_sha256, suite_hash=channel.suite_hash,
        )  # fmt: skip
        return policy.check(channel, report, NOW)

    assert faults() == []
    for test in passed:
        assert any(test in fault for fault in faults([test])), test
    assert "of which one at least is required" in str(faults(passed))


def test_the_shipped_policy():
    """Both channels exist, and each pattern of theirs means a test that is in the suite."""
    project = locations.default_project()
    shipped = policy.load_default(project)
    for name in ("stable", "stable-sm120"):
        channel = shipped.channel(name)
        assert channel.signers
        assert channel.allowed_signers.is_file()
        for pattern in (*channel.required_tests, *channel.may_skip):
            file, _, test = pattern.partition("::")
            text = (project.suite / file).read_text()
            assert test.strip("*") in text, pattern
    required = shipped.channel("stable").required_tests
    suites = {path.name for path in project.suite.glob("test_*.py")}
    assert {pattern.partition("::")[0] for pattern in required} == suites
    takes = {name: shipped.channel(name).capability for name in ("stable", "stable-sm120")}
    inside = {c: [n for n, r in takes.items() if r.contains(c)] for c in ("8.9", "9.0", "12.1")}
    assert inside == {"8.9": [], "9.0": ["stable"], "12.1": ["stable", "stable-sm120"]}
    with pytest.raises(PolicyError, match="no channel 'test'; it defines stable, stable-sm120"):
        shipped.channel("test")
