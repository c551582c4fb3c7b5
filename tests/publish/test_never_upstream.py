"""A release whose dependencies require vllm: no line of ours ever brings upstream's wheel in.

The public index has a newer vllm, as the real one always will, and the plugin that requires it.
"""

from __future__ import annotations

import re
import shlex

import pytest

from builder import package_index
from builder.index import publish
from tests.commands import ROOT
from tests.index.conftest import Environment, served
from tests.index.wheels import UPSTREAM, write_wheel

from .test_install import KINDS, private

VERSION, NEXT = "0.33.0+glm5.1", "0.33.0+glm5.2"
TOOLS = pytest.mark.parametrize("tool_number", [0, 1], ids=["pip", "uv"])


@pytest.fixture
def public(tmp_path):
    """A public index: two versions of upstream's vllm, and of a plugin that requires it."""
    index = tmp_path / "public"
    for version in ("0.33.0", "99.0"):
        wheel = write_wheel(tmp_path, version, UPSTREAM, name="vllm", requires_python=None)
        publish(index, wheel)
    for name, version in (("a-plugin", "1.0"), ("a-plugin", "2.0"), ("another-plugin", "1.0")):
        files = {f"{name.replace('-', '_')}.py": f"version = {version!r}\n"}
        publish(index, write_wheel(tmp_path, version, files, name=name, requires=["vllm"]))
    with served(index) as server:
        yield f"{server.url}/staging/simple/"


def requiring(release, version=VERSION, alias=True):
    """Return a wheel as the series with ``alias = true`` builds it; no alias lies beside it."""
    own = [f"vllm=={version}"] if alias else []
    return release.wheel(version, requires=["a-plugin==1.0", *own])


def released(kind, request, release, tool, tmp_path, public, *wheels):
    """Publish to an index of that kind; return what it printed for each wheel."""
    index, who = private(kind, request, tmp_path, public)
    channel = []
    if kind.startswith("devpi"):  # the index's name is a channel, which the policy has to define
        channel = ["--channel", "stable-with-all"]
        policy = release.root / "ci" / "policy.toml"
        policy.write_text(policy.read_text().replace("stable-sm120", "stable-with-all")
                          .replace("==12.*", ">=9.0").replace('"test_a.py::*"]', '"test_b.py::*"]'))  # fmt: skip
    printed = []
    for wheel in wheels:
        arguments = (
            "publish",
            wheel,
            "--report",
            release.report(wheel),
            "--index",
            index,
            *channel,
        )
        printed.append(tool.json(*arguments, **who, PIP_INDEX_URL=public)["install"])
    return printed


@pytest.fixture
def lines(request, release, tool, tmp_path, public):
    """The lines for pip and uv of a wheel and its alias in a directory index."""
    (printed,) = released("directory", request, release, tool, tmp_path, public, requiring(release))
    return printed


def run(environment, line):
    return environment.run(*shlex.split(line, comments=True), check=False)


def state(environment):
    """Return both distributions' versions, and whose files are there."""
    code = (
        "import importlib.metadata as m\n"
        "for name in ('vllm-glm5', 'vllm'):\n"
        "    try: print(m.version(name))\n"
        "    except m.PackageNotFoundError: print('none')\n"
        "try:\n    import vllm; print(vllm.whose)\n"
        "except ImportError: print('nobody')\n"
    )
    return tuple(environment.run(environment.python, "-c", code).stdout.split())


def ours(version=VERSION):
    return (version, version, "ours")


@TOOLS
@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_lines(
    request, release, tool, tmp_path, environment, public, kind, tool_number
):
    (lines,) = released(kind, request, release, tool, tmp_path, public, requiring(release))
    line = lines[tool_number]
    assert f"vllm=={VERSION}" in shlex.split(line)
    done = run(environment, line)
    assert done.returncode == 0, done.stderr
    assert state(environment) == ours()
    assert environment.version("a-plugin") == "1.0"
    environment.pip("check")


