"""The doctor, on environments that real installers made and broke; its commands repair them."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from builder.doctor import State, diagnose, examine, render
from builder.errors import MixedInstallError, ToolchainError
from builder.index import publish

from .wheels import UPSTREAM, write_alias, write_wheel

VERSION = "0.20.2+glm5.1"
BOTH_TOOLS = pytest.mark.parametrize("install", ["pip", "uv"], indirect=True)
OURS, THEIRS = f"vllm-glm5=={VERSION}", "vllm==0.20.2"


@pytest.fixture
def index(tmp_path):
    """Both distributions in one index: here nothing is public."""
    folder = tmp_path / "index"
    publish(folder, write_wheel(tmp_path, VERSION))
    publish(folder, write_wheel(tmp_path, "0.20.2", UPSTREAM, name="vllm"))
    publish(
        folder, write_wheel(tmp_path, "1", {"p.py": ""}, name="a-plugin", requires=["vllm>=0.1"])
    )
    return folder / "staging"


@pytest.fixture(autouse=True)
def _public_index(monkeypatch, index):
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.as_uri()}/simple")


@pytest.fixture
def install(request, environment, index):
    """Install with uv, or with the tool that the test is parametrised by."""
    tool = getattr(request, "param", "uv")

    def run(*requirements):
        environment.install_with(tool, f"{index.as_uri()}/simple", *requirements)

    return run


def broken(environment, index):
    """Return the diagnosis of a broken environment, and see that the command fails with it."""
    diagnosis = diagnose(environment.python, index=index)
    assert diagnosis.broken
    with pytest.raises(MixedInstallError) as caught:
        examine(environment.python, index=index)
    assert caught.value.exit_code == 21
    for command in diagnosis.commands:
        assert command in str(caught.value)
        assert command in render(diagnosis)
    return diagnosis


def repair(environment, diagnosis, index):
    for command in diagnosis.commands:
        environment.run(*shlex.split(command), PIP_INDEX_URL=f"{index.as_uri()}/simple")


def repaired(environment, index):
    assert diagnose(environment.python, index=index).state is State.HEALTHY
    assert environment.run(environment.python, "-c", "import vllm; print(vllm.whose)").stdout == (
        "ours\n"
    )


@BOTH_TOOLS
def test_healthy(environment, install):
    install(OURS)
    diagnosis = examine(environment.python)
    assert diagnosis.state is State.HEALTHY
    assert diagnosis.commands == ()
    assert VERSION in render(diagnosis)
    assert examine(environment.folder) == diagnosis, "the environment's folder will do"


def test_nothing(environment, index):
    diagnosis = examine(environment.python, index=index)
    assert diagnosis.state is State.NOTHING
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_upstream_only(environment, install, index):
    install(THEIRS)
    diagnosis = examine(environment.python, index=index)
    assert diagnosis.state is State.UPSTREAM
    repair(environment, diagnosis, index)
    repaired(environment, index)


@BOTH_TOOLS
@pytest.mark.parametrize("last", [OURS, THEIRS])
def test_both(environment, install, index, last):
    first = OURS if last == THEIRS else THEIRS
    install(first)
    install(last)
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.BOTH
    assert diagnosis.summary.endswith(f"the files are those of {last.replace('==', ' ')}")
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_a_mixture(environment, install, index, tmp_path):
    files = {"vllm/__init__.py": "whose = 'upstream'\n", "vllm/core.py": "shared = 2\n"}
    folder = tmp_path / "other"
    publish(folder, write_wheel(tmp_path, "0.21.0", files, name="vllm"))
    install(OURS)
    environment.install_with("pip", f"{folder.as_uri()}/staging/simple", "vllm==0.21.0")
    assert diagnose(environment.python).summary.endswith("those of vllm 0.21.0")
    (environment.site / "vllm" / "core.py").write_text("shared = 1\n")
    diagnosis = broken(environment, index)
    assert diagnosis.summary.endswith("a mixture of both")
    assert "vllm 0.21.0: 1 of the 2 files that tell them apart are its own" in diagnosis.details


@BOTH_TOOLS
def test_files_deleted_by_an_uninstall(environment, install, index):
    install(THEIRS)
    install(OURS)
    environment.pip("uninstall", "-y", "vllm")
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.DELETED
    assert "2 of the 2 files" in diagnosis.summary
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_upstream_deleted_by_an_uninstall(environment, install, index):
    install(OURS)
    install(THEIRS)
    environment.pip("uninstall", "-y", "vllm-glm5")
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.DELETED
    assert "2 of the 3 files of vllm 0.20.2" in diagnosis.summary
    repair(environment, diagnosis, index)
    assert diagnose(environment.python).state is State.UPSTREAM


@BOTH_TOOLS
def test_an_edited_file(environment, install, index):
    install(OURS)
    (environment.site / "vllm" / "core.py").write_text("shared = 'edited'\n")
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.EDITED
    assert "differs  vllm/core.py" in diagnosis.details
    repair(environment, diagnosis, index)
    repaired(environment, index)


@BOTH_TOOLS
def test_bytecode_is_no_fault(environment, install):
    """pip lists what it compiled in RECORD, uv compiles nothing; Python rewrites it at will."""
    install(OURS)
    environment.run(environment.python, "-c", "import vllm.core")
    caches = sorted(environment.site.glob("vllm/__pycache__/*.pyc"))
    assert len(caches) == 2
    caches[0].write_bytes(b"stale")
    caches[1].unlink()
    assert examine(environment.python).state is State.HEALTHY


@BOTH_TOOLS
def test_the_alias_is_no_fault(environment, install, index, tmp_path):
    publish(index.parent, write_alias(tmp_path, VERSION))
    install(f"vllm=={VERSION}", "a-plugin")
    diagnosis = examine(environment.python)
    assert diagnosis.state is State.HEALTHY
    assert [dist.alias for dist in sorted(diagnosis.installed, key=str)] == [True, False]
    assert "without files" in render(diagnosis)
    assert diagnosis.details == ()


def test_the_alias_alone(environment, install, index, tmp_path):
    publish(index.parent, write_alias(tmp_path, VERSION))
    install(f"vllm=={VERSION}")
    environment.pip("uninstall", "-y", "vllm-glm5")
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.ALIAS_ONLY
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_an_alias_of_another_version(environment, install, index, tmp_path):
    publish(index.parent, write_alias(tmp_path, VERSION))
    publish(index.parent, write_wheel(tmp_path, "0.20.2+glm5.2"))
    install(f"vllm=={VERSION}")
    environment.pip(
        "install", "--no-deps", "--index-url", f"{index.as_uri()}/simple",
        "vllm-glm5==0.20.2+glm5.2",
    )  # fmt: skip
    assert "install vllm==0.20.2+glm5.2" in render(examine(environment.python))


REQUIRING = "0.33.0+glm5.1"


@pytest.fixture
def requiring(index, tmp_path):
    """A wheel that requires its alias, in the index and as a file with the alias beside it."""
    folder = tmp_path / "files"
    wheel = write_wheel(folder, REQUIRING, requires=["a-plugin", f"vllm=={REQUIRING}"])
    for path in (write_alias(folder, REQUIRING), wheel):
        publish(index.parent, path)
    publish(index.parent, write_wheel(tmp_path, "99.0", UPSTREAM, name="vllm"))
    return wheel


@BOTH_TOOLS
@pytest.mark.parametrize("from_files", [False, True])
def test_upstream_over_a_required_alias(environment, install, index, requiring, from_files):
    """What an upgrade of everything does; the repair puts both back, and the next plugin is fine."""
    alias = requiring.with_name(f"vllm-{REQUIRING}-py3-none-any.whl")
    install(*([requiring, alias] if from_files else [f"vllm-glm5=={REQUIRING}"]))
    assert examine(environment.python).details == ()
    install("vllm==99.0")
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.BOTH
    last = shlex.split(diagnosis.commands[-1])
    assert (str(alias) if from_files else f"vllm=={REQUIRING}") in last
    repair(environment, diagnosis, index)
    repaired(environment, index)
    assert environment.version("vllm") == REQUIRING


def test_a_required_alias_that_is_missing(environment, install, index, requiring):
    install(f"vllm-glm5=={REQUIRING}")
    environment.pip("uninstall", "-y", "vllm")
    diagnosis = examine(environment.python)
    assert diagnosis.state is State.HEALTHY
    assert f"install vllm=={REQUIRING} from the same index" in diagnosis.details[0]
    assert "is missing" in diagnosis.details[0]


def test_an_edited_file_beside_the_alias(environment, install, index, requiring):
    """Only its files are put back: the alias stays where it is."""
    install(f"vllm-glm5=={REQUIRING}")
    (environment.site / "vllm" / "core.py").write_text("shared = 'edited'\n")
    diagnosis = broken(environment, index)
    assert len(diagnosis.commands) == 1
    repair(environment, diagnosis, index)
    repaired(environment, index)
    assert environment.version("vllm") == REQUIRING


def test_who_brings_upstream_in(environment, install, index):
    install(OURS)
    install("a-plugin")
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.BOTH
    assert any(line.startswith("a_plugin requires vllm") for line in diagnosis.details)


def test_leftovers_that_nothing_owns(environment, install, index):
    install(OURS)
    shutil.rmtree(next(environment.site.glob("vllm_glm5-*.dist-info")))
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.ORPHANED
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_an_uninstall_cut_short(environment, install, index):
    """A dist-info folder without METADATA and RECORD, which pip itself cannot remove."""
    install(OURS)
    dist_info = next(environment.site.glob("vllm_glm5-*.dist-info"))
    for name in ("METADATA", "RECORD"):
        (dist_info / name).unlink()
    diagnosis = broken(environment, index)
    assert diagnosis.state is State.DELETED
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_upstream_earlier_on_the_path(environment, install, index, tmp_path):
    install(OURS)
    other = tmp_path / "other"
    environment.pip("install", "--index-url", f"{index.as_uri()}/simple", "--target", other, THEIRS)
    (environment.site / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(other)!r})\n")
    assert broken(environment, index).state is State.SHADOWED


def test_upstream_later_on_the_path_is_no_fault(environment, install, index, tmp_path):
    install(OURS)
    other = tmp_path / "other"
    environment.pip("install", "--index-url", f"{index.as_uri()}/simple", "--target", other, THEIRS)
    (environment.site / "last.pth").write_text(f"{other}\n")
    assert examine(environment.python).state is State.HEALTHY


def test_one_folder_under_two_names(environment, install, tmp_path):
    """As where lib64 is a link to lib and both are on the path."""
    install(OURS)
    (tmp_path / "link").symlink_to(environment.site)
    (environment.site / "link.pth").write_text(f"{tmp_path / 'link'}\n")
    assert len(examine(environment.python).installed) == 1


def test_neither_variables_nor_the_working_folder_count(
    environment, install, tmp_path, monkeypatch
):
    install(OURS)
    fake = tmp_path / "fake"
    (fake / "vllm").mkdir(parents=True)
    (fake / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (fake / "json.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(fake))
    monkeypatch.chdir(fake)
    assert examine(environment.python).state is State.HEALTHY


def test_vllm_is_not_imported(environment, install, index):
    install(OURS)
    (environment.site / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    assert broken(environment, index).state is State.EDITED


def test_without_pip_the_commands_are_uvs(environment, install, index):
    install(THEIRS)
    install(OURS)
    shutil.rmtree(environment.site / "pip")
    diagnosis = broken(environment, index)
    assert all(command.startswith("uv pip ") for command in diagnosis.commands)
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_an_install_from_a_wheel_is_repaired_from_it(environment, index, tmp_path):
    wheel = write_wheel(tmp_path / "with space", VERSION)
    environment.pip("install", "--no-index", wheel)
    (environment.site / "vllm" / "core.py").unlink()
    diagnosis = broken(environment, None)
    assert shlex.quote(str(wheel)) in diagnosis.commands[0]
    repair(environment, diagnosis, index)
    repaired(environment, index)


def test_an_unknown_index_is_a_placeholder(environment, install, monkeypatch):
    install(OURS)
    (environment.site / "vllm" / "core.py").unlink()
    (command,) = broken(environment, None).commands
    assert "PRIVATE_INDEX" in shlex.split(command, comments=True)
    assert "PRIVATE_INDEX: " in command.partition("#")[2]


@pytest.mark.parametrize("python", ["absent/bin/python", "not-python"])
def test_no_interpreter(tmp_path, python):
    (tmp_path / "not-python").write_text("#!/bin/sh\necho no; exit 3\n")
    (tmp_path / "not-python").chmod(0o755)
    with pytest.raises(ToolchainError) as caught:
        examine(tmp_path / python)
    assert str(tmp_path / python) in str(caught.value)


def test_the_default_interpreter_is_examined():
    """The tool's own environment: whatever it holds, the examination ends."""
    assert diagnose(Path(sys.executable)).python == sys.executable
