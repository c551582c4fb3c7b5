"""Which mode is faithful follows from the paths that a series touches."""

from __future__ import annotations

import subprocess
import sys

import pytest

from builder.classify import Kind, Mode, choose_mode, kind_of, touched_paths
from builder.errors import SeriesError, UnfaithfulModeError
from tests.series.fork import CORE, FILES, message

PYPROJECT = """\
[build-system]
requires = ["setuptools"]

[project]
name = "vllm"
description = "Serving"
readme = "README.md"
license-files = ["LICENSE"]
dynamic = ["version", "dependencies"]

[project.scripts]
vllm = "vllm.main:main"

[tool.setuptools]
include-package-data = true

[tool.ruff]
line-length = 88
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("vllm/core.py", Kind.SHIPS),
        ("vllm/a/b/template.jinja", Kind.SHIPS),
        ("vllm/model_executor/configs/E=8,N=1.json", Kind.SHIPS),
        ("vllm/py.typed", Kind.SHIPS),
        ("vllm/csrc/x.py", Kind.SHIPS),
        ("vllm/grpc/engine.proto", Kind.BUILD),
        ("vllm/ext/x.cu", Kind.COMPILED),
        ("vllm/ext/x.h", Kind.COMPILED),
        ("csrc/ops.cu", Kind.COMPILED),
        ("csrc/README.md", Kind.COMPILED),
        ("cmake/utils.cmake", Kind.COMPILED),
        ("CMakeLists.txt", Kind.COMPILED),
        ("rust/src/lib.rs", Kind.COMPILED),
        ("Cargo.lock", Kind.COMPILED),
        ("setup.py", Kind.BUILD),
        ("setup.cfg", Kind.BUILD),
        ("MANIFEST.in", Kind.BUILD),
        ("pyproject.toml", Kind.METADATA),
        ("requirements/cuda.txt", Kind.METADATA),
        ("requirements/build/cuda.txt", Kind.NEVER),
        ("README.md", Kind.METADATA),
        ("LICENSE", Kind.METADATA),
        ("tests/test_core.py", Kind.NEVER),
        ("tests/kernels/x.cu", Kind.NEVER),
        ("docs/README.md", Kind.NEVER),
        ("benchmarks/b.py", Kind.NEVER),
        ("tools/vllm/x.py", Kind.NEVER),
        ("Dockerfile", Kind.NEVER),
    ],
)
def test_the_kind_of_a_path(path, kind):
    assert kind_of(path) is kind


@pytest.fixture
def touch(fork, developer):
    """Apply these changes, a patch each, on the release with a fuller pyproject.toml."""

    def act(*patches):
        developer.reset()
        developer.commit({"pyproject.toml": PYPROJECT}, "release\n")
        fork.release(FILES | {"pyproject.toml": PYPROJECT})
        fork.put({
            f"{n:04d}-p.patch": developer.patch(changes, f"Patch {n}")
            for n, changes in enumerate(patches, start=1)
        })  # fmt: skip
        return touched_paths(fork.apply())

    return act


def test_what_is_touched_and_by_which_patches(touch):
    found = touch(
        {"vllm/core.py": CORE + "x = 1\n", "vllm/new.py": "a = 1\n", "tests/t.py": "x = 1\n"},
        {"vllm/core.py": CORE + "x = 2\n", "vllm/notes.txt": None, "vllm/gone.py": "x = 1\n"},
        {"vllm/gone.py": None},
    )
    assert [(item.path, item.present, item.patches) for item in found] == [
        ("tests/t.py", True, ("0001-p.patch",)),
        ("vllm/core.py", True, ("0001-p.patch", "0002-p.patch")),
        ("vllm/new.py", True, ("0001-p.patch",)),
        ("vllm/notes.txt", False, ("0002-p.patch",)),
    ]
    assert {item.kind for item in found} == {Kind.SHIPS, Kind.NEVER}
    assert found[2].mode == 0o644


def test_nothing_is_touched_where_the_patches_cancel_out(touch):
    assert touch({"setup.py": "x = 1\n"}, {"setup.py": FILES["setup.py"]}) == ()
    assert touch() == ()
    assert choose_mode((), Mode.AUTO).mode is Mode.REPACK


def test_a_new_script_has_its_mode(touch, fork, developer):
    touch({"vllm/a.py": "x = 1\n"})
    (developer.folder / "vllm/run.sh").write_text("#!/bin/sh\n")
    (developer.folder / "vllm/run.sh").chmod(0o755)
    fork.put({"0001-p.patch": developer.patch({}, text=message("Run"))})
    (item,) = touched_paths(fork.apply())
    assert item.mode == 0o755


CHANGES = {
    "python": ({"vllm/core.py": CORE + "x = 1\n"}, Mode.REPACK),
    "a test alone": ({"tests/t.py": "x = 1\n"}, Mode.REPACK),
    "requirements": ({"requirements/cuda.txt": "-r common.txt\ntorch == 2.1\n"}, Mode.REPACK),
    "description": ({"pyproject.toml": PYPROJECT.replace('"Serving"', '"Fast"')}, Mode.REPACK),
    "script": (
        {"pyproject.toml": PYPROJECT.replace("vllm.main:main", "vllm.cli:main")}, Mode.REPACK,
    ),
    "extras": (
        {"pyproject.toml": PYPROJECT + '[project.optional-dependencies]\na = ["b"]\n'}, Mode.REPACK,
    ),
    "readme key": (
        {"pyproject.toml": PYPROJECT.replace("README.md", "OTHER.md")}, Mode.SETUP_PY,
    ),
    "license files": (
        {"pyproject.toml": PYPROJECT.replace('["LICENSE"]', '["LICENSE", "NOTICE"]')}, Mode.SETUP_PY,
    ),
    "dynamic": (
        {"pyproject.toml": PYPROJECT.replace(', "dependencies"]', "]")}, Mode.SETUP_PY,
    ),
    "name": ({"pyproject.toml": PYPROJECT.replace('name = "vllm"', 'name = "x"')}, Mode.SETUP_PY),
    "a tool's table": (
        {"pyproject.toml": PYPROJECT.replace("include-package-data = true", "zip-safe = false")},
        Mode.SETUP_PY,
    ),
    "build system": (
        {"pyproject.toml": PYPROJECT.replace('["setuptools"]', '["setuptools>=77"]')}, Mode.SETUP_PY,
    ),
    "pyproject goes": ({"pyproject.toml": None}, Mode.SETUP_PY),
    "setup.py": ({"setup.py": "from setuptools import setup\n\nsetup(name='x')\n"}, Mode.SETUP_PY),
    "MANIFEST.in": ({"MANIFEST.in": "include x\n"}, Mode.SETUP_PY),
    "csrc": ({"csrc/ops.cu": "int add(int a, int b) {\n  return b + a;\n}\n"}, Mode.SOURCE),
    "csrc and setup.py": (
        {"csrc/x.h": "int x;\n", "setup.py": "from setuptools import setup\n"}, Mode.SOURCE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_auto_picks_the_first_faithful_mode_and_less_is_refused(touch, case):
    changes, faithful = CHANGES[case]
    touched = touch({"vllm/other.py": "x = 1\n"}, changes)
    choice = choose_mode(touched, Mode.AUTO)
    assert (choice.mode, choice.faithful) == (faithful, faithful)
    order = [Mode.REPACK, Mode.SETUP_PY, Mode.SOURCE]
    for asked in order:
        if order.index(asked) >= order.index(faithful):
            assert choose_mode(touched, asked).mode is asked
            assert choose_mode(touched, asked).faithful is faithful
            continue
        with pytest.raises(UnfaithfulModeError) as caught:
            choose_mode(touched, asked)
        assert caught.value.where in changes
        assert "0002-p.patch" in caught.value.what
        assert "0001-p.patch" not in caught.value.what
        assert f"--mode {faithful}" in caught.value.next_step
    if faithful is not Mode.REPACK:
        assert any(path in choice.reason for path in changes)


def test_the_worst_path_decides_and_is_named(touch):
    touched = touch(
        {"vllm/core.py": CORE + "x = 1\n"}, {"setup.py": "x = 1\n"}, {"csrc/x.cu": "int x;\n"}
    )
    with pytest.raises(UnfaithfulModeError) as caught:
        choose_mode(touched, Mode.SETUP_PY)
    assert caught.value.where == "csrc/x.cu"
    assert "0003-p.patch" in caught.value.what


def test_a_patch_that_breaks_pyproject(touch):
    with pytest.raises(SeriesError, match="not valid TOML"):
        touch({"pyproject.toml": PYPROJECT + "oops\n"})


ODD = {
    "vllm.d/x.py", "vllm.d/x.txt", "vllm.d/CVS/x.txt", "vllm/a.b/x.py", "vllm/a.b/x.txt",
    "vllm/a.b/c/x.py", "vllm/CVS/x.txt", "vllm/CVS/x.py", "vllm/a/CVS/b/x.txt", "vllm/a/CVS/b/x.py",
    "vllm/a.b/CVS/x.py", "vllm/RCS/x.txt", "vllm/.svn/x.txt", "vllm/.svn/x.py", "vllm/.hidden/x.txt",
    "vllm/cvs/x.txt", "vllm-x/x.py", "vllm-x/x.txt", "vllm_more/x.json", "vllm/__init__.py",
    "vllm/build/x.txt", "vllm/x.txt", "vllm/.dot.py", "vllm/a/x..py", "vllm/ä b/x.txt",
}  # fmt: skip


def test_odd_paths_ship_in_repack_where_setuptools_takes_them(tmp_path):
    """The expected set is what setuptools itself builds, with all files listed as upstream does."""
    for path in ODD:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x = 1\n")
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "vllm"\nversion = "1"\n'
        '[tool.setuptools.packages.find]\nwhere = ["."]\ninclude = ["vllm*"]\n'
    )
    (tmp_path / "MANIFEST.in").write_text("global-include *\n")
    process = subprocess.run(
        [sys.executable, "-c", "from setuptools import setup; setup()",
         "-q", "build_py", "--build-lib", "out"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    built = {
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert "vllm/__init__.py" in built
    assert ODD - built >= {"vllm.d/x.py", "vllm/CVS/x.txt"}  # or the test would show nothing
    assert {path for path in ODD if kind_of(path) is Kind.SHIPS} == built
