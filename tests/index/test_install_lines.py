"""The printed lines, run as printed: the wheel from one index, its dependency from the other."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from builder.index import publish
from builder.install_lines import PublicIndex, install_lines, simple_url

from .conftest import isolated_variables, served
from .wheels import write_wheel

VERSION = "0.20.2+glm5.1"
PUBLIC = PublicIndex("https://public.invalid/simple", configured=True)
PRINT = "import sys; from builder.install_lines import *; print(*install_lines(*sys.argv[1:]), sep='\\n')"


@pytest.fixture
def indexes(tmp_path):
    """A private index whose wheel needs what only the public one has."""
    private, public = tmp_path / "private index", tmp_path / "public index"
    publish(private, write_wheel(tmp_path, VERSION, requires=["a-dependency>=1"]))
    publish(public, write_wheel(tmp_path, "1.5", {"a_dependency.py": ""}, name="a-dependency"))
    return private / "staging", public / "staging" / "simple"


def printed(tmp_path, index, **variables):
    """Print the lines in a process of its own, as pip is configured there."""
    done = subprocess.run(
        [sys.executable, "-c", PRINT, str(index), VERSION],
        env=isolated_variables(tmp_path) | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize("tool", [0, 1], ids=["pip", "uv"])
@pytest.mark.parametrize("over_http", [False, True])
def test_they_run_as_printed(environment, indexes, tmp_path, tool, over_http):
    private, public = indexes
    if over_http:
        with served(private.parent) as server:
            lines = printed(tmp_path, f"{server.url}/staging", PIP_INDEX_URL=public.as_uri())
            environment.run(*shlex.split(lines[tool]))
    else:
        line = printed(tmp_path, private, PIP_INDEX_URL=public.as_uri())[tool]
        subprocess.run(
            ["sh", "-c", line], env=environment.variables, cwd=environment.folder, check=True,
            capture_output=True,
        )  # fmt: skip
    assert environment.version() == VERSION
    assert environment.version("a-dependency") == "1.5"


@pytest.mark.parametrize("tool", [0, 1], ids=["pip", "uv"])
def test_the_dependency_comes_from_the_public_index_alone(environment, indexes, tmp_path, tool):
    """The control of the test above."""
    private, _ = indexes
    empty = (tmp_path / "empty").as_uri()
    line = printed(tmp_path, private, PIP_INDEX_URL=empty)[tool]
    assert environment.run(*shlex.split(line), check=False).returncode


def test_the_form():
    pip, uv = install_lines("http://127.0.0.1:8080/staging", VERSION, public=PUBLIC)
    private, public = "http://127.0.0.1:8080/staging/simple/", "https://public.invalid/simple"
    wanted = f"install vllm-glm5=={VERSION}"
    assert pip == f"pip {wanted} --index-url {private} --extra-index-url {public}"
    assert uv == f"uv pip {wanted} --index {private} --default-index {public}"


@pytest.mark.parametrize("end", ["", "/", "/simple", "/simple/"])
def test_simple_is_added_once(tmp_path, end):
    assert simple_url(f"https://x.invalid/a{end}") == "https://x.invalid/a/simple/"
    assert simple_url(f"{tmp_path}{end}") == f"{tmp_path.as_uri()}/simple/"


def test_environment_goes_before_files(tmp_path):
    """As for pip itself, and unlike the order in which `pip config list` prints them."""
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://global.invalid/simple\n"
        "[install]\nindex-url = https://install.invalid/simple\n"
        "[download]\nindex-url = https://download.invalid/simple\n"
    )
    lines = printed(tmp_path, tmp_path, PIP_CONFIG_FILE=str(config))
    assert all("https://install.invalid/simple" in line for line in lines)
    lines = printed(
        tmp_path, tmp_path, PIP_CONFIG_FILE=str(config), PIP_INDEX_URL="https://env.invalid/simple"
    )
    assert all("https://env.invalid/simple" in line for line in lines)
    assert not any("install.invalid" in line for line in lines)


def test_pip_without_a_configured_index(tmp_path):
    """pip's default is asked from pip, since --index-url takes its place; uv has its own."""
    from pip._internal.models.index import PyPI

    pip, uv = printed(tmp_path, tmp_path)
    assert pip.endswith(f" --extra-index-url {PyPI.simple_url}")
    assert "--default-index" not in uv


def test_where_not_even_pip_tells(tmp_path):
    pip, uv = install_lines(tmp_path, VERSION, public=PublicIndex(None, configured=False))
    url = simple_url(tmp_path)
    assert pip == f"pip install vllm-glm5=={VERSION} --extra-index-url {url}"
    assert uv == f"uv pip install vllm-glm5=={VERSION} --index {url}"


@pytest.mark.parametrize(
    "url", ["https://user:s3cret@public.invalid/simple", "https://s3cret@public.invalid/simple"]
)
def test_credentials_are_not_printed(tmp_path, url):
    lines = printed(tmp_path, tmp_path, PIP_INDEX_URL=url)
    for line in lines:
        assert "s3cret" not in line
        assert "PUBLIC_INDEX" in shlex.split(line, comments=True)
        assert "credentials" in line.partition("#")[2]
    for line in install_lines(url, VERSION, public=PUBLIC):
        assert "s3cret" not in line
        assert "PRIVATE_INDEX" in shlex.split(line, comments=True)


@pytest.mark.parametrize(
    ("url", "option"),
    [
        ("http://10.0.0.1:8080", "--trusted-host 10.0.0.1:8080"),
        ("http://index.invalid/x", "--trusted-host index.invalid"),
        ("http://127.0.0.1:8080", None),
        ("http://localhost:8080", None),
        ("http://[::1]:8080", None),
        ("https://index.invalid", None),
    ],
)
def test_plain_http_beyond_loopback(url, option):
    """pip takes it with an option alone."""
    pip, uv = install_lines(url, VERSION, public=PUBLIC)
    assert pip.endswith(option) if option else "--trusted-host" not in pip
    assert "--trusted-host" not in uv


def test_an_index_without_a_release_is_installed_from_staging(tmp_path):
    """What `doctor --index dist/index` prints after a first build has to find the wheel."""
    assert simple_url(tmp_path) == f"{tmp_path.as_uri()}/simple/"
    (tmp_path / "staging" / "simple" / "vllm-glm5").mkdir(parents=True)
    assert simple_url(tmp_path) == f"{tmp_path.as_uri()}/staging/simple/"
    (tmp_path / "simple" / "vllm-glm5").mkdir(parents=True)
    assert simple_url(tmp_path) == f"{tmp_path.as_uri()}/simple/"
