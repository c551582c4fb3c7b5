"""The audit: whatever is changed in a wheel is named; an honest wheel passes."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zipfile

import pytest

from builder import audit
from builder.errors import AuditError
from tests.build import madeup
from tests.build.madeup import WHEEL_NAME as NAME

INFO = "vllm_glm5-9.1.0+glm5.1.dist-info"

SERIES = [
    *madeup.SERIES,
    ("Say more", {"README.md": "# vllm\n\nMore.\n"}),
    ("Need more", {"requirements/cuda.txt": lambda text: text + "gguf>=0.19\n"}),
]


@pytest.fixture(scope="module")
def built(build_wheel, tmp_path_factory):
    """The user of an honest wheel, and its bytes."""
    return build_wheel(tmp_path_factory.mktemp("audit"), SERIES)


def text(data, member, old, new):
    before = madeup.read_member(data, member).decode()
    assert old in before
    return {member: before.replace(old, new, 1).encode()}


def flipped(data, member):
    content = bytearray(madeup.read_member(data, member))
    content[len(content) // 2] ^= 1
    return {member: bytes(content)}


def tampered(data, changes=None, **options):
    return madeup.rewritten(data, changes or {}, **options)


def damaged_stream(data):
    """Flip a byte in the middle of the largest compressed stream."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        info = archive.getinfo("vllm/_moe_C.abi3.so")
    raw = bytearray(data)
    raw[info.header_offset + 1000] ^= 0xFF
    return bytes(raw)


def twice(data):
    out = io.BytesIO(data)
    with (
        pytest.warns(UserWarning, match="Duplicate name"),
        zipfile.ZipFile(out, "a") as archive,
    ):
        archive.writestr("vllm/engine.py", "import this\n")
    return out.getvalue()


def central_name(data):
    """The directory calls a member by another name than the member itself."""
    position = data.rindex(b"vllm/models/glm.py")
    return data[:position] + b"vllm/models/gml.py" + data[position + 18 :]


def wrong_method(data):
    position = data.index(b"PK\x01\x02")
    return data[: position + 10] + struct.pack("<H", 99) + data[position + 12 :]


def encrypted(data):
    position = data.index(b"PK\x01\x02")
    return data[: position + 8] + struct.pack("<H", 1) + data[position + 10 :]


