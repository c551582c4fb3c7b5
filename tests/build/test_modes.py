"""The three build modes: when each is taken, and that they end in the same bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.build import madeup
from tests.commands import ROOT


def replaced(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new)

    return change


PYTHON_AND_DATA = [
    ("Change a file", {"vllm/engine.py": replaced("self.size + 1", "self.size + 2")}),
    ("Add a module", {"vllm/models/glm.py": "SIZES = [7]\n"}),
    ("Add a package of its own", {"vllm/new/__init__.py": "", "vllm/new/a.py": "A = 1\n"}),
    ("Add a top-level package", {"vllm_extra/__init__.py": "X = 1\n"}),
    ("Add data", {"vllm/templates/glm.jinja": "{{ glm }}\n", "vllm/data/x.json": "{}\n"}),
    ("Add an exec script", {"vllm/utils/new.sh": ("#!/bin/sh\nexit 1\n", 0o755)}),
    ("Delete a file", {"vllm/models/gpt.py": None}),
    ("Rename a file", {"vllm/models/llama.py": None, "vllm/models/llama2.py": "SIZES = [1, 2, 3]\n"}),
    ("Change CRLF", {"vllm/data/crlf.txt": b"one\r\nthree\r\n"}),
    ("Add what setuptools leaves out", {
        "vllm.d/x.py": "X = 1\n", "vllm.d/x.txt": "x\n", "vllm/CVS/x.txt": "x\n",
        "vllm/CVS/y.py": "Y = 1\n", "vllm/a.b/x.txt": "x\n",
    }),
    ("Tests and docs", {"tests/test_new.py": "def test_new():\n    pass\n", "docs/guide.md": "# New\n"}),
]  # fmt: skip
METADATA = [
    ("Change a requirement", {"requirements/cuda.txt": replaced("numba == 0.65.0", "numba >= 0.66")}),
    (
        "Change an extra and add a requirement",
        {
            "requirements/common.txt": lambda text: text.replace(
                "mistral_common[image]", "mistral_common[image,audio]"
            )
            + 'gguf >= 0.19 ; python_version < "3.14"\n'
        },
    ),
    (
        "Add a script and an entry point",
        {
            "pyproject.toml": replaced(
                'vllm = "vllm.main:main"\n', 'vllm = "vllm.main:main"\nvllm-glm = "vllm.main:main"\n'
            )
        },
    ),
    (
        "Add a plugin",
        {"pyproject.toml": replaced('[project.entry-points."vllm.general_plugins"]\n',
                                    '[project.entry-points."vllm.general_plugins"]\n'
                                    'glm = "vllm.plugins:register"\n')},
    ),
    ("Say more", {"README.md": "# vllm\n\nÜmlauts and more.\n"}),
    ("Other licence", {"LICENSE": "Another made-up licence.\n"}),
    ("Other Python", {"pyproject.toml": replaced(">=3.10,<3.15", ">=3.11,<3.15")}),
]  # fmt: skip


@pytest.mark.parametrize(
    "patches",
    [[*PYTHON_AND_DATA, *METADATA], []],
    ids=["everything", "nothing"],
)
def test_repack_and_setup_py_end_in_the_same_bytes(make_user, patches):
    user = make_user(patches)
    repacked = user.build()
    built = user.build("--mode", "setup-py", out=user.home / "cross")
    assert (repacked["mode"], built["mode"]) == ("repack", "setup-py")
    one = madeup.members(Path(repacked["wheel"]).read_bytes())
    two = madeup.members(Path(built["wheel"]).read_bytes())
    assert {n: two.get(n) for n in one} | two == one  # names what differs
    assert repacked["sha256"] == built["sha256"]


def test_setup_py_is_what_upstreams_own_build_makes(make_user, upstream, tmp_path):
    """The other side of the comparison is real: the members come from the patched tree."""
    user = make_user([*PYTHON_AND_DATA, *METADATA])
    wheel = Path(user.build()["wheel"])
    ours = madeup.members(wheel.read_bytes())
    official = madeup.members(upstream.official("x86_64"))
    info, old = "vllm_glm5-9.1.0+glm5.1.dist-info", "vllm-9.1.0.dist-info"
    assert {n.replace(old, info) for n in official} - ours.keys() == {
        "vllm/models/gpt.py",
        "vllm/models/llama.py",
    }
    assert ours.keys() - {n.replace(old, info) for n in official} == {
        "vllm/models/glm.py", "vllm/new/__init__.py", "vllm/new/a.py", "vllm_extra/__init__.py",
        "vllm/templates/glm.jinja", "vllm/data/x.json", "vllm/utils/new.sh",
        "vllm/models/llama2.py", "vllm/a.b/x.txt", "vllm/CVS/y.py", f"{info}/sboms/vllm-glm5.cdx.json",
    }  # fmt: skip
    assert ours["vllm/utils/new.sh"] == (b"#!/bin/sh\nexit 1\n", 0o755)
    assert ours["vllm/utils/run.sh"][1] & 0o111
    assert ours["vllm/data/crlf.txt"][0] == b"one\r\nthree\r\n"
    for extension in ("vllm/_C.abi3.so", "vllm/_moe_C.abi3.so", "vllm/vendored/kernels.py"):
        assert ours[extension] == official[extension]
    metadata = message_from_bytes(ours[f"{info}/METADATA"][0])
    assert (metadata["Name"], metadata["Version"]) == ("vllm-glm5", "9.1.0+glm5.1")
    assert metadata["Requires-Python"] == "<3.15,>=3.11"
    requires = metadata.get_all("Requires-Dist")
    assert "numba>=0.66" in requires
    assert "mistral_common[audio,image]>=1.11.0" in requires
    assert 'gguf>=0.19; python_version < "3.14"' in requires
    assert 'zentorch-weekly==5.2.1; extra == "zen"' in requires
    assert not any("flash-attn" in line for line in requires)
    entry_points = ours[f"{info}/entry_points.txt"][0].decode()
    assert "vllm-glm = vllm.main:main" in entry_points
    assert "glm = vllm.plugins:register" in entry_points
    assert b"9.1.0+glm5.1" in ours["vllm/_version.py"][0]
    assert upstream.commit()[:9].encode() in ours["vllm/_version.py"][0]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        big = archive.getinfo("vllm/_moe_C.abi3.so")
        assert big.compress_type == zipfile.ZIP_DEFLATED  # upstream's compressed bytes, not ours


def without_entry_points(text):
    start, end = text.index("[project.scripts]"), text.index("[tool.setuptools.packages.find]")
    assert "entry-points" in text[start:end]
    return text[:start] + text[end:]


def test_without_any_entry_point_there_is_no_file_of_them(make_user, tmp_path):
    """As setuptools has it; and the audit knows that it goes, and only then."""
    user = make_user([("Drop every entry point", {"pyproject.toml": without_entry_points})])
    repacked = user.build()
    built = user.build("--mode", "setup-py", out=user.home / "cross")
    assert (repacked["mode"], built["mode"]) == ("repack", "setup-py")
    assert repacked["sha256"] == built["sha256"]
    data = Path(repacked["wheel"]).read_bytes()
    name = "vllm_glm5-9.1.0+glm5.1.dist-info/entry_points.txt"
    assert name not in madeup.members(data)
    assert name.encode() not in madeup.read_member(data, name.replace("entry_points.txt", "RECORD"))
    wrong = tmp_path / Path(repacked["wheel"]).name
    wrong.write_bytes(madeup.rewritten(data, {name: b""}))
    assert name in user.fails(16, "verify", wrong)


@pytest.mark.parametrize(
    ("changes", "mode", "cause"),
    [
        ({"setup.py": replaced('"audio": ["soundfile"]', '"audio": ["soundfile", "x"]')}, "setup-py",
         "setup.py"),
        ({"pyproject.toml": replaced("setting = 1", "setting = 2")}, "setup-py", "pyproject.toml"),
        ({"MANIFEST.in": "graft .\n"}, "setup-py", "MANIFEST.in"),
    ],
    ids=["setup.py", "tool table", "manifest"],
)  # fmt: skip
def test_a_series_that_steers_the_build_is_built_by_setup_py(make_user, changes, mode, cause):
    user = make_user([("Steer the build", changes)])
    before = user.fails(13, "--tag", user.tag, "--mode", "repack")
    assert cause in before
    assert "0001-Steer-the-build.patch" in before
    result = user.build()
    assert result["mode"] == mode
    assert cause in result["reason"]
    if cause == "setup.py":
        data = Path(result["wheel"]).read_bytes()
        metadata = madeup.read_member(data, "vllm_glm5-9.1.0+glm5.1.dist-info/METADATA").decode()
        assert 'Requires-Dist: x; extra == "audio"' in metadata


@pytest.mark.parametrize("path", ["csrc/ops.c", "CMakeLists.txt", "vllm/fast.cu"])
def test_a_series_that_touches_compiled_files_needs_the_source_mode(make_user, path):
    user = make_user([("Touch compiled code", {path: "/* new */\n"})])
    for mode in ("repack", "setup-py"):
        said = user.fails(13, "--tag", user.tag, "--mode", mode)
        assert path in said
        assert "0001-Touch-compiled-code.patch" in said
        assert "--mode source" in said
    said = user.fails(14, "--tag", user.tag)  # auto takes source, and there is no nvcc
    assert "CUDA 13.0" in said
    assert not list((user.cache / "wheels").glob("*/*.whl"))


def test_source_without_nvcc_is_refused_before_any_work(user, tmp_path):
    said = user.fails(14, "--tag", user.tag, "--mode", "source", PATH="", CUDA_HOME="")
    assert "nvcc" in said
    assert "13.0" in said
    assert not (user.cache / "downloads").exists()
    assert not (user.cache / "vllm.git").exists()


def test_source_with_nvcc_of_another_cuda_is_refused(user, tmp_path):
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    said = user.fails(14, "--tag", user.tag, "--mode", "source", CUDA_HOME=str(tmp_path / "cuda"))
    assert "12.4" in said
    assert "13.0" in said


def test_source_compiles_what_the_series_changes(make_user, tmp_path):
    """End to end with a real compiler, on the release that needs no CUDA."""
    patches = [
        ("Answer", {"csrc/ops.c": replaced('"_C", NULL, -1', '"_C", "glm5 was here", -1')}),
        *madeup.SERIES,
    ]
    user = make_user(patches, tag=madeup.SOURCE_TAG)
    result = user.build()
    assert result["mode"] == "source"
    assert "csrc/ops.c" in result["reason"]
    data = madeup.members(Path(result["wheel"]).read_bytes())
    extension = next(n for n in data if n.startswith("vllm/_C") and n.endswith(".so"))
    assert b"glm5 was here" in data[extension][0]
    changed = {d["member"]: d["explained_by"] for d in result["audit"]["differences"]}
    assert extension in changed
    assert user.build()["sha256"] == result["sha256"]
    said = json.loads(user.ok("verify", result["wheel"], "--json").stdout)
    assert said["wheel_sha256"] == result["sha256"]
    wheel = tmp_path / Path(result["wheel"]).name
    raw = Path(result["wheel"]).read_bytes()
    wheel.write_bytes(raw)
    user.ok("verify", wheel)
    for changed, named in (
        (raw + b"x", "in or behind"),
        (madeup.rewritten(raw, {"evil.pth": b"import os\n"}), "evil.pth"),
        (madeup.rewritten(raw, {"../evil.py": b""}), "../evil.py"),
        (madeup.rewritten(raw, {}), "bytes are not those of a build"),
    ):
        wheel.write_bytes(changed)
        assert named in user.fails(16, "verify", wheel)
    older = wheel.with_name(wheel.name.replace("linux_", "manylinux_2_17_"))
    older.write_bytes(raw)
    assert "differ in their tags" in user.fails(16, "verify", older)
    # Other flags are another wheel: the cached one must not stand in for it.
    other = user.run("--tag", user.tag, "--out", tmp_path, "--no-stage", CC="/nonexistent/cc")
    assert other.returncode == 15
    assert "/nonexistent/cc" in other.stderr


def test_the_foreign_architecture_is_repacked(user, upstream):
    result = user.build("--arch", "aarch64")
    wheel = Path(result["wheel"])
    assert wheel.name == "vllm_glm5-9.1.0+glm5.1-cp38-abi3-manylinux_2_35_aarch64.whl"
    ours = madeup.members(wheel.read_bytes())
    official = madeup.members(upstream.official("aarch64"))
    assert ours["vllm/_C.abi3.so"] == official["vllm/_C.abi3.so"]
    assert b"aarch64" in ours["vllm_glm5-9.1.0+glm5.1.dist-info/WHEEL"][0]
    user.ok("verify", wheel)
    crossed = user.build("--arch", "aarch64", "--mode", "setup-py", out=user.home / "cross")
    assert crossed["sha256"] == result["sha256"]
    said = user.fails(18, "--tag", user.tag, "--arch", "riscv64")
    assert "aarch64, x86_64" in said


def test_a_cross_check_is_not_staged(user):
    index = user.home / "index"
    result = user.build("--mode", "setup-py", "--index", index, stage=True)
    assert not result["staged"]
    assert not index.exists()
    text = user.ok("--tag", user.tag, "--mode", "setup-py", "--index", index).stdout
    assert "cross-check" in text
    assert user.build("--index", index, stage=True)["staged"]
    assert list(index.glob("staging/**/*.whl"))


def test_a_second_build_does_nothing_again(user, index):
    first = user.build()
    index.served.clear()
    before = {p: p.stat().st_mtime_ns for p in user.cache.rglob("*") if p.is_file()}
    process = user.ok("--tag", user.tag, "--out", user.home / "dist", "--no-stage", "--json")
    assert json.loads(process.stdout)["sha256"] == first["sha256"]
    assert not index.served
    for word in ("download", "checkout", "apply:", "build:", "audit:"):
        assert word not in process.stderr
    after = {p: p.stat().st_mtime_ns for p in user.cache.rglob("*") if p.is_file()}
    assert before == {p: t for p, t in after.items() if not p.name.endswith(".lock")} | {
        p: t for p, t in before.items() if p.name.endswith(".lock")
    }


def test_a_damaged_wheel_in_the_cache_is_made_again(user):
    first = user.build()
    (cached,) = (user.cache / "wheels").glob("*/*.whl")
    data = bytearray(cached.read_bytes())
    data[1000] ^= 1
    cached.chmod(0o644)
    with cached.open("r+b") as file:  # in place: the delivered wheel is a link to it
        file.write(data)
    process = user.ok("--tag", user.tag, "--out", user.home / "dist", "--no-stage", "--json")
    again = json.loads(process.stdout)
    assert "damaged" in process.stderr
    assert again["sha256"] == first["sha256"]
    assert madeup.hashlib.sha256(Path(again["wheel"]).read_bytes()).hexdigest() == first["sha256"]


REPRODUCIBLE = {
    "another time zone and language": {"TZ": "Asia/Tokyo", "LC_ALL": "tr_TR.UTF-8", "LANG": "C"},
    "another hash seed": {"PYTHONHASHSEED": "1234"},
    "zlib-ng instead of zlib": {"PYTHONPATH": "zlib-ng"},
    "the user's git configuration": {
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "core.autocrlf", "GIT_CONFIG_VALUE_0": "true",
        "GIT_CONFIG_KEY_1": "commit.gpgsign", "GIT_CONFIG_VALUE_1": "true",
        "GIT_AUTHOR_NAME": "Somebody Else",
    },
}  # fmt: skip


@pytest.mark.parametrize("what", REPRODUCIBLE)
def test_other_surroundings_give_the_same_wheel(plain_sha256, user, what, tmp_path):
    expected, other = plain_sha256, user
    environment = dict(REPRODUCIBLE[what])
    if what.startswith("zlib"):
        site = tmp_path / "site"
        madeup.write(
            site,
            {
                "sitecustomize.py": "import sys\nfrom zlib_ng import zlib_ng\nsys.modules['zlib'] = zlib_ng\n"
            },
        )
        environment["PYTHONPATH"] = f"{site}:{ROOT}"
        probe = other.environment(**environment)
        code = "import zipfile; assert 'zlib_ng' in zipfile.zlib.__name__"
        subprocess.run([sys.executable, "-c", code], env=probe, check=True)
    assert other.build(**environment)["sha256"] == expected


@pytest.mark.parametrize("mode", ["repack", "setup-py"])
def test_another_umask_and_folder_give_the_same_wheel(make_user, mode, tmp_path):
    expected = make_user(PYTHON_AND_DATA).build()["sha256"]
    other = make_user(PYTHON_AND_DATA)
    deep = tmp_path / "with a space" / "and ümlaut"
    deep.mkdir(parents=True)
    out = deep / "dist"
    run = subprocess.run(
        ["sh", "-c", 'umask 077; exec "$@"', "sh",
         *other.command("--tag", other.tag, "--mode", mode, "--no-stage", "--json", "--out", out)],
        cwd=deep, env=other.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["sha256"] == expected


def test_the_sbom_is_valid_and_tells_no_secrets(user):
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    result = user.build()
    data = Path(result["wheel"]).read_bytes()
    text = madeup.read_member(
        data, "vllm_glm5-9.1.0+glm5.1.dist-info/sboms/vllm-glm5.cdx.json"
    ).decode()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"file"', '"no such type"')) is not None
    document = json.loads(text)
    assert "timestamp" not in text
    component = document["metadata"]["component"]
    names = [item["name"] for item in component["components"]]
    assert names == [patch["name"] for patch in result["patches"]]
    assert [item["hashes"][0]["content"] for item in component["components"]] == [
        patch["sha256"] for patch in result["patches"]
    ]
    beside = Path(result["wheel"] + ".provenance.json").read_text()
    statement = json.loads(beside)
    assert statement["subject"][0]["digest"]["sha256"] == result["sha256"]
    assert statement["predicate"]["buildDefinition"]["externalParameters"]["mode"] == "repack"
    for secret in (str(user.home), str(user.cache), str(ROOT), "127.0.0.1", "dev@vllm.invalid"):
        assert secret not in text
        assert secret not in beside


def test_a_wheel_from_another_disk_is_copied(user, tmp_path):
    """Where no hard link can be made, the wheel is a copy, whole or not there."""
    first = user.build()
    other = Path("/dev/shm") / f"vllm-glm5-test-{tmp_path.name}"
    if not other.parent.is_dir() or other.parent.stat().st_dev == user.cache.stat().st_dev:
        pytest.skip("no other file system at hand")
    try:
        copied = user.build(out=other)
        assert copied["sha256"] == first["sha256"]
        assert sorted(p.name for p in other.iterdir()) == sorted(
            p.name for p in Path(first["wheel"]).parent.iterdir()
        )
        stale = Path(copied["wheel"])
        stale.write_bytes(b"something else under that name")
        user.build(out=other)
        assert madeup.hashlib.sha256(stale.read_bytes()).hexdigest() == first["sha256"]
    finally:
        shutil.rmtree(other, ignore_errors=True)
