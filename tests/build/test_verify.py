"""verify vouches for the bytes of a build: for its name, its RECORD and the zip file around it."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from tests.build import madeup
from tests.build.madeup import WHEEL_NAME as NAME

INFO = "vllm_glm5-9.1.0+glm5.1.dist-info"
RECORD = f"{INFO}/RECORD"
METADATA = f"{INFO}/METADATA"
CORE = "vllm/engine.py"


def record(data, change):
    text = change(madeup.read_member(data, RECORD).decode())
    return madeup.rewritten(data, {RECORD: text.encode()}, fix_record=False)


def metadata(data, change):
    return madeup.rewritten(data, {METADATA: change(madeup.read_member(data, METADATA))})


def around(data, change):
    """Write the zip file anew, each member with its method, date and mode, but for ``change``."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
        for info in source.infolist():
            copy = zipfile.ZipInfo(info.filename, info.date_time)
            copy.create_system, copy.external_attr = info.create_system, info.external_attr
            copy.compress_type = info.compress_type
            change(copy)
            target.writestr(copy, source.read(info))
    return out.getvalue()


def of_core(**attributes):
    def change(info):
        if info.filename == CORE:
            for name, value in attributes.items():
                setattr(info, name, value)

    return lambda data: around(data, change)


def hidden_entry(data):
    """A member that only a reader of local headers sees."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("vllm/evil.py", "import os")
    return out.getvalue()[: out.getvalue().index(b"PK\x01\x02")] + data


def with_comment(data):
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as archive:
        archive.comment = b"a comment"
    return out.getvalue()


def lying_local_header(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        at = archive.getinfo(CORE).header_offset + 14
    return data[:at] + struct.pack("<3L", 0x1234, 1, 1) + data[at + 12 :]


def unicode_path():
    extra = struct.pack("<BL", 1, zlib.crc32(CORE.encode())) + b"vllm/evil.py"
    return struct.pack("<HH", 0x7075, len(extra)) + extra


def head_reversed(core):
    head, _, body = core.partition(b"\n\n")
    first, *rest = head.split(b"\n")
    return b"\n".join([first, *reversed(rest)]) + b"\n\n" + body


CHANGED = {
    "RECORD names a foreign file": (
        lambda d: record(d, lambda t: t + "../../../important.txt,,\n"), "../../../important.txt"),
    "RECORD names another package": (
        lambda d: record(d, lambda t: t + "other/__init__.py,,\n"), "other/__init__.py"),
    "RECORD names a file twice": (
        lambda d: record(d, lambda t: f"{CORE},sha256=AAAA,1\n{t}"), f"{CORE} is listed in RECORD twice"),
    "RECORD without itself": (
        lambda d: record(d, lambda t: t.replace(f"{RECORD},,\n", "")), "RECORD is not listed in itself"),
    "RECORD with a hash of itself": (
        lambda d: record(d, lambda t: t.replace(f"{RECORD},,", f"{RECORD},sha256=x,1")), RECORD),
    "RECORD in another order": (
        lambda d: record(d, lambda t: "".join(sorted(t.splitlines(keepends=True)))), "RECORD line"),
    "a signature that nobody checks": (
        lambda d: madeup.rewritten(d, {f"{INFO}/RECORD.jws": b"x"}), "RECORD.jws"),
    "METADATA that begins with an empty line": (
        lambda d: metadata(d, lambda m: b"\n" + m), "METADATA is not one that installers read"),
    "METADATA with CRLF": (
        lambda d: metadata(d, lambda m: m.replace(b"\n", b"\r\n", 3)), "METADATA is not one that"),
    "METADATA with a control character": (
        lambda d: metadata(d, lambda m: m.replace(b"\n", b"\x0b\n", 1)), "METADATA is not one that"),
    "METADATA in another order": (lambda d: metadata(d, head_reversed), "METADATA line 2"),
    "METADATA with spaces in the description": (
        lambda d: metadata(d, lambda m: m + b"\n   \n"), "METADATA line"),
    "bytes before the archive": (lambda d: b"#!/bin/sh\n" + d, "10 bytes stand before the first member"),
    "bytes behind it": (lambda d: d + b"x", "in or behind"),
    "a hidden member": (hidden_entry, "bytes stand before the first member"),
    "a comment": (with_comment, "comment b'a comment'"),
    "a local header that lies": (lying_local_header, f"in or behind {CORE}"),
    "LZMA": (of_core(compress_type=zipfile.ZIP_LZMA), f"{CORE} is compressed by method 14"),
    "another date": (of_core(date_time=(2026, 1, 1, 0, 0, 0)), f"{CORE} is dated"),
    "a symbolic link": (of_core(external_attr=0o120644 << 16), f"{CORE} has mode lrw-r--r--"),
    "setuid": (of_core(external_attr=0o104644 << 16), f"{CORE} has mode -rwSr--r--"),
    "world-writable": (of_core(external_attr=0o100666 << 16), f"{CORE} has mode -rw-rw-rw-"),
    "another system": (of_core(create_system=0), f"{CORE} is of system 0"),
    "two names in one": (of_core(extra=unicode_path()), f"{CORE} has the extra field"),
    "the same content, all of it stored": (
        lambda d: madeup.rewritten(d, {}), "is compressed by method 0, 8 is expected"),
}  # fmt: skip


@pytest.fixture(scope="module")
def built(build_wheel, tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("verify"))


@pytest.mark.parametrize("what", CHANGED)
def test_bytes_that_no_build_writes_are_named(built, verify, what):
    from builder.errors import AuditError

    change, named = CHANGED[what]
    data = change(built[1])
    assert data != built[1]
    with pytest.raises(AuditError) as caught:
        verify(data)
    assert named in str(caught.value)


def test_a_wheel_is_verified_where_nobody_has_built_it(built, make_user, tmp_path):
    """The control of the others; and the rebuild is kept, so that the next one is quick."""
    user, data = built
    wheel = tmp_path / NAME
    wheel.write_bytes(data)
    other = make_user(project=user.project)
    first = other.ok("verify", wheel)
    assert "all explained" in first.stdout
    assert "build:" in first.stderr
    assert "build:" not in other.ok("verify", wheel).stderr
    wheel.write_bytes(data + b"x")
    other.fails(16, "verify", wheel)


@pytest.mark.parametrize(
    "name",
    [
        NAME.replace("2_35", "2_17"),
        NAME.replace("cp38-abi3-manylinux_2_35_x86_64", "py3-none-any"),
        NAME.replace("-cp38", "-99-cp38"),
        NAME.replace(".whl", ".zip"),
    ],
)
def test_another_file_name_is_refused(built, verify, name):
    """Installers and indexes go by it: an older glibc, another machine, a build number."""
    from builder.errors import AuditError

    verify(built[1])
    with pytest.raises(AuditError) as caught:
        verify(built[1], name)
    assert NAME in str(caught.value)


def test_a_wheel_of_another_revision_is_refused(make_user):
    """It was built honestly, with an N that the series never had, or has no more."""
    user = make_user()
    path = user.project / "patches" / user.tag / "revision"
    text = path.read_text()
    assert "revision = 1" in text
    path.write_text(text.replace("revision = 1", "revision = 77"))
    wheel = user.build()["wheel"]
    user.ok("verify", wheel)
    path.write_text(text)
    said = user.fails(16, "verify", wheel)
    assert "the wheel says revision 77 and the series is revision 1" in said


def test_what_a_foreign_line_in_record_does(built, tmp_path):
    """Why RECORD has to be the build's own: pip deletes what it lists when it uninstalls."""
    site = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", site], check=True)
    wheel = tmp_path / NAME.replace("manylinux_2_35_x86_64", "linux_x86_64")
    foreign = "foreign/__init__.py"
    wheel.write_bytes(record(built[1], lambda text: f"{text}{foreign},,\n"))
    pip = [sys.executable, "-m", "pip", "--python", str(site / "bin" / "python")]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)],
        check=True,
    )
    path = next(site.glob("lib/python3*/site-packages")) / foreign
    madeup.write(path.parent.parent, {foreign: "mine"})
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "vllm-glm5"], check=True)
    assert not path.exists()