CODE = "vllm/models/llama.py"  # a module that no patch touches
TAMPERED = {
    "a byte, RECORD as it was": (lambda d: tampered(d, flipped(d, CODE), fix_record=False), CODE),
    "a byte, RECORD fixed": (lambda d: tampered(d, flipped(d, CODE)), CODE),
    "a byte of a patched module": (lambda d: tampered(d, flipped(d, "vllm/engine.py")), "vllm/engine.py"),
    "a patched module as upstream's": (
        lambda d: tampered(d, {"vllm/engine.py": madeup.ENGINE.encode()}), "vllm/engine.py"),
    "a byte of an added module": (
        lambda d: tampered(d, flipped(d, "vllm/models/glm.py")), "vllm/models/glm.py"),
    "an extension, RECORD fixed": (
        lambda d: tampered(d, flipped(d, "vllm/_moe_C.abi3.so")), "vllm/_moe_C.abi3.so"),
    "an extension, RECORD as it was": (
        lambda d: tampered(d, flipped(d, "vllm/_moe_C.abi3.so"), fix_record=False),
        "vllm/_moe_C.abi3.so"),
    "a member added": (lambda d: tampered(d, {"vllm/evil.py": b"import os\n"}), "vllm/evil.py"),
    "a member added, not in RECORD": (
        lambda d: tampered(d, {"vllm/evil.py": b"import os\n"}, fix_record=False), "vllm/evil.py"),
    "a .pth file added": (lambda d: tampered(d, {"evil.pth": b"import os\n"}), "evil.pth"),
    "a member outside": (lambda d: tampered(d, {"../evil.py": b"x\n"}), "../evil.py"),
    "a data folder": (
        lambda d: tampered(d, {"vllm_glm5-9.1.0+glm5.1.data/scripts/sh": b"#!/bin/sh\n"}), "scripts/sh"),
    "a member removed": (lambda d: tampered(d, {CODE: None}), CODE),
    "a member removed, RECORD as it was": (
        lambda d: tampered(d, {CODE: None}, fix_record=False), CODE),
    "an added member removed": (
        lambda d: tampered(d, {"vllm/models/glm.py": None}), "vllm/models/glm.py"),
    "a member renamed": (lambda d: tampered(d, names={CODE: "vllm/models/lama.py"}), "vllm/models/la"),
    "a script without its mode": (
        lambda d: tampered(d, modes={"vllm/utils/run.sh": 0o644}), "vllm/utils/run.sh has mode 644"),
    "a module with a mode": (lambda d: tampered(d, modes={CODE: 0o755}), f"{CODE} has mode 755"),
    "the version file": (lambda d: tampered(d, text(d, "vllm/_version.py", "glm5", "glm6")),
                         "vllm/_version.py"),
    "METADATA name": (lambda d: tampered(d, text(d, f"{INFO}/METADATA", "vllm-glm5", "vllm-glm6")),
                      "METADATA Name"),
    "METADATA field": (lambda d: tampered(d, text(d, f"{INFO}/METADATA", "A made-up", "A made-down")),
                       "METADATA Summary"),
    "METADATA description": (lambda d: tampered(d, text(d, f"{INFO}/METADATA", "More.", "Less.")),
                             "METADATA has another description"),
    "a requirement added": (
        lambda d: tampered(d, text(d, f"{INFO}/METADATA", "Requires-Dist: regex",
                                   "Requires-Dist: evil\nRequires-Dist: regex")), "evil"),
    "a requirement changed": (
        lambda d: tampered(d, text(d, f"{INFO}/METADATA", "numba==0.65.0", "numba==0.65.1")), "numba"),
    "a requirement doubled": (
        lambda d: tampered(d, text(d, f"{INFO}/METADATA", "Requires-Dist: regex",
                                   "Requires-Dist: regex\nRequires-Dist: regex")), "regex"),
    "METADATA removed": (lambda d: tampered(d, {f"{INFO}/METADATA": None}), "METADATA"),
    "WHEEL tag": (lambda d: tampered(d, text(d, f"{INFO}/WHEEL", "cp38", "cp311")), f"{INFO}/WHEEL"),
    "WHEEL purelib": (lambda d: tampered(d, text(d, f"{INFO}/WHEEL", "Purelib: false", "Purelib: true")),
                      f"{INFO}/WHEEL"),
    "WHEEL removed": (lambda d: tampered(d, {f"{INFO}/WHEEL": None}), f"{INFO}/WHEEL"),
    "an entry point added": (
        lambda d: tampered(d, text(d, f"{INFO}/entry_points.txt", "vllm = vllm.main:main",
                                   "vllm = vllm.main:main\nls = vllm.main:main")), "entry_points.txt"),
    "another top level": (
        lambda d: tampered(d, {f"{INFO}/top_level.txt": b"vllm\nevil\n"}), "top_level.txt"),
    "another licence": (lambda d: tampered(d, {f"{INFO}/licenses/LICENSE": b"None.\n"}), "licenses/LICENSE"),
    "a file in dist-info": (lambda d: tampered(d, {f"{INFO}/direct_url.json": b"{}"}), "direct_url.json"),
    "another SBOM": (
        lambda d: tampered(d, text(d, f"{INFO}/sboms/vllm-glm5.cdx.json", '"CycloneDX"', '"Cyclone"')),
        "vllm-glm5.cdx.json"),
    "an SBOM with another patch": (
        lambda d: tampered(d, text(d, f"{INFO}/sboms/vllm-glm5.cdx.json", '"name": "0001-',
                                   '"name": "0009-')), "0009-"),
    "an SBOM that is no JSON": (
        lambda d: tampered(d, {f"{INFO}/sboms/vllm-glm5.cdx.json": b"[" * 5}), "SBOM"),
    "an SBOM of another shape": (
        lambda d: tampered(d, {f"{INFO}/sboms/vllm-glm5.cdx.json": b'{"metadata": []}'}), "SBOM"),
    "an SBOM added": (lambda d: tampered(d, {f"{INFO}/sboms/x.json": b"{}"}), "sboms/x.json"),
    "the SBOM removed": (lambda d: tampered(d, {f"{INFO}/sboms/vllm-glm5.cdx.json": None}), "SBOM"),
    "a second dist-info": (
        lambda d: tampered(d, {"vllm-9.1.0.dist-info/METADATA": b"Name: vllm\n"}), "2 .dist-info"),
    "a damaged stream": (damaged_stream, "vllm/_moe_C.abi3.so is damaged"),
    "a member twice": (twice, "vllm/engine.py"),
    "two names of one member": (central_name, "gml.py"),
    "a compression nobody knows": (wrong_method, NAME),
    "an encrypted member": (encrypted, NAME),
    "half a wheel": (lambda d: d[: len(d) // 2], NAME),
    "no wheel": (lambda _: b"<html>", NAME),
    "RECORD emptied": (lambda d: tampered(d, {f"{INFO}/RECORD": b""}, fix_record=False), "RECORD"),
    "RECORD garbled": (lambda d: tampered(d, {f"{INFO}/RECORD": b"a,b\n\x00"}, fix_record=False), NAME),
    "RECORD not text": (lambda d: tampered(d, {f"{INFO}/RECORD": b"\xff\xfe,"}, fix_record=False), NAME),
    "RECORD names more": (
        lambda d: tampered(d, {f"{INFO}/RECORD": madeup.read_member(d, f"{INFO}/RECORD")
                               + b"vllm/gone.py,sha256=x,1\n"}, fix_record=False), "vllm/gone.py"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_what_was_changed_is_named(built, verify, what):
    change, named = TAMPERED[what]
    data = change(built[1])
    assert data != built[1]
    with pytest.raises(AuditError) as caught:
        verify(data)
    assert named in str(caught.value)
    assert caught.value.exit_code == 16


def test_an_honest_wheel_passes(built, verify):
    result = verify(built[1])
    explained = {item.member: item.explained_by for item in result.differences}
    assert explained["vllm/engine.py"] == ("0001-Bugfix-Start-without-a-name.patch",)
    assert explained["vllm/_version.py"] == ("rename",)
    assert "vllm/models/llama.py" not in explained


def test_the_command_names_the_change_without_a_traceback(built, tmp_path):
    user, data = built
    good, bad = tmp_path / "good" / NAME, tmp_path / "bad" / NAME
    for path, content in ((good, data), (bad, tampered(data, flipped(data, CODE)))):
        path.parent.mkdir()
        path.write_bytes(content)
    assert "all explained" in user.ok("verify", good).stdout
    assert CODE in user.fails(16, "verify", bad)
    assert "no such file" in user.fails(16, "verify", tmp_path / NAME)
    bad.rename(tmp_path / "other-1.0-py3-none-any.whl")
    user.fails(16, "verify", tmp_path / "other-1.0-py3-none-any.whl")


def test_a_cached_result_never_hides_a_change(built, verify, monkeypatch):
    """A result is kept for just these bytes, this series and this audit."""
    user, data = built
    calls = []
    real = audit._audit
    monkeypatch.setattr(audit, "_audit", lambda *a, **k: calls.append(1) or real(*a, **k))
    first = verify(data)
    assert verify(data) == first
    assert not calls  # the build has audited these bytes
    with pytest.raises(AuditError):
        verify(tampered(data, flipped(data, CODE)))
    with pytest.raises(AuditError):
        verify(tampered(data, flipped(data, CODE)))
    assert len(calls) == 2  # a failure is never kept
    for record in (user.cache / "audits").glob("*.json"):
        record.write_text("{")
    assert verify(data) == first
    assert len(calls) == 3


def test_a_wheel_of_another_state_of_the_series_is_refused(built, upstream, verify):
    user, data = built
    kept = {p: p.read_bytes() for p in (user.project / "patches" / madeup.TAG).iterdir()}
    try:
        madeup.write_series(user.project, upstream, madeup.TAG, madeup.SERIES)
        with pytest.raises(AuditError, match="another state of the series"):
            verify(data)
    finally:
        folder = user.project / "patches" / madeup.TAG
        for path in folder.iterdir():
            path.unlink()
        for path, content in kept.items():
            path.write_bytes(content)
    verify(data)


def test_pip_would_not_notice(built, tmp_path):
    """Why the audit recomputes RECORD: an installer takes a wheel that was tampered with."""
    _, data = built
    wheel = tmp_path / NAME.replace("manylinux_2_35_x86_64", "linux_x86_64")
    wheel.write_bytes(tampered(data, flipped(data, CODE), fix_record=False))
    run = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--no-compile", "--target", str(tmp_path / "site"), str(wheel)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
