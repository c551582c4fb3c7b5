"""Each module that the series touches can be the first of vLLM's that a process imports.

A worker that is spawned for tensor parallelism unpickles the engine's config, and so begins with a
module that nobody else imports first: a circle of imports that the parent never met ends it there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PATCHES = Path(__file__).parent.parent.parent / "patches"

# Forked with everything loaded that is not vLLM's: 25 fresh interpreters would take minutes.
SCRIPT = """
import contextlib, importlib, json, os, sys, traceback

def in_a_fork(function):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = function()
        except BaseException:
            said = traceback.format_exc()[-3000:]
        with open(writer, "w") as out:
            out.write(said)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said

def foreign_modules():
    import vllm.model_executor.model_loader, vllm.v1.worker.gpu_worker
    return "\\n".join(name for name in sys.modules if name.split(".")[0] != "vllm")

def load(name):
    importlib.import_module(name)
    return ""

for name in in_a_fork(foreign_modules).splitlines():
    with contextlib.suppress(Exception):
        importlib.import_module(name)
failed = {name: said for name in json.load(sys.stdin) if (said := in_a_fork(lambda: load(name)))}
json.dump(failed, open(sys.argv[1], "w"))
"""


def touched_modules() -> list[str]:
    series = PATCHES / os.environ["VLLM_GLM5_TAG"] / "series"
    names = set()
    for line in series.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            text = (series.parent / line.strip()).read_text()
            names.update(re.findall(r"^\+\+\+ b/(vllm/\S+)\.py$", text, re.MULTILINE))
    return sorted(name.replace("/", ".").removesuffix(".__init__") for name in names)


def first_imports(modules: list[str], folder: Path) -> dict[str, str]:
    """Modules that fail when imported first, with the end of their traceback."""
    out = folder / "failed.json"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, out],
        input=json.dumps(modules), text=True, check=True, timeout=600, cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip
    return json.loads(out.read_text())


@pytest.mark.skipif(find_spec("vllm") is None, reason="this Python has no vLLM")
@pytest.mark.timeout(600)
def test_every_touched_module_can_come_first(tmp_path):
    modules = touched_modules()
    assert "vllm.v1.attention.backends.mla.triton_mla_sparse" in modules
    modules.remove("vllm.platforms.cuda")  # it cannot be imported without a driver
    failed = first_imports([*modules, "vllm.no_such_module"], tmp_path)
    assert list(failed) == ["vllm.no_such_module"], "\n".join(failed.values())