@TOOLS
@pytest.mark.parametrize("kind", ["directory", "devpi-mirror"])
def test_without_the_requirement_upstreams_wheel_comes(
    request, release, tool, tmp_path, environment, public, kind, tool_number
):
    """The control of the test above: this wheel's lines are right for it, and the plugin undoes it."""
    wheel = requiring(release, alias=False)
    (lines,) = released(kind, request, release, tool, tmp_path, public, wheel)
    done = run(environment, lines[tool_number])
    assert done.returncode == 0, done.stderr
    assert state(environment)[1] == "99.0"


@TOOLS
def test_upgrade_and_uninstall(request, release, tool, tmp_path, environment, public, tool_number):
    wheels = [requiring(release, version) for version in (VERSION, NEXT)]
    first, second = released("directory", request, release, tool, tmp_path, public, *wheels)
    for line, version in ((first, VERSION), (second, NEXT), (first, VERSION)):
        done = run(environment, line[tool_number])
        assert done.returncode == 0, done.stderr
        assert state(environment) == ours(version)
        environment.pip("check")
    done = run(environment, f"{second[tool_number].replace(f'=={NEXT}', '')} --upgrade")
    assert done.returncode == 0, done.stderr
    assert state(environment) == ours(NEXT)
    installer = environment.uv if tool_number else environment.pip
    installer("uninstall", *([] if tool_number else ["-y"]), "vllm-glm5", "vllm")
    assert state(environment) == ("none", "none", "nobody")


@TOOLS
def test_what_is_installed_later(lines, environment, public, tool_number):
    """From the public index alone, where the alias is not: it stays, since it satisfies them."""
    assert run(environment, lines[tool_number]).returncode == 0
    installer = environment.uv if tool_number else environment.pip
    only = ["--default-index" if tool_number else "--index-url", public]
    installer("install", "another-plugin", *only)
    assert environment.version("another-plugin") == "1.0"
    assert state(environment) == ours()


UPGRADES = {
    "of everything": ["--upgrade", "another-plugin"],
    "of the plugin that the wheel pins": ["a-plugin==2.0"],
}


@TOOLS
@pytest.mark.parametrize("what", UPGRADES)
def test_an_upgrade_that_takes_the_alias_away(lines, tool, environment, public, tool_number, what):
    """What docs/index.md warns of, and what it says to do against it."""
    assert run(environment, lines[tool_number]).returncode == 0
    installer = environment.uv if tool_number else environment.pip
    only = ["--default-index" if tool_number else "--index-url", public]
    upgrade = [*UPGRADES[what], *only]
    if what == "of everything" and not tool_number:
        upgrade += ["--upgrade-strategy", "eager"]
    constraint = re.search(r"^ +(echo .*vllm==.*)$", SECTION, re.MULTILINE)[1]
    environment.run("sh", "-c", constraint.replace("0.33.0+glm5.N", VERSION))
    name = "UV_CONSTRAINT" if tool_number else "PIP_CONSTRAINT"
    (file,) = re.findall(rf"{name}=(\S+)`", SECTION)
    installer("install", *upgrade, check=False, **{name: file})
    assert state(environment) == ours()
    installer("install", *upgrade)
    assert state(environment)[1] == "99.0", "the control: this is how to lose it"
    said = tool.run("doctor", "--python", environment.python, code=21).error
    assert "are installed over each other" in said


def test_uv_with_the_public_index_as_an_extra_one(lines, environment, public):
    """uv goes to its extra indexes first, and takes a project from the first that has it.

    Nothing in a wheel or an index can help that: at best it refuses, at worst it never asks us.
    """
    words = shlex.split(lines[1], comments=True)
    wrong = ["--index-url", words[words.index("--index") + 1], "--extra-index-url", public]
    for wanted in ([f"vllm-glm5=={VERSION}"], [f"vllm-glm5=={VERSION}", f"vllm=={VERSION}"]):
        refused = environment.uv("install", *wanted, *wrong, check=False)
        assert refused.returncode
        assert f"no version of vllm=={VERSION}" in refused.stderr
    assert state(environment) == ("none", "none", "nobody")
    environment.uv("install", "a-plugin", *wrong)
    assert state(environment) == ("none", "99.0", "upstream")


