"""Wrong uses and odd surroundings, as a user at a terminal has them: each ends in words that help."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.build import madeup

WRONG = {
    "a tag without its v": (3, ["series", "--tag", "9.1.0"], ["upstream's tag has a v: --tag v9.1.0"]),
    "a path as the tag": (3, ["series", "--tag", "../v9.1.0"], ["no pin for '../v9.1.0'"]),
    "a tag like a folder": (
        3, ["series", "--tag", "v9.1.0/"], ["a tag is no folder: --tag v9.1.0\n"]),
    "a tag like a pin's folder": (
        3, ["series", "--tag", "v7.7.7/"], ["or pin a release: python -m builder pin v0.20.2"]),
    "a release without a pin": (
        3, ["series", "--tag", "v7.7.7"], ["write a pin with: python -m builder pin v7.7.7"]),
    "no tag": (3, ["series", "--tag", ""], ["pinned: v9.1.0"]),
    "an architecture nobody builds": (18, ["--tag", "v9.1.0", "--arch", "riscv"], ["aarch64, x86_64"]),
    "verify nothing": (16, ["verify", "nothing.whl"], ["no such file"]),
    "verify a folder": (16, ["verify", "/tmp"], ["/tmp: no file"]),
    "verify another file": (
        16, ["verify", __file__], ["not the file name of a vllm-glm5 wheel"]),
    "doctor for no Python": (14, ["doctor", "--python", "/nonexistent"], ["does not run"]),
    "doctor for another program": (
        14, ["doctor", "--python", shutil.which("true")], ["not as Python does"]),
    "serve nothing": (1, ["serve", "--index", "nothing"], ["no such index", "--tag TAG"]),
    "export without a work tree": (
        12, ["export", "--tag", "v9.1.0"], ["edit --tag v9.1.0 --worktree vllm-v9.1.0"]),
    "edit into another folder": (
        12, ["edit", "--tag", "v9.1.0", "--worktree", "/etc"], ["no work tree of this tool"]),
    "edit into a file": (
        12, ["edit", "--tag", "v9.1.0", "--worktree", "/etc/passwd"], ["choose another folder"]),
    "drop where nothing stopped": (
        11, ["edit", "--tag", "v9.1.0", "--drop", "0001-x.patch"], ["nothing to drop", "git rebase"]),
    "pin what is no release": (18, ["pin", "banana"], ["look like v0.20.2"]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_use_is_answered_with_the_right_one(user, what):
    code, arguments, words = WRONG[what]
    said = user.fails(code, *arguments)
    for word in words:
        assert user.advised(word) in said


def test_a_project_that_is_not_there_is_usage(user):
    user.project = user.home / "nowhere"
    process = user.run("--tag", "v9.1.0")
    assert process.returncode == 2
    assert "there is no folder" in process.stderr


def test_a_timeout_that_is_no_number(user):
    said = user.fails(5, "--tag", user.tag, PIP_DEFAULT_TIMEOUT="soon")
    assert "'soon'" in said
    assert "pip config list" in said


def test_a_current_folder_that_was_deleted(user):
    gone = user.home / "gone"
    gone.mkdir()
    process = subprocess.run(
        ["sh", "-c", f'rmdir "{gone}"; exec "$@"', "sh", *user.command("--tag", user.tag)],
        cwd=gone, env=user.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 1
    assert "the current folder is gone" in process.stderr
    assert "Traceback" not in process.stderr


# --- surroundings in which everything has to work --------------------------------------------------

SURROUNDINGS = {
    "no HOME": {"HOME": None},
    "a locale of one byte": {"LC_ALL": "de_DE.ISO-8859-1", "PYTHONUTF8": "0"},
    "ASCII alone": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ASCII on the terminal": {"PYTHONIOENCODING": "ascii"},
    "a dumb terminal": {"TERM": "dumb"},
    "GIT_DIR of something else": {"GIT_DIR": "/nonexistent", "GIT_WORK_TREE": "/"},
}


@pytest.mark.parametrize("what", SURROUNDINGS)
def test_in_odd_surroundings_all_commands_work(make_user, plain_sha256, what):
    """In a project, a work tree and an output folder with spaces and umlauts in their names."""
    plain = make_user()
    folder = plain.home / "pröj ect ß"
    shutil.move(plain.project, folder)
    plain.project = folder
    environment = plain.environment() | SURROUNDINGS[what]
    environment = {name: value for name, value in environment.items() if value is not None}

    def run(*arguments):
        process = subprocess.run(
            plain.command(*arguments), cwd=plain.home, env=environment, capture_output=True,
            check=False,
        )  # fmt: skip
        assert process.returncode == 0, process.stderr
        return process.stdout

    built = json.loads(run("--tag", plain.tag, "--out", "aus gäbe", "--json"))
    assert built["sha256"] == plain_sha256
    run("series", "--tag", plain.tag)
    run("edit", "--tag", plain.tag, "--worktree", "bäum 1")
    assert b"nothing changed" in run("export", "--tag", plain.tag, "--worktree", "bäum 1")


def test_the_install_line_of_a_path_with_spaces_is_one_word(user):
    said = user.ok("--tag", user.tag, "--no-stage", "--out", user.home / "a b").stdout
    line = next(line for line in said.splitlines() if "uv pip install" in line)
    assert Path(shlex.split(line)[-1]).is_file()


def test_very_long_paths(user):
    deep = user.home
    for _ in range(4):
        deep /= "x" * 240
    user.cache = deep / "cache"
    assert Path(user.build(out=deep / "out")["wheel"]).is_file()
    user.ok("edit", "--tag", user.tag, "--worktree", deep / "tree")
    assert "nothing changed" in user.ok(
        "export", "--tag", user.tag, "--worktree", deep / "tree"
    ).stdout  # fmt: skip


def test_a_cache_on_another_disk(user, plain_sha256):
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == user.home.stat().st_dev:
        pytest.skip("there is no other disk")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        user.cache = Path(folder)
        built = user.build(stage=True)
        assert built["sha256"] == plain_sha256
        user.ok("edit", "--tag", user.tag)
        assert "nothing changed" in user.ok("export", "--tag", user.tag).stdout


def test_the_series_into_a_pipe_that_closes(user):
    user.ok("series", "--tag", user.tag)
    process = subprocess.run(
        ["sh", "-c", '"$@" | head -c 1 | cat', "sh", *user.command("series", "--tag", user.tag)],
        cwd=user.home, env=user.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert len(process.stdout) == 1
    assert process.stderr == ""


# --- disks that refuse ---------------------------------------------------------------------------


def in_a_disk_of_its_own(user, options, script):
    """Run a script with a small file system at $DISK and the tool as $TOOL."""
    disk = user.home / "disk"
    disk.mkdir()
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c",
         f"mount -t tmpfs -o {options} none {disk} || exit 99\n" + textwrap.dedent(script)],
        cwd=user.home, env=user.environment(DISK=str(disk), TOOL=shlex.join(user.command())),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_cache_that_cannot_be_written_is_not_called_full(user):
    run = in_a_disk_of_its_own(
        user, "size=60m",
        f"""
        export VLLM_GLM5_CACHE=$DISK
        $TOOL series --tag {user.tag} >/dev/null || exit 98
        mount -o remount,ro $DISK
        $TOOL --tag {user.tag} --no-stage; echo "ended $?"
        """,
    )  # fmt: skip
    assert "ended 1" in run.stdout, run.stderr
    assert "Read-only file system" in run.stderr
    assert "VLLM_GLM5_CACHE" in run.stderr
    assert "no space left" not in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("then", "is_full"),
    [
        ("trap '' XFSZ; ulimit -f 64", False),  # its files may not grow so large
        ("dd if=/dev/zero of=$DISK/x bs=1k 2>/dev/null", True),
    ],
    ids=["a limit", "full"],
)
def test_what_git_says_of_a_failed_write_is_told_apart(user, then, is_full):
    """What git says is real: it could not write an object in either case."""
    code = (
        "import os, sys; from pathlib import Path; from builder.atomic import says_disk_full; "
        "lines = Path('said').read_text().splitlines(); print(lines, file=sys.stderr); "
        "print('full', says_disk_full(lines, Path(os.environ['DISK'])))"
    )
    run = in_a_disk_of_its_own(
        user, "size=1m",
        f"""
        git init --quiet --bare $DISK/r || exit 98
        {then}
        head -c 300000 /dev/urandom | git -C $DISK/r hash-object -w --stdin 2>said && exit 97
        {sys.executable} -c "{code}"
        """,
    )  # fmt: skip
    assert f"full {is_full}" in run.stdout, run.stderr
    assert "rite" in run.stderr  # `unable to write file`, or the like


@pytest.mark.parametrize("what", ["out", "index", "worktree"])
def test_a_full_disk_elsewhere_leaves_nothing_half_made(user, what):
    arguments = {
        "out": "--no-stage --out $DISK/dist",
        "index": "--out here --index $DISK/index",
        "worktree": "edit --worktree $DISK/tree",
    }[what]
    user.ok("--tag", user.tag, "--no-stage", "--out", user.home / "here")
    command, _, rest = arguments.partition(" ") if what == "worktree" else ("", "", arguments)
    run = in_a_disk_of_its_own(
        user, "size=64k",
        f"""
        $TOOL {command} --tag {user.tag} {rest}; echo "ended $?"
        find $DISK -type f -size +0 | sed 's/^/left /'
        """,
    )  # fmt: skip
    assert "ended 6" in run.stdout, run.stdout + run.stderr
    assert "no space left on the device" in run.stderr
    assert "left" not in run.stdout
    assert "Traceback" not in run.stderr


def test_clean_leaves_what_is_not_the_tools(user):
    """Somebody may have named a folder as the cache that holds other things too."""
    (user.cache / "environments").unlink()  # was there before the tool
    user.ok("series", "--tag", user.tag)
    (user.cache / "poetry.lock").write_text("mine")
    madeup.write(user.cache, {"thesis/chapter.tex": "mine"})
    said = user.ok("clean").stdout
    assert "but for poetry.lock, thesis" in said
    assert sorted(path.name for path in user.cache.iterdir()) == ["poetry.lock", "thesis"]
    assert (user.cache / "thesis" / "chapter.tex").read_text() == "mine"