# --- a series that changes upstream's build ---------------------------------------------------------

STEERED = {
    "a .pth file": ({"evil.pth": b"import os\n"}, "evil.pth"),
    "a package": ({"torch/__init__.py": b""}, "torch/__init__.py"),
    "a script": ({"vllm_glm5-9.1.0+glm5.1.data/scripts/ls": b"#!/bin/sh\n"}, "scripts/ls"),
    "a module": ({"vllm/evil.py": b""}, "vllm/evil.py"),
    "no module": ({"vllm/models/llama.py": None}, "vllm/models/llama.py"),
    "a generated module": ({"vllm/vendored/kernels.py": b"evil"}, "vllm/vendored/kernels.py"),
    "a library": ({"vllm/lib.so.1": b"x"}, "vllm/lib.so.1"),
    "an entry point": (
        {f"{INFO}/entry_points.txt": b"[console_scripts]\nvllm = evil:main\n"}, "entry_points.txt"),
    "a file in dist-info": ({f"{INFO}/evil.txt": b"x"}, "evil.txt"),
    "a requirement": (
        lambda m: m.replace(b"\nRequires-Dist", b"\nRequires-Dist: evil\nRequires-Dist", 1), "evil"),
}  # fmt: skip


def test_a_changed_build_is_run_again_and_explains_no_more_than_it_makes(make_user, tmp_path):
    setup = "# a comment\n" + madeup.SETUP_PY
    user = make_user((("[Core] Comment", {"setup.py": setup, "vllm/new.py": "A = 1\n"}),))
    result = user.build()
    assert result["mode"] == "setup-py"
    data = Path(result["wheel"]).read_bytes()
    wheel = tmp_path / Path(result["wheel"]).name
    wheel.write_bytes(data)
    user.ok("verify", wheel)
    for what, (changes, named) in STEERED.items():
        if callable(changes):
            wheel.write_bytes(metadata(data, changes))
        else:
            wheel.write_bytes(madeup.rewritten(data, changes))
        assert named in user.fails(16, "verify", wheel), what