@TOOLS
def test_a_plugin_on_the_printed_line(lines, environment, tool_number):
    """The plugin takes the alias; the control is the same line without vllm-glm5, for pip alone."""
    if not tool_number:
        alone = lines[0].replace(f"vllm-glm5=={VERSION} vllm=={VERSION}", "another-plugin")
        assert run(environment, f"{alone} --dry-run").stdout.rpartition("install")[2].split() == [
            "another-plugin-1.0",
            "vllm-99.0",
        ]
    done = run(environment, f"{lines[tool_number]} another-plugin")
    assert done.returncode == 0, done.stderr
    assert state(environment) == ours()
    assert environment.version("another-plugin") == "1.0"


PAGE = (ROOT / "docs" / "index.md").read_text()
SECTION = PAGE.partition("## A release that requires the alias")[2].partition("\n## ")[0]


@pytest.mark.parametrize("program", ["pip install ", "uv pip install "])
def test_the_lines_of_the_page(request, release, tool, tmp_path, environment, public, program):
    wheel = requiring(release)
    released("directory", request, release, tool, tmp_path, public, wheel)
    (line,) = (text.strip() for text in SECTION.splitlines() if text.startswith(f"    {program}"))
    index = (tmp_path / "private index").as_uri()
    for before, after in (
        ("0.33.0+glm5.N", VERSION), ("PRIVATE", index), ("PUBLIC_INDEX", public),
    ):  # fmt: skip
        assert before in line
        line = line.replace(before, after)
    done = run(environment, line)
    assert done.returncode == 0, done.stderr
    assert state(environment) == ours()


@TOOLS
def test_a_yanked_release_installs_by_the_line_that_was_printed(
    request, release, tool, tmp_path, environment, public, tool_number
):
    wheels = [requiring(release, version) for version in (VERSION, NEXT)]
    _, lines = released("directory", request, release, tool, tmp_path, public, *wheels)
    tool.run("yank", NEXT, "--index", tmp_path / "private index", "--reason", "wrong")
    done = run(environment, lines[tool_number])
    assert done.returncode == 0, done.stderr
    assert state(environment) == ours(NEXT)
    if tool_number:  # why the line names both: uv takes a yanked version only by name
        alone = lines[1].replace(f" vllm=={NEXT}", "") + " --reinstall"
        assert "was yanked" in run(environment, alone).stderr


@pytest.mark.resolve
@pytest.mark.timeout(300)
@TOOLS
def test_the_real_plugin_and_the_real_public_index(
    release, tool, tmp_path, empty_environment, network, tool_number
):
    """vllm-gguf-plugin, which requires vllm, beside upstream's real releases; nothing is installed."""
    environment = Environment(empty_environment)
    settings = package_index.pip_settings()
    bundle = settings.ca_bundle
    certificates = {"PIP_CERT": bundle, "SSL_CERT_FILE": bundle} if bundle else {}
    variables = {"UV_SYSTEM_CERTS": "1", **certificates}
    wheel = release.wheel(VERSION, requires=["vllm-gguf-plugin", f"vllm=={VERSION}"])
    arguments = ("publish", wheel, "--report", release.report(wheel), "--index", tmp_path / "index")
    line = tool.json(*arguments, PIP_INDEX_URL=settings.urls[0])["install"][tool_number]

    def resolved(*words):
        done = environment.run(*words, "--dry-run", **variables)
        found = done.stderr if tool_number else done.stdout.rpartition("Would install")[2]
        return set(re.findall(r"(?<![\w-])vllm(?:-gguf-plugin)?[-=]+(?=\d)[^\s]+", found))

    ours = resolved(*shlex.split(line, comments=True))
    separator = "==" if tool_number else "-"
    assert f"vllm{separator}{VERSION}" in ours
    assert any(name.startswith(f"vllm-gguf-plugin{separator}") for name in ours)
    if tool_number:  # the control: alone, the plugin brings upstream's; for pip that takes minutes
        alone = resolved("uv", "pip", "install", "vllm-gguf-plugin", "--default-index",
                         settings.urls[0])  # fmt: skip
        assert not any(VERSION in name for name in alone)
        assert any(name.startswith("vllm==") for name in alone)
