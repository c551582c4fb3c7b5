"""METADATA and entry_points.txt that repack computes are those that real setuptools writes.

For each change, setuptools builds the tree before and the tree after; from the first one's files
and both trees the tool has to get the second one's: METADATA field by field (with the new name and
version), entry_points.txt byte by byte.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email import message_from_string

import pytest

from builder import metadata
from builder.errors import BuilderError, SeriesError, UnfaithfulModeError
from tests.build.madeup import write

VERSION = "9.1.0+glm5.1"

SETUP = """\
import os
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def get_requirements():
    def read(name):
        found = []
        for line in (ROOT / "requirements" / name).read_text().strip().split("\\n"):
            if line.startswith("-r "):
                found += read(line.split()[1])
            elif not line.startswith("--") and not line.startswith("#") and line.strip() != "":
                found.append(line)
        return found

    return [line for line in read("cuda.txt") if "vllm-flash-attn" not in line]


setup(version=os.environ["VLLM_VERSION_OVERRIDE"], install_requires=get_requirements()EXTRAS)
"""
DYNAMIC_EXTRAS = """, extras_require={
    "bench": ["pandas", "scipy >= 1"],
    "audio": ["av", "mistral_common[audio]"],
    "video": [],
}"""

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77.0.3,<81.0.0"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
authors = [{name = "vLLM Team"}]
license = "Apache-2.0"
license-files = ["LICENSE"]
readme = "README.md"
description = "An engine"
classifiers = [
    "Programming Language :: Python :: 3.10",
    "Intended Audience :: Developers",
]
requires-python = ">=3.10,<3.15"
dynamic = ["version", "dependencies", "optional-dependencies"]

[project.urls]
Homepage="https://example.invalid/vllm"
Slack="https://slack.example.invalid/"

[project.scripts]
vllm = "vllm.entrypoints.cli.main:main"

[project.entry-points."vllm.general_plugins"]
lora_hf = "vllm.plugins.hf:register"
lora_files = "vllm.plugins.files:register"

[tool.setuptools.packages.find]
include = ["vllm*"]
"""
STATIC = (
    PYPROJECT.replace(', "optional-dependencies"]', "]")
    + """
[project.optional-dependencies]
bench = ["pandas", "scipy >= 1"]
audio = ["av; python_version < '3.13'", "mistral_common[audio]"]
video = []
"""
)

TREE = {
    "README.md": "# vLLM\n\nAn engine.\n\n- größer\n\n    code\n",
    "LICENSE": "Apache\n",
    "setup.py": SETUP.replace("EXTRAS", DYNAMIC_EXTRAS),
    "pyproject.toml": PYPROJECT,
    "requirements/common.txt": (
        "# Common\nregex # for later\nnumpy\nrequests >= 2.26.0\n"
        "transformers >= 4.56.0, != 5.0.*, != 5.1.*\nfastapi[standard] >= 0.115.0\n"
        'setuptools>=77.0.3,<81.0.0; python_version > "3.11" # Needed by ninja\n'
        "outlines_core == 0.2.11\nxgrammar >= 0.1.32, < 1.0.0; platform_machine == 'x86_64' or "
        "platform_machine == 'aarch64'\n"
    ),
    "requirements/cuda.txt": (
        "# Common dependencies\n-r common.txt\n\n--extra-index-url https://example.invalid/whl\n"
        "numba == 0.65.0\ntorch==2.11.0\ntorchaudio==2.11.0\n"
        "vllm-flash-attn == 2.6\nflashinfer-python==0.6.8\n"
    ),
    "vllm/__init__.py": "",
}
STATIC_TREE = TREE | {"setup.py": SETUP.replace("EXTRAS", ""), "pyproject.toml": STATIC}


def change(path, old, new, tree=TREE):
    assert old in tree[path], (path, old)
    return {path: tree[path].replace(old, new)}


