from __future__ import annotations

import pytest

from tests.gate import lab as labs


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dependencies")
    labs.write_dependencies(folder)
    return folder


@pytest.fixture(scope="session")
def tested_wheel(tmp_path_factory):
    return labs.write_tested_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def gpu_python(network, tmp_path_factory, tested_wheel, dependencies):
    folder = tmp_path_factory.mktemp("environment") / "env"
    return labs.make_environment(folder, tested_wheel, dependencies)


@pytest.fixture
def lab(tmp_path, tested_wheel, gpu_python):
    return labs.Lab(tmp_path, tested_wheel, gpu_python)
