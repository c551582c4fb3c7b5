"""What all tests share: the real release's trees and wheel, and the rule about skipped tests."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

from tests.commands import ROOT, TAG, given_environment, run_builder

# These need torch, triton and the wheel's other dependencies; tests/upstream runs them in an
# environment that has those (test_in_vllm_environment.py).
IN_VLLM_ENVIRONMENT = ("benchmarks", "gguf", "gpu", "kernels", "selection")
collect_ignore = (
    [] if "VLLM_GLM5_TREE" in os.environ or "VLLM_GLM5_GPU" in os.environ
    else [name for name in IN_VLLM_ENVIRONMENT if (ROOT / "tests" / name).exists()]
)  # fmt: skip


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With VLLM_GLM5_REQUIRE_ALL, a skipped test is a failed one (CI sets it)."""
    outcome = yield
    report = outcome.get_result()
    required = os.environ.get("VLLM_GLM5_REQUIRE_ALL") and not item.get_closest_marker("gpu")
    if required and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} is required and was skipped: {report.longrepr}"


@pytest.fixture(scope="session")
def cache():
    from builder.locations import default_cache

    return default_cache()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder in memory where there is one: git waits for the disk at each commit."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("memory")
        return
    with tempfile.TemporaryDirectory(prefix="vllm-glm5-tests-", dir=memory) as name:
        yield Path(name)


@pytest.fixture(scope="session")
def network():
    """Skip where the package index is out of reach (CI requires it)."""
    from builder import package_index
    from builder.errors import PackageIndexError

    try:
        package_index.release_files("vllm", TAG[1:], package_index.pip_settings())
    except PackageIndexError as error:
        pytest.skip(str(error))


def pytest_generate_tests(metafunc):
    """Give TAG to the tests that tests.commands.each_release did not give each release in turn.

    Always as a parameter: what was made for one release is kept for another where `tag` is a
    fixture for some tests and a parameter for others.
    """
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    marked = any(
        "tag" in ([name.strip() for name in names.split(",")] if isinstance(names, str) else names)
        for names in given
    )
    if "tag" in metafunc.fixturenames and not marked and not hasattr(metafunc, "has_tag"):
        metafunc.parametrize("tag", [TAG], scope="session")


@pytest.fixture(scope="session")
def applied(network, cache, tag):
    """The real series as commits on the real release."""
    from builder import pipeline
    from builder.locations import default_project

    return pipeline.applied_series(tag, default_project(), cache)[2]


def _tree(applied, commit, cache):
    folder = cache.root / "test-trees" / commit
    if not folder.exists():
        scratch = folder.with_name(f".tmp-{commit}-{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        with (
            subprocess.Popen(
                ["git", "archive", commit], cwd=applied.repository.folder, stdout=subprocess.PIPE
            ) as archive,
            tarfile.open(fileobj=archive.stdout, mode="r|") as tar,
        ):
            tar.extractall(scratch, filter="data")
        try:
            scratch.rename(folder)
        except OSError:  # another session was quicker
            shutil.rmtree(scratch)
    return folder


@pytest.fixture(scope="session")
def setuptools_wheel(cache):
    """A setuptools that upstream's build wants, from the user's own index; kept in the cache."""
    folder = cache.root / "test-wheels"
    if not list(folder.glob("setuptools-*.whl")):
        scratch = folder / f".tmp-{os.getpid()}"
        run = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary",
             ":all:", "--dest", str(scratch), "setuptools>=77.0.3,<81.0.0"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if run.returncode:
            pytest.skip(f"no setuptools from the package index: {run.stderr[-300:]}")
        for wheel in scratch.glob("*.whl"):
            wheel.rename(folder / wheel.name)
        scratch.rmdir()
    return next(folder.glob("setuptools-*.whl"))


@pytest.fixture(scope="session")
def base_tree(applied, cache):
    """The release's own source tree, unpatched."""
    return _tree(applied, applied.base, cache)


