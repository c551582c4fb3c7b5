"""The alias wheel: both names answer, no file of the package is touched."""

from __future__ import annotations

import zipfile

import pytest

from builder.alias import write_alias

from .conftest import VERSION
from .wheels import write_wheel


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_alias(VERSION, folder)
    write_wheel(folder, "vllm-glm5", VERSION, {"vllm/__init__.py": "kept = True\n"})
    return folder


def test_bytes_follow_from_the_version(tmp_path):
    first = write_alias(VERSION, tmp_path / "first")
    second = write_alias(VERSION, tmp_path / "second")
    assert first.name == f"vllm-{VERSION}-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()
    assert write_alias("0.20.2+glm5.2", tmp_path / "first").read_bytes() != first.read_bytes()
    assert sorted(p.name for p in (tmp_path / "first").iterdir()) == [
        f"vllm-{VERSION}-py3-none-any.whl",
        "vllm-0.20.2+glm5.2-py3-none-any.whl",
    ]


def test_it_is_metadata_alone(tmp_path):
    with zipfile.ZipFile(write_alias(VERSION, tmp_path)) as archive:
        assert archive.testzip() is None
        assert {name.partition("/")[0] for name in archive.namelist()} == {
            f"vllm-{VERSION}.dist-info"
        }


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_both_names_are_installed(environment, wheels, installer):
    """A plugin that requires vllm is satisfied, and brings no other vllm."""
    write_wheel(wheels, "vllm", "0.19.0", {"vllm/__init__.py": "kept = False\n"})
    write_wheel(wheels, "a-plugin", "1", {"a_plugin.py": ""}, requires=["vllm>=0.19"])
    install = getattr(environment, installer)
    install("install", "--no-index", "--find-links", wheels, "a-plugin")
    shown = environment.code(
        "from importlib.metadata import files, version; import vllm;"
        "print(version('vllm'), version('vllm-glm5'), vllm.kept);"
        "print(sorted({f.parts[0] for f in files('vllm')}))"
    ).stdout.splitlines()
    assert shown[0] == f"{VERSION} {VERSION} True"
    assert shown[1] == str([f"vllm-{VERSION}.dist-info"])
    environment.pip("check")


def test_record_is_right(environment, wheels):
    """What is installed has the hashes and sizes that RECORD gives."""
    environment.pip("install", "--no-index", "--find-links", wheels, "vllm")
    shown = environment.code(
        "import base64, hashlib\n"
        "from importlib.metadata import files\n"
        "seen = 0\n"
        "for f in files('vllm'):\n"
        "    if f.hash is None: continue\n"
        "    data = f.locate().read_bytes()\n"
        "    digest = base64.urlsafe_b64encode(hashlib.new(f.hash.mode, data).digest())\n"
        "    assert digest.rstrip(b'=').decode() == f.hash.value, f\n"
        "    assert len(data) == f.size, f\n"
        "    seen += f.name in ('METADATA', 'WHEEL')\n"
        "print(seen)\n"
    ).stdout
    assert shown == "2\n"


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_it_requires_exactly_its_own_version(environment, tmp_path, installer):
    folder = tmp_path / "other"
    write_alias(VERSION, folder)
    write_wheel(folder, "vllm-glm5", "0.20.2+glm5.2", {"vllm/__init__.py": ""})
    install = getattr(environment, installer)
    refused = install("install", "--no-index", "--find-links", folder, "vllm", check=False)
    assert refused.returncode != 0
    assert f"vllm-glm5=={VERSION}" in refused.stdout + refused.stderr


def test_uninstalling_it_leaves_the_package(environment, wheels):
    environment.pip("install", "--no-index", "--find-links", wheels, "vllm")
    environment.pip("uninstall", "-y", "vllm")
    assert environment.code("import vllm; print(vllm.kept)").stdout == "True\n"
