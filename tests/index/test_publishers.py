"""Several publishers at once, and publishers that are killed: each listed file installs."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from builder.index import list_wheels, publish
from tests.build.killing import Span

from .checking import listed, sha256
from .conftest import isolated_variables
from .wheels import write_wheel

PUBLISH = """
import pathlib, sys
from builder.errors import VersionExistsError
from builder.index import publish
print("ready", flush=True)
sys.stdin.readline()
try:
    for wheel in sys.argv[2:]:
        publish(pathlib.Path(sys.argv[1]), pathlib.Path(wheel))
except VersionExistsError:
    sys.exit(17)
"""

# Each filesystem step of a publication is an audit event of Python: the child dies at the n-th.
DIE_AT_EACH_STEP = """
import json, os, pathlib, shutil, signal, sys
from builder import console
from builder.index import publish
from tests.index.checking import listed
import filelock, tempfile, zipfile
index, wheel, first = map(pathlib.Path, sys.argv[1:])
steps = {"open", "os.rename", "os.remove", "os.chmod", "os.mkdir", "os.listdir", "os.scandir"}
killed = []
for n in range(1, 1000):
    shutil.rmtree(index, ignore_errors=True)
    publish(index, first)
    child = os.fork()
    if child == 0:
        seen = 0
        def hook(event, arguments):
            global seen
            if event in steps:
                seen += 1
                if seen == n:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        publish(index, wheel)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    names = listed(index / "staging" / "simple")
    assert first.name in names, n
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    killed.append(len(names))
    publish(index, wheel)
    assert listed(index / "staging" / "simple") == {first.name, wheel.name}, n
    assert not list(index.rglob(".vllm-glm5-tmp-*")), n
print(json.dumps(killed))
"""


def ready(index, wheels, tmp_path):
    """Start a publisher that has imported all it needs, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", PUBLISH, index, *wheels], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=isolated_variables(tmp_path),
    )  # fmt: skip
    assert process.stdout.readline() == b"ready\n"
    return process


def go(*processes):
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()


def start(index, wheel, tmp_path):
    process = ready(index, [wheel], tmp_path)
    go(process)
    return process


def finish(process):
    with process:
        error = process.stderr.read()
    return process.returncode, error.decode()


def test_eight_publishers_at_once(tmp_path):
    """Five wheels each, while a reader verifies what is listed; none is lost, not for a moment."""
    index = tmp_path / "index"
    wheels = [write_wheel(tmp_path, f"0.20.2+glm5.{n}") for n in range(1, 41)]
    publishers = [ready(index, wheels[n::8], tmp_path) for n in range(8)]
    stop = threading.Event()
    seen, faults = [], []

    def read():
        while not stop.is_set():
            try:
                seen.append(len(listed(index / "staging" / "simple")))
            except Exception as error:  # noqa: BLE001 - shown by the assertion below
                faults.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    go(*publishers)
    results = [finish(process) for process in publishers]
    stop.set()
    reader.join()
    assert [code for code, _ in results] == [0] * 8, results
    assert faults == []
    assert seen == sorted(seen), "a listed wheel does not disappear"
    assert any(0 < count < len(wheels) for count in seen), "the reader saw it grow"
    assert listed(index / "staging" / "simple") == {wheel.name for wheel in wheels}
    assert not list(index.rglob(".vllm-glm5-tmp-*"))


def test_eight_publishers_of_one_version(tmp_path):
    """Four with one content and four with another: one content wins, the others are told."""
    index = tmp_path / "index"
    contents = {"a": "one\n", "b": "two\n"}
    wheels = {
        key: write_wheel(tmp_path / key, "0.20.2+glm5.1", {"vllm/__init__.py": text})
        for key, text in contents.items()
    }
    publishers = [ready(index, [wheels[key]], tmp_path) for key in "abababab"]
    go(*publishers)
    codes = [finish(process)[0] for process in publishers]
    winner = "a" if codes[0] == 0 else "b"
    assert codes == [0 if key == winner else 17 for key in "abababab"]
    listed(index / "staging" / "simple")
    (entry,) = list_wheels(index, "staging")
    assert entry.sha256 == sha256(wheels[winner])


