from __future__ import annotations

import functools
import http.server
import threading

import pytest

from builder import index
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


@pytest.fixture(scope="session")
def indexes(dependencies, tmp_path_factory, network):
    """Variables for an index that has the made-up dependencies, beside the real one."""
    root = tmp_path_factory.mktemp("index")
    for wheel in dependencies.glob("*.whl"):
        index.publish(root, wheel, channel=index.STAGING)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"PIP_EXTRA_INDEX_URL": f"http://127.0.0.1:{server.server_port}/staging/simple/"}
        server.shutdown()