CASES = {
    "nothing": (TREE, {}),
    "requirement added": (TREE, change("requirements/cuda.txt", "torch==", "extra_one>=1,<2\ntorch==")),
    "requirement added at the end": (TREE, change("requirements/common.txt", "outlines", "zstandard\noutlines")),
    "requirement changed": (TREE, change("requirements/cuda.txt", "torch==2.11.0", "torch ==2.11.1")),
    "requirement removed": (TREE, change("requirements/common.txt", "regex # for later\n", "")),
    "requirements reordered": (TREE, change("requirements/common.txt", "regex # for later\nnumpy\n", "numpy\nregex\n")),
    "requirement extras": (TREE, change("requirements/common.txt", "numpy\n", "numpy[ fast,Big ] >= 1\n")),
    "marker added": (TREE, change("requirements/common.txt", "numpy\n", "numpy; sys_platform=='linux' and python_version<'3.14'\n")),
    "marker changed": (TREE, change("requirements/common.txt", '> "3.11"', '>= "3.12"')),
    "requirement by url": (TREE, change("requirements/common.txt", "numpy\n", "numpy @ https://example.invalid/numpy-1-py3-none-any.whl\n")),
    "requirement twice": (TREE, change("requirements/common.txt", "numpy\n", 'numpy>=1; python_version<"3.12"\nnumpy>=2; python_version>="3.12"\n')),
    "another file of requirements": (
        TREE, change("requirements/cuda.txt", "-r common.txt", "-r common.txt\n-r glm5.txt")
        | {"requirements/glm5.txt": "# ours\ngguf >= 0.17\n"},
    ),
    "script changed": (TREE, change("pyproject.toml", "cli.main:main", "cli.glm5:main")),
    "script added": (TREE, change("pyproject.toml", "[project.scripts]\n", '[project.scripts]\nvllm-glm5 = "vllm.glm5:main"\n')),
    "script removed": (TREE, change("pyproject.toml", 'vllm = "vllm.entrypoints.cli.main:main"\n', "")),
    "gui script": (TREE, change("pyproject.toml", "[project.scripts]", '[project.gui-scripts]\nview = "vllm.view:main"\n\n[project.scripts]')),
    "entry point changed": (TREE, change("pyproject.toml", "vllm.plugins.hf:register", "vllm.plugins.hf:other")),
    "entry point added": (TREE, change("pyproject.toml", "lora_hf =", 'glm5 = "vllm.glm5:register [bench]"\nlora_hf =')),
    "entry point group added": (TREE, change("pyproject.toml", "[tool.setuptools", '[project.entry-points."a.plugins"]\nz = "vllm.z:z"\nA = "vllm.a:a"\n\n[tool.setuptools')),
    "entry point group removed": (TREE, change("pyproject.toml", 'lora_hf = "vllm.plugins.hf:register"\nlora_files = "vllm.plugins.files:register"\n', "")),
    "all entry points removed": (TREE, {"pyproject.toml": PYPROJECT.partition("[project.scripts]")[0] + "[tool.setuptools.packages.find]\ninclude = ['vllm*']\n"}),
    "description": (TREE, change("pyproject.toml", "An engine", "An engine für GLM-5")),
    "classifier": (TREE, change("pyproject.toml", '    "Intended', '    "Environment :: GPU",\n    "Intended')),
    "requires-python": (TREE, change("pyproject.toml", ">=3.10,<3.15", ">=3.11, <3.15")),
    "url": (TREE, change("pyproject.toml", "[project.urls]\n", '[project.urls]\nIssues="https://example.invalid/issues"\n')),
    "author": (TREE, change("pyproject.toml", 'authors = [{name = "vLLM Team"}]', 'authors = [{name = "vLLM Team"}, {name = "Jöhn, D.", email = "j@example.invalid"}]')),
    "keywords added": (TREE, change("pyproject.toml", "requires-python", 'keywords = ["llm", "glm"]\nrequires-python')),
    "readme": (TREE, {"README.md": "# vLLM for GLM-5\n\nGröße.\n\n\n"}),
    "readme without an end": (TREE, {"README.md": "# vLLM\nfor GLM-5"}),
    "readme with CRLF": (TREE, {"README.md": "# vLLM\r\n\r\nfor GLM-5\r\n"}),
    "everything": (
        TREE,
        change("requirements/cuda.txt", "torch==2.11.0", "torch==2.11.1\ngguf>=0.17")
        | {"README.md": "# New\n"}
        | {"pyproject.toml": PYPROJECT.replace("An engine", "Another").replace("cli.main:main", "m:m")},
    ),
    "static extras: one changed": (STATIC_TREE, change("pyproject.toml", "scipy >= 1", "scipy >= 2", STATIC_TREE)),
    "static extras: marker": (STATIC_TREE, change("pyproject.toml", "< '3.13'", "< '3.14' or sys_platform == 'linux'", STATIC_TREE)),
    "static extras: one added": (STATIC_TREE, {"pyproject.toml": STATIC + 'glm5 = ["gguf>=0.17", "blake3"]\n'}),
    "static extras: one removed": (STATIC_TREE, change("pyproject.toml", 'bench = ["pandas", "scipy >= 1"]\n', "", STATIC_TREE)),
    "static extras and requirement": (
        STATIC_TREE,
        change("pyproject.toml", "scipy >= 1", "scipy >= 2", STATIC_TREE)
        | change("requirements/cuda.txt", "torch==2.11.0", "torch==2.11.1"),
    ),
    "requirement with static extras": (STATIC_TREE, change("requirements/cuda.txt", "torch==2.11.0", "torch==2.11.1")),
}  # fmt: skip


