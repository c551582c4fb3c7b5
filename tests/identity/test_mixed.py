"""Patch 0001: what importing vllm says where pip or uv installed both distributions.

The stand-in wheels hold the real modules that take part, and the real installers mix them.
"""

from __future__ import annotations

import os
import re
import shlex
import tomllib

import pytest

from builder.alias import write_alias
from builder.metadata import render_entry_points

from .conftest import VERSION
from .wheels import write_wheel

# The last lines of each __init__.py: which files are there, and that the engine loads plugins.
_ENGINE = "from vllm.plugins import load_general_plugins\n"
_IMPORT = "import vllm; print(vllm.whose)"
_SERVE = "import vllm; vllm.load_general_plugins(); print(vllm.whose)"


def _modules(tree, version: str) -> dict[str, str]:
    """Return those of vLLM's modules that the check passes through, none of which needs torch."""
    names = ["vllm/version.py", "vllm/envs.py", "vllm/plugins/__init__.py"]
    files = {name: (tree / name).read_text() for name in names}
    files["vllm/_version.py"] = f"__version__ = {version!r}\n__version_tuple__ = (0, 20, 2)\n"
    return files


@pytest.fixture
def wheels(tmp_path, patched_tree, base_tree):
    folder = tmp_path / "wheels"
    folder.mkdir()
    init = (patched_tree / "vllm" / "__init__.py").read_text()
    before_torch = init.partition("import typing")[0]
    assert "distribution" in before_torch, "the check must come before the first heavy import"
    project = tomllib.loads((patched_tree / "pyproject.toml").read_text())["project"]
    plugins = {
        name: target
        for name, target in project["entry-points"]["vllm.general_plugins"].items()
        if target.startswith("vllm.distribution:")
    }
    assert plugins, "pyproject.toml registers the check as a general plugin"
    write_wheel(
        folder, "vllm-glm5", VERSION,
        _modules(patched_tree, VERSION) | {
            "vllm/__init__.py": f"{before_torch}{_ENGINE}whose = 'ours'\n",
            "vllm/distribution.py": (patched_tree / "vllm" / "distribution.py").read_text(),
        },
        entry_points=render_entry_points({"vllm.general_plugins": plugins}),
    )  # fmt: skip
    init = (base_tree / "vllm" / "__init__.py").read_text().partition("import typing")[0]
    for version in ("0.20.2", "0.33.0"):
        write_wheel(
            folder, "vllm", version,
            _modules(base_tree, version) | {
                "vllm/__init__.py": f"{init}{_ENGINE}whose = 'upstream'\n",
            },
        )  # fmt: skip
    return folder


@pytest.fixture(params=["pip", "uv"])
def install(request, environment, wheels):
    def run(requirement: str) -> None:
        getattr(environment, request.param)(
            "install", "--no-index", "--find-links", wheels, requirement
        )

    return run


def _warnings(environment, source: str) -> tuple[str, list[str]]:
    done = environment.code(source)
    return done.stdout.strip(), re.findall(r"RuntimeWarning: .*", done.stderr)


def test_alone_it_is_silent(environment, install):
    install(f"vllm-glm5=={VERSION}")
    assert _warnings(environment, _SERVE) == ("ours", [])
    assert environment.code(_SERVE).stderr == ""


def test_upstream_alone_is_silent(environment, install):
    install("vllm==0.20.2")
    assert _warnings(environment, _SERVE) == ("upstream", [])


def test_ours_installed_last(environment, install):
    install("vllm==0.20.2")
    install(f"vllm-glm5=={VERSION}")
    whose, warnings = _warnings(environment, _IMPORT)
    assert whose == "ours"
    assert len(warnings) == 1
    assert f"The files in use are those of vllm-glm5 {VERSION}." in warnings[0]
    assert _warnings(environment, _SERVE) == (whose, warnings), "a plugin says it no second time"


def test_upstream_installed_last(environment, install):
    """Nothing of ours runs at import; the engine loads the plugin that says it."""
    install(f"vllm-glm5=={VERSION}")
    install("vllm==0.20.2")
    assert _warnings(environment, _IMPORT) == ("upstream", [])
    whose, warnings = _warnings(environment, _SERVE)
    assert whose == "upstream"
    assert len(warnings) == 1
    assert "The files of vllm 0.20.2 were written last" in warnings[0]


@pytest.mark.parametrize("last", [f"vllm-glm5=={VERSION}", "vllm==0.20.2"])
def test_what_it_says_repairs_it(environment, wheels, last):
    for requirement in ("vllm==0.20.2", f"vllm-glm5=={VERSION}", last):
        environment.pip(
            "install", "--no-index", "--find-links", wheels, "--force-reinstall", requirement
        )
    said = environment.code(_SERVE).stderr
    commands = re.findall(r"^ {4}(\S+ -m pip .*)$", said, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command)
        assert os.path.samefile(words[0], environment.python)
        options = ["--no-index", "--find-links", wheels] if "install" in words else []
        environment.run(*words, *options)
    assert _warnings(environment, _SERVE) == ("ours", [])


def test_the_alias_is_silent(environment, install, wheels):
    write_alias(VERSION, wheels)
    install(f"vllm=={VERSION}")
    assert environment.code("import importlib.metadata as m; print(m.version('vllm'))").stdout
    assert _warnings(environment, _SERVE) == ("ours", [])


def test_upstream_over_the_alias(environment, install, wheels):
    """The alias is vllm 0.20.2 to installers; another version replaces it, and that is said."""
    write_alias(VERSION, wheels)
    install(f"vllm=={VERSION}")
    install("vllm==0.20.2")
    assert _warnings(environment, _SERVE) == ("ours", [])
    install("vllm==0.33.0")
    whose, warnings = _warnings(environment, _SERVE)
    assert whose == "upstream"
    assert len(warnings) == 1


def test_another_folder_is_no_fault(environment, install, wheels, tmp_path):
    """Upstream's wheel in a system's folder, ours in an environment: nothing is shared."""
    other = tmp_path / "system"
    environment.pip(
        "install", "--no-index", "--find-links", wheels, "--target", other, "vllm==0.20.2"
    )
    install(f"vllm-glm5=={VERSION}")
    source = f"import sys; sys.path.append({str(other)!r}); {_SERVE}"
    assert _warnings(environment, source) == ("ours", [])


def test_an_interpreter_with_errors_for_warnings(environment, install):
    """Whoever makes warnings errors gets the message as the error."""
    install("vllm==0.20.2")
    install(f"vllm-glm5=={VERSION}")
    done = environment.run(environment.python, "-W", "error", "-c", _IMPORT, check=False)
    assert done.returncode == 1
    assert "pip uninstall -y vllm vllm-glm5" in done.stderr