@pytest.fixture(scope="session")
def patched_tree(applied, cache):
    """The source tree with the whole series."""
    return _tree(applied, applied.head, cache)


@pytest.fixture(scope="session")
def official_wheel(network, cache, tag):
    from builder import fetch, pin
    from builder.locations import default_project

    pinned = pin.load(default_project().pins, tag)
    return fetch.fetch(pinned, pinned.wheel("x86_64"), cache)


@pytest.fixture(scope="session")
def built(network, tmp_path_factory, tag):
    """The real wheel, built by the main command: the parsed JSON result, index included."""
    out = tmp_path_factory.mktemp("dist")
    return json.loads(run_builder("--tag", tag, "--out", out, "--json").stdout)


def _over(given, wheels, folder):
    """A Python that has these wheels, and else the packages of the given one, as links."""
    import zipfile

    def site_of(python):
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        run = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
        return Path(run.stdout.strip())

    subprocess.run([given, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = site_of(python)
    for entry in site_of(given).iterdir():
        if entry.name != "vllm" and not entry.name.startswith(("vllm-", "vllm_glm5-")):
            (site / entry.name).symlink_to(entry)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    required = _requires(wheels[0])
    plugin = [line.partition(": ")[2] for line in required if "vllm-gguf-plugin" in line]
    if plugin and not (site / "vllm_gguf_plugin").exists():  # upstream's wheel does without
        uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*uv, "--python", str(python), "--target", str(site), "gguf<0.20", *plugin],
                       env=_uv_environment(), check=True)  # fmt: skip
    return python


def _requires(wheel):
    """What a wheel requires without any extra: the lines of its METADATA."""
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return [
            line
            for line in archive.read(name).decode().splitlines()
            if line.startswith("Requires-Dist") and "extra ==" not in line
        ]


def _uv_environment():
    from builder import package_index

    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "UV_DEFAULT_INDEX": package_index.pip_settings().urls[0],
        "UV_NATIVE_TLS": "1",
    }


@pytest.fixture(scope="session")
def vllm_environment(built, cache, tag, tmp_path_factory):
    """A Python that has the built wheel and everything that it requires; kept in the cache.

    Where VLLM_GLM5_ENVIRONMENTS names a Python for the release, its packages are taken.
    """
    wheels = [path for path in (built["wheel"], built["alias"]) if path]
    if given := given_environment(tag):
        return _over(given, wheels, tmp_path_factory.mktemp("environment") / "venv")

    from builder import atomic

    # The alias has no dependencies of its own: a revision needs no new environment.
    alias = f"Requires-Dist: vllm=={built['version']}"
    requires = [line for line in _requires(built["wheel"]) if line != alias]
    key = hashlib.sha256("\n".join([sys.version, *requires]).encode()).hexdigest()[:16]
    folder = cache.root / "test-environments" / key
    python = folder / "bin" / "python"
    env = _uv_environment()
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", str(python)]
    with atomic.exclusive(folder, "the vLLM environment"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
            tools = ["pytest", "pytest-timeout", "hypothesis"]
            subprocess.run([*uv, "--quiet", *wheels, *tools], env=env, check=True)
            (folder / "complete").touch()
        installed = folder / "wheel.sha256"
        if not installed.exists() or installed.read_text() != built["sha256"]:
            installed.unlink(missing_ok=True)
            subprocess.run(
                [*uv, "--quiet", "--no-deps", "--reinstall", *wheels], env=env, check=True
            )
            installed.write_text(built["sha256"])
    return python


@pytest.fixture(scope="session")
def official_package(official_wheel, cache):
    """The official wheel unpacked: a folder that holds upstream's own package vllm."""
    folder = cache.root / "test-trees" / official_wheel.stem
    if not folder.exists():
        import zipfile

        scratch = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
        with zipfile.ZipFile(official_wheel) as archive:
            archive.extractall(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            shutil.rmtree(scratch)
    return folder