@pytest.fixture(scope="session")
def setuptools(folder, setuptools_wheel):
    """The setuptools, unpacked."""
    with zipfile.ZipFile(setuptools_wheel) as archive:
        archive.extractall(folder / "setuptools")
    return folder / "setuptools"


class Built:
    """The dist-info files of one tree."""

    def __init__(self, text, entry_points):
        self.metadata, self.entry_points = text, entry_points


# One process for all trees: setuptools is asked for the metadata of a wheel (PEP 517).
ASK = """
import os, sys
from pathlib import Path
from setuptools import build_meta
for name in sys.argv[2:]:
    if os.fork():
        status = os.wait()[1]
        if status: sys.exit(f"{name}: {status}")
        continue
    os.chdir(Path(sys.argv[1]) / name)
    out = Path("out"); out.mkdir()
    build_meta.prepare_metadata_for_build_wheel(str(out))
    os._exit(0)
"""


def read_built(folder):
    points = folder / "entry_points.txt"
    return Built(
        (folder / "METADATA").read_bytes().decode(), points.read_bytes() if points.exists() else b""
    )


@pytest.fixture(scope="session")
def built(folder, setuptools):
    """What setuptools writes for every tree: by name, and `before 0/1` for the two bases."""
    trees = {name: base | changed for name, (base, changed) in CASES.items()}
    trees |= {"before 0": TREE, "before 1": STATIC_TREE}
    for name, tree in trees.items():
        write(folder / "trees" / name, tree)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(setuptools), "LC_ALL": "C.UTF-8"}
    for version, names in (
        ("9.1.0", ["before 0", "before 1"]), (VERSION, list(CASES)),
    ):  # fmt: skip
        run = subprocess.run(
            [sys.executable, "-c", ASK, str(folder / "trees"), *names],
            env=environment | {"VLLM_VERSION_OVERRIDE": version},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
    return {
        name: read_built(next((folder / "trees" / name / "out").glob("*.dist-info")))
        for name in trees
    }


def reader(tree):
    return lambda path: tree[path].encode() if path in tree else None


def fields(text):
    """Read METADATA with Python's mail parser: name -> values in order, and the description."""
    parsed = message_from_string(text)
    names = {name.lower() for name in parsed}
    return {name: parsed.get_all(name) for name in names}, parsed.get_payload()


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_setuptools_writes(built, case):
    base, changed = CASES[case]
    before = built["before 1" if base is STATIC_TREE else "before 0"]
    old, new = reader(base), reader(base | changed)
    text = metadata.patched_metadata(before.metadata, old, new, VERSION, "13.0")
    expected, description = fields(built[case].metadata)
    expected["name"] = ["vllm-glm5"]
    found, found_description = fields(text)
    assert found == expected
    assert found_description == description
    points = metadata.patched_entry_points(before.entry_points, old, new)
    assert points == built[case].entry_points
    if case != "nothing":  # the control: setuptools does see the change
        same = built["before 1" if base is STATIC_TREE else "before 0"]
        now, was = fields(built[case].metadata), fields(same.metadata)
        for one in (now, was):
            one[0].pop("version")
        assert now != was or built[case].entry_points != same.entry_points


def test_only_what_changes_is_touched(built):
    """Every other line keeps upstream's bytes and place."""
    before = built["before 0"].metadata
    text = metadata.patched_metadata(before, reader(TREE), reader(TREE), VERSION, "13.0")
    expected = before.replace("Name: vllm\n", "Name: vllm-glm5\n", 1).replace(
        "Version: 9.1.0\n", f"Version: {VERSION}\n", 1
    )
    assert text == expected


@pytest.mark.parametrize("case", ["nothing", "everything"])
def test_a_whole_wheel_has_the_same_metadata(built, setuptools, tmp_path, case):
    """What the other tests ask setuptools for is what it puts into a wheel."""
    write(tmp_path / "tree", TREE | CASES[case][1])
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir",
         str(tmp_path / "out"), str(tmp_path / "tree")],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(setuptools), "LC_ALL": "C.UTF-8",
             "VLLM_VERSION_OVERRIDE": VERSION},
        check=True, capture_output=True,
    )  # fmt: skip
    with zipfile.ZipFile(next((tmp_path / "out").glob("*.whl"))) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        assert archive.read(name).decode() == built[case].metadata
        points = archive.read(name.replace("METADATA", "entry_points.txt"))
        assert points == built[case].entry_points


