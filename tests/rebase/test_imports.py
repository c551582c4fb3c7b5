"""Imports that a patched tree cannot satisfy: a file that is only added applies everywhere."""

from __future__ import annotations

import pytest

from builder.imports import missing_imports
from tests.rebase.moving import ENGINE, NEW, OLD

UPSTREAM = {
    "vllm/__init__.py": "from vllm.core import Engine\n",
    "vllm/core.py": "import os\n\nclass Engine:\n    inner = 1\n\nA, B = 1, 2\n",
    "vllm/lazy.py": "def __getattr__(name):\n    return name\n",
    "vllm/late.py": (
        "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
        "if True:\n    def made():\n        hidden = 1\n"
        "for index in range(3):\n    pass\n"
    ),
    "vllm/pack/__init__.py": "",
    "vllm/pack/part.py": "x: int = 1\n",
    "vllm/broken.py": "def (:\n",
    "vllm/plain/ours.py": "x = 1\n",
}


def faults(text, **changed):
    tree = UPSTREAM | changed | {"vllm/ours.py": text}
    found = missing_imports(
        ["vllm/ours.py"],
        lambda path: tree[path].encode() if path in tree else None,
        lambda path: UPSTREAM[path].encode() if path in UPSTREAM else None,
    )
    return [(item.line, item.what) for item in found]


@pytest.mark.parametrize(
    "text",
    [
        "import vllm\nimport vllm.core\nimport vllm.pack.part as part\n",
        "from vllm import Engine, core, pack\n",
        "from vllm.core import Engine, A, B, os\n",
        "from vllm.lazy import anything\n",
        "from vllm.late import fast, made, index\n",
        "from vllm.pack import part\nfrom vllm.pack.part import x\n",
        "from vllm.core import *\n",
        "from vllm.broken import what\n",
        "import vllm._C\nfrom vllm._version import version\n",
        "import torch\nfrom torch import nothing\n",
        "from . import core\nfrom .core import Engine\nfrom .pack.part import x\n",
        "from vllm.plain import ours\n",  # a folder without __init__.py
        "from vllm_other import x\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.gone import x\n",
        "import typing\nif typing.TYPE_CHECKING:\n    import vllm.gone\n",
    ],
)
def test_what_is_there(text):
    assert faults(text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\nimport vllm.gone\n", [(2, "there is no module vllm.gone")]),
        ("from vllm.core import Engine, Old\n", [(1, "vllm.core has no Old")]),
        ("from vllm.core import inner\n", [(1, "vllm.core has no inner")]),
        ("from vllm.late import hidden\n", [(1, "vllm.late has no hidden")]),
        ("from vllm import gone\n", [(1, "vllm has no gone")]),
        ("from . import gone\n", [(1, "vllm has no gone")]),
        ("from .gone import x\n", [(1, "there is no module vllm.gone")]),
        ("from vllm.plain import gone\n", [(1, "there is no module vllm.plain")]),
        ("def f():\n    from vllm.gone import x\n", [(2, "there is no module vllm.gone")]),
        ("if True:\n    from vllm.pack import other\n", [(2, "vllm.pack has no other")]),
        (
            "if TYPE_CHECKING:\n    import vllm.gone\nelse:\n    import vllm.old\n",
            [(4, "there is no module vllm.old")],
        ),
    ],
)
def test_what_is_not(text, found):
    assert faults(text) == found


def test_upstreams_own_imports_are_its_own_matter():
    tree = UPSTREAM | {"vllm/core.py": "from vllm.optional import x\n"}
    read = {path: text.encode() for path, text in tree.items()}.get
    assert missing_imports(["vllm/core.py"], read, read) == ()


def test_a_clean_patch_is_marked_and_the_end_of_a_rebase_says_so(moving):
    ours = "from vllm.engine import load, Worker\n"
    new = ENGINE.replace("class Worker", "class OldWorker")
    case = moving(
        {"vllm/engine.py": ENGINE}, {"vllm/engine.py": new}, ("common ours", {"vllm/ours.py": ours})
    )
    said = case.fork.run("upstream", "--tag", OLD, "--onto", NEW).stdout
    assert "clean!" in said
    assert "\n!: it applies, and imports what this release does not have\n" in said
    assert "vllm/ours.py line 1: vllm.engine has no Worker" in said
    assert "vllm.engine has no Worker" in case.begin().stdout
    assert "vllm.engine has no Worker" in case.report
    assert "no Worker" in case.fork.run("contracts", "--tag", NEW, code=32).stderr
    case.fork.run("contracts", "--tag", OLD)
