"""repack against upstream's own setup.py, on a patch that changes every kind of thing that ships."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from email import message_from_bytes

import pytest

from tests.commands import ROOT, TAG, run_builder

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def patched_project(network, tmp_path_factory):
    """A copy of the project with one more patch, made by edit and export."""
    project = tmp_path_factory.mktemp("project")
    for name in ("upstream", "patches"):
        shutil.copytree(ROOT / name, project / name)
    tree = project / "tree"
    run_builder("--project", project, "edit", "--tag", TAG, "--worktree", tree)

    def edit(path, old, new):
        text = (tree / path).read_text()
        assert old in text
        (tree / path).write_text(text.replace(old, new, 1))

    edit("requirements/common.txt", "cloudpickle", "cloudpickle >= 2.0")
    edit("requirements/common.txt", "fastapi[standard] >=", "fastapi[all] >=")
    edit("requirements/cuda.txt", "quack-kernels>=0.3.3\n", "")
    edit(
        "pyproject.toml", "[project.scripts]\n", '[project.scripts]\nvllm-more = "vllm.more:main"\n'
    )
    edit("vllm/logger.py", "import logging\n", "import logging\n\n")
    (tree / "vllm" / "more.py").write_text("def main() -> None: ...\n")
    (tree / "vllm" / "more.jinja").write_text("{{ text }}\n")
    script = tree / "vllm" / "utils" / "more.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (tree / "vllm" / "collect_env.py").rename(tree / "vllm" / "collected_env.py")
    (tree / "vllm" / "utils" / "numa_wrapper.sh").unlink()
    reason = "A reason of more than twenty words " * 4
    message = f"[Test] Change a bit of everything\n\n{reason}\n\nDrop-When: never [a test]\n"
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    subprocess.run(["git", "commit", "-q", "-m", message], cwd=tree, check=True)
    (project / "patches" / TAG / "settings.toml").write_text("alias = true\n")
    run_builder("--project", project, "export", "--tag", TAG, "--worktree", tree,
                "--raise-revision")  # fmt: skip
    return project


@pytest.fixture(scope="module")
def both(patched_project):
    """The results of the two modes."""
    return [
        json.loads(
            run_builder("--project", patched_project, "--tag", TAG, "--mode", mode, "--json",
                        "--out", patched_project / mode, "--no-stage").stdout
        )
        for mode in ("repack", "setup-py")
    ]  # fmt: skip


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {
            i.filename: (i.CRC, i.file_size, i.external_attr >> 16 & 0o777)
            for i in archive.infolist()
        }


def read(wheel, suffix):
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith(suffix)))


def test_the_members_are_the_same_byte_for_byte(both):
    repack, setup_py = (contents(result["wheel"]) for result in both)
    apart = ("/RECORD", "/WHEEL", "_version.py", ".cdx.json", "/METADATA")
    same = {name for name in repack | setup_py if not name.endswith(apart)}
    assert {n: repack.get(n) for n in same} == {n: setup_py.get(n) for n in same}
    assert {"vllm/more.py", "vllm/more.jinja", "vllm/collected_env.py"} <= set(repack)
    assert not {"vllm/collect_env.py", "vllm/utils/numa_wrapper.sh"} & set(repack)
    assert repack["vllm/utils/more.sh"][2] == 0o755


def test_metadata_is_the_same_field_by_field(both, official_wheel):
    ours, theirs = (message_from_bytes(read(r["wheel"], "/METADATA")) for r in both)
    fields = set(ours) | set(theirs)
    assert {f: sorted(ours.get_all(f, [])) for f in fields} == {
        f: sorted(theirs.get_all(f, [])) for f in fields
    }
    requires = ours.get_all("Requires-Dist")
    before = message_from_bytes(read(official_wheel, "/METADATA")).get_all("Requires-Dist")
    assert "cloudpickle>=2.0" in requires
    assert "cloudpickle" in before
    assert any(r.startswith("fastapi[all]") for r in requires)
    assert not any(r.startswith("quack-kernels") for r in requires)
    assert requires.count(f"vllm=={both[0]['version']}") == 1
    assert ours["Name"] == "vllm-glm5"


def test_entry_points_are_the_same_text(both):
    ours, theirs = (read(result["wheel"], "/entry_points.txt") for result in both)
    assert ours == theirs
    assert b"vllm-more = vllm.more:main" in ours


def test_the_audit_explains_each_difference_by_the_patch(both):
    for result in both:
        explained = {d["member"]: d["explained_by"] for d in result["audit"]["differences"]}
        assert all("everything" in name for name in explained["vllm/more.py"])
        assert "vllm/utils/numa_wrapper.sh" in explained