def test_flash_attn_is_left_out_off_cuda_12():
    lines = metadata.requirement_lines(reader(TREE), "13.0")
    assert not any("flash-attn" in line for line in lines)
    assert "vllm-flash-attn==2.6" in metadata.requirement_lines(reader(TREE), "12.9")
    assert metadata.requirement_lines(reader(TREE), "12.9")[0] == "regex"


# --- where METADATA does not follow from the tree, nothing is guessed -----------------------------


def test_requirements_that_do_not_come_from_the_files(built):
    official = built["before 0"].metadata.replace("Requires-Dist: numba==0.65.0\n", "")
    changed = change("requirements/cuda.txt", "torch==2.11.0", "torch==2.11.1")
    with pytest.raises(UnfaithfulModeError, match=r"numba==0\.65\.0") as caught:
        metadata.patched_metadata(official, reader(TREE), reader(TREE | changed), VERSION, "13.0")
    assert caught.value.where == "requirements/cuda.txt"
    assert "setup-py" in caught.value.next_step
    metadata.patched_metadata(official, reader(TREE), reader(TREE), VERSION, "13.0")


REPACKAGED = (
    "Requires-Dist: fastapi[standard]>=0.115.0",
    "Requires-Dist: fastapi[standard]<0.137,>=0.115.0",
)
CAPPED = change(
    "requirements/common.txt",
    "fastapi[standard] >= 0.115.0",
    "fastapi[standard] >= 0.115.0, < 0.137",
)