def test_what_a_dead_publisher_left_is_removed_by_the_next(wheel, tmp_path):
    """Also where nobody publishes that wheel again: it is 250 MB in life."""
    index = tmp_path / "index"
    noise = random.Random(1).randbytes(12 << 20)
    large = write_wheel(tmp_path, "0.20.2+glm5.9", {"vllm/x.so": noise})
    publisher = start(index, large, tmp_path)
    deadline = time.monotonic() + 20
    while not list(index.rglob(".vllm-glm5-tmp-*.whl-*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    publisher.kill()
    finish(publisher)
    assert list(index.rglob(".vllm-glm5-tmp-*.whl-*")), "it died while it copied"
    publish(index, wheel)
    assert not list(index.rglob(".vllm-glm5-tmp-*"))
    assert listed(index / "staging" / "simple") == {wheel.name}


def test_a_publisher_killed_at_each_step(tmp_path):
    first = write_wheel(tmp_path, "0.20.2+glm5.1")
    wheel = write_wheel(tmp_path, "0.20.2+glm5.2")
    done = subprocess.run(
        [sys.executable, "-c", DIE_AT_EACH_STEP, tmp_path / "index", wheel, first],
        env=isolated_variables(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    killed = json.loads(done.stdout)
    assert len(killed) > 20, "a publication has more steps than that"
    assert killed == sorted(killed), "once it is listed it stays listed"
    assert {1, 2} <= set(killed), "deaths both before and after the wheel was listed"


@pytest.mark.timeout(180)
def test_a_publisher_killed_at_any_moment(environment, tmp_path):
    """Thirty deaths by the clock, of a wheel large enough that most hit the copy."""
    index = tmp_path / "index"
    first = write_wheel(tmp_path, "0.20.2+glm5.1")
    publish(index, first)
    noise = random.Random(2).randbytes(12 << 20)
    wheel = write_wheel(tmp_path, "0.20.2+glm5.2", {"vllm/__init__.py": "", "vllm/x.so": noise})
    clock = random.Random(3)
    url = (index / "staging" / "simple").as_uri()
    timed = start(tmp_path / "timed", wheel, tmp_path)
    span = Span()
    assert span.of(lambda: finish(timed))[0] == 0
    deaths = leftovers = 0
    for round_ in range(30):
        process = start(index, wheel, tmp_path)
        after = clock.uniform(0, span.seconds)
        time.sleep(after)
        process.kill()
        code, _ = finish(process)
        deaths += code == -signal.SIGKILL
        if code == 0:
            span.saw(after)
        leftovers += bool(list(index.rglob(".vllm-glm5-tmp-*")))
        assert first.name in listed(index / "staging" / "simple")
        if round_ % 10 == 9:
            environment.install_with("pip", url, "vllm-glm5==0.20.2+glm5.1", "--force-reinstall")
        if publish(index, first).already_there and wheel.name in listed(index / "staging/simple"):
            shutil.rmtree(index)  # it got through: begin again
            publish(index, first)
    assert deaths >= 10
    assert leftovers >= 3, "some died in the middle of writing"
    assert finish(start(index, wheel, tmp_path))[0] == 0
    assert listed(index / "staging" / "simple") == {first.name, wheel.name}
    assert not list(index.rglob(".vllm-glm5-tmp-*"))
    environment.install_with("pip", url, "vllm-glm5==0.20.2+glm5.2")
    assert environment.version() == "0.20.2+glm5.2"


def test_a_wheel_is_never_in_memory(tmp_path):
    size = 200 << 20
    wheel = write_wheel(tmp_path, "0.20.2+glm5.1", {"vllm/x.so": bytes(size)})
    source = (
        "import pathlib, re, sys\n"
        "from builder.index import publish\n"
        "for _ in range(2): publish(*map(pathlib.Path, sys.argv[1:]))\n"
        # Not ru_maxrss: it begins with what the parent, this test session, has in memory.
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, tmp_path / "index", wheel],
        env=isolated_variables(tmp_path), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) * 1024 < 80 << 20