def test_a_repackaged_wheel_keeps_what_it_forbids(built):
    """Build 2 of vLLM 0.23.0 forbids a fastapi that its tree allows."""
    official = built["before 0"].metadata.replace(*REPACKAGED)
    assert official != built["before 0"].metadata
    other = change("requirements/cuda.txt", "torch==2.11.0", "torch==2.11.1")
    with pytest.raises(SeriesError, match="repackaged") as caught:
        metadata.patched_metadata(official, reader(TREE), reader(TREE | other), VERSION, "13.0")
    assert "fastapi[standard]<0.137,>=0.115.0" in caught.value.details[0]
    text = metadata.patched_metadata(
        official, reader(TREE), reader(TREE | other | CAPPED), VERSION, "13.0"
    )
    required = metadata.parse(text).values("Requires-Dist")
    assert "fastapi[standard]<0.137,>=0.115.0" in required
    assert "torch==2.11.1" in required


def test_a_field_that_does_not_come_from_the_project_table(built):
    official = built["before 0"].metadata.replace("Summary: An engine", "Summary: Other")
    changed = change("pyproject.toml", "An engine", "Another")
    with pytest.raises(UnfaithfulModeError, match="Summary"):
        metadata.patched_metadata(official, reader(TREE), reader(TREE | changed), VERSION, "13.0")


def test_a_readme_with_crlf_can_become_another(built):
    """The tree before holds CRLF, its METADATA line feeds."""
    crlf = TREE | CASES["readme with CRLF"][1]
    text = metadata.patched_metadata(
        built["readme with CRLF"].metadata, reader(crlf), reader(TREE), VERSION, "13.0"
    )
    assert fields(text)[1] == fields(built["nothing"].metadata)[1]


def test_a_description_that_is_not_the_readme(built):
    official = built["before 0"].metadata.replace("# vLLM", "# Other")
    changed = {"README.md": "# New\n"}
    with pytest.raises(UnfaithfulModeError, match="description"):
        metadata.patched_metadata(official, reader(TREE), reader(TREE | changed), VERSION, "13.0")


def test_entry_points_that_do_not_come_from_the_project_table(built):
    changed = change("pyproject.toml", "cli.main:main", "m:m")
    with pytest.raises(UnfaithfulModeError, match=r"entry_points\.txt"):
        metadata.patched_entry_points(
            b"[console_scripts]\nx = y:z\n", reader(TREE), reader(TREE | changed)
        )


@pytest.mark.parametrize("line", ["numpy >= >= 1", "-e ./local", "not a requirement", "x; y"])
def test_a_line_that_is_no_requirement_is_named(built, line):
    changed = change("requirements/common.txt", "numpy\n", f"{line}\n")
    with pytest.raises(BuilderError) as caught:
        metadata.patched_metadata(
            built["before 0"].metadata, reader(TREE), reader(TREE | changed), VERSION, "13.0"
        )
    assert "requirements/common.txt" in str(caught.value)
    assert line in str(caught.value)


def test_a_file_of_requirements_that_is_missing_is_named(built):
    changed = change("requirements/cuda.txt", "-r common.txt", "-r other.txt")
    with pytest.raises(BuilderError) as caught:
        metadata.patched_metadata(
            built["before 0"].metadata, reader(TREE), reader(TREE | changed), VERSION, "13.0"
        )
    assert "requirements/other.txt" in str(caught.value)


def test_a_project_table_that_is_wrong_is_named(built):
    changed = change("pyproject.toml", 'description = "An engine"', "description = 7")
    with pytest.raises(BuilderError) as caught:
        metadata.patched_metadata(
            built["before 0"].metadata, reader(TREE), reader(TREE | changed), VERSION, "13.0"
        )
    assert "pyproject.toml" in str(caught.value)


def test_parse_and_render_are_inverses(built):
    for one in built.values():
        assert metadata.render(metadata.parse(one.metadata)) == one.metadata
    folded = "Metadata-Version: 2.4\nName: x\nLicense: a\n        b\n        c\n\nbody\n\nmore\n"
    assert metadata.render(metadata.parse(folded)) == folded
