"""The cache: what is the tool's there and what is a user's, who may delete it, and what it survives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from builder import atomic
from builder.locations import Cache
from tests.build import madeup
from tests.build.package_server import Fault

MINE = {"work/thesis.tex": "mine\n", "downloads/film.mkv": "mine\n", "logs/diary.txt": "mine\n"}


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text(errors="replace") for path in found}


def test_a_folder_that_the_tool_never_used_is_not_cleaned(user):
    (user.cache / "environments").unlink()
    madeup.write(user.cache, MINE)
    said = user.fails(1, "clean")
    assert "nothing was deleted" in said
    assert "VLLM_GLM5_CACHE" in said
    assert files(user.cache) == MINE


def test_what_was_there_before_the_tool_stays(user):
    """Somebody names a folder as the cache that holds folders of these very names."""
    (user.cache / "environments").unlink()
    madeup.write(user.cache, MINE)
    user.build()
    assert (user.cache / "vllm.git").exists()
    assert "but for downloads, logs, work" in user.ok("clean").stdout
    assert MINE.items() <= files(user.cache).items()
    assert {p.name for p in user.cache.iterdir()} == {"downloads", "logs", "work"}
    assert "CACHEDIR.TAG" not in {p.name for p in user.cache.iterdir()}


def test_all_that_the_tool_keeps_there_is_deleted(user):
    """A stage that keeps something new says so in Cache; clean has to know it too."""
    (user.cache / "environments").unlink()
    user.ok("series", "--tag", user.tag)
    names = re.findall(r"^    (\S+?)/ ", Cache.__doc__, re.MULTILINE)
    assert {"downloads", "wheels", "releases", "renames"} <= {*names}
    for name in names:
        madeup.write(user.cache / name, {"x/y": ""})
    user.ok("clean")
    assert not user.cache.exists()


def test_backup_programs_know_the_cache(user):
    """tar has the specification built in."""
    user.ok("series", "--tag", user.tag)
    run = subprocess.run(
        ["tar", "--exclude-caches-all", "-cf", "-", user.cache.name], cwd=user.cache.parent,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    assert b"vllm.git" not in run.stdout
    (user.cache / "CACHEDIR.TAG").unlink()
    run = subprocess.run(
        ["tar", "--exclude-caches-all", "-cf", "-", user.cache.name], cwd=user.cache.parent,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    assert b"vllm.git" in run.stdout


def test_clean_waits_for_a_build(user, index, upstream, plain_sha256):
    (user.cache / "environments").unlink()
    name = next(n for n in upstream.files["vllm"] if n.startswith("vllm-9.1.0-10-"))
    index.faults[name] = [Fault(rate=200_000)]
    build = subprocess.Popen(
        user.command("--tag", user.tag, "--no-stage", "--json"), env=user.environment(),
        cwd=user.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not any(item.name == name and item.sent for item in index.served):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    clean = subprocess.Popen(
        user.command("clean"), env=user.environment(), cwd=user.home, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    said, errors = build.communicate(timeout=60)
    assert build.returncode == 0, errors
    assert json.loads(said)["sha256"] == plain_sha256
    _, errors = clean.communicate(timeout=60)
    assert clean.returncode == 0
    assert "waiting: another process uses the cache" in errors
    assert not user.cache.exists()


def test_builds_and_cleans_at_once_all_end_right(make_user, plain_sha256):
    user = make_user()
    (user.cache / "environments").unlink()
    builds, cleans = [], []
    for _ in range(3):
        for command, started in (
            (user.command("--tag", user.tag, "--no-stage", "--json"), builds),
            (user.command("clean"), cleans),
        ):
            started.append(
                subprocess.Popen(
                    command, env=user.environment(), cwd=user.home, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
            time.sleep(0.3)
    for process in builds:
        said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert json.loads(said)["sha256"] == plain_sha256
    for process in cleans:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_two_cleans_that_waited_for_the_same_build_both_end_right(user):
    """The second finds nothing of the tool's any more, and a folder that is not the tool's."""
    (user.cache / "environments").unlink()
    madeup.write(user.cache, {"thesis.tex": "mine\n"})
    user.ok("series", "--tag", user.tag)
    with Cache(user.cache).in_use():
        cleans = [
            subprocess.Popen(
                user.command("clean"), env=user.environment(), cwd=user.home, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for _ in range(2)
        ]  # fmt: skip
        for process in cleans:
            assert "waiting: another process uses the cache" in process.stderr.readline()
    for process in cleans:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert files(user.cache) == {"thesis.tex": "mine\n"}


def test_an_empty_folder_is_clean(user):
    """As the cache is for a moment where a build begins it, or another clean has just ended it."""
    (user.cache / "environments").unlink()
    user.ok("clean")
    (user.cache / f"{atomic.PREFIX}CACHEDIR.TAG-x").touch()
    user.ok("clean")


@pytest.mark.parametrize("name", ["vllm.git", "work", "wheels", "git.lock", "downloads", "series"])
def test_clean_heals_whatever_took_a_name(user, plain_sha256, name):
    """A file where a folder belongs, or a folder where a lock file does."""
    user.build()
    path = user.cache / name
    if name == "git.lock":
        path.unlink()
        path.mkdir()
    else:
        shutil.rmtree(path)
        path.write_text("")
    user.run("--tag", user.tag, "--no-stage")
    user.ok("clean")
    assert user.build()["sha256"] == plain_sha256


def in_a_mount_namespace(user, script, **environment):
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", textwrap.dedent(script), "sh", *user.command()],
        cwd=user.home, env=user.environment(CACHE=str(user.cache), TAG=user.tag, **environment),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in run.stderr
    return run


def test_a_filled_cache_may_be_read_only(user, plain_sha256):
    """In an image, or another user's: what is there serves, and what is not names the path."""
    wheel = user.build()["wheel"]
    run = in_a_mount_namespace(
        user,
        """
        mount --bind $CACHE $CACHE && mount -o remount,bind,ro $CACHE || exit 99
        touch $CACHE/x 2>/dev/null && exit 98
        "$@" series --tag $TAG >/dev/null || exit 97
        "$@" verify $WHEEL >/dev/null || exit 96
        "$@" --tag $TAG --no-stage --out again --json || exit 95
        """,
        WHEEL=wheel,
    )
    assert run.returncode == 0, (run.returncode, run.stderr)
    assert json.loads(run.stdout)["sha256"] == plain_sha256


def test_no_inode_left_is_called_that(user):
    (user.home / "disk").mkdir()
    run = in_a_mount_namespace(
        user,
        """
        mount -t tmpfs -o size=50m,nr_inodes=8 none disk || exit 99
        VLLM_GLM5_CACHE=$PWD/disk/cache exec "$@" --tag $TAG --no-stage
        """,
    )
    assert run.returncode == 6, run.stderr
    assert "no inode for another file: df -i" in run.stderr


def test_an_output_that_does_not_fit_is_not_called_a_failed_build(user, plain_sha256):
    run = subprocess.run(
        ["sh", "-c", '"$@" > /dev/full', "sh", *user.command("--tag", user.tag, "--no-stage")],
        cwd=user.home, env=user.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 6, run.stderr
    assert "what the command did stays done" in run.stderr
    assert "nothing was changed" not in run.stderr
    assert "Exception ignored" not in run.stderr
    wheel = next((user.home / "dist").glob("*.whl"))
    assert madeup.hashlib.sha256(wheel.read_bytes()).hexdigest() == plain_sha256


@pytest.mark.parametrize("option", ["--out", "--index"])
def test_a_file_in_place_of_a_folder_is_usage(user, option):
    path = user.home / "a-file"
    path.write_text("mine")
    process = user.run("--tag", user.tag, option, path)
    assert process.returncode == 2
    assert f"{option} takes a folder" in process.stderr
    assert path.read_text() == "mine"
    assert not (user.cache / "vllm.git").exists()


def test_edit_leaves_other_programs_temporary_files(user):
    """They are in the folder that the work tree is made in, and that is a user's."""
    theirs = {".tmp-X/data": "mine", ".tmp-X.lock": "", ".tmp-.lock": ""}
    madeup.write(user.home, theirs)
    user.ok("edit", "--tag", user.tag, "--worktree", user.home / "tree")
    assert theirs == {name: (user.home / name).read_text() for name in theirs}
    ours = user.home / ".vllm-glm5-tmp-dead"
    madeup.write(ours, {"x": ""})
    Path(f"{ours}.lock").touch()
    user.ok("edit", "--tag", user.tag, "--worktree", user.home / "other")
    assert not ours.exists()


def emptied(repository):
    objects = [path for path in repository.glob("objects/??/*") if path.is_file()]
    assert objects
    for path in objects:
        path.chmod(0o644)
        path.write_bytes(b"")


DAMAGE = {
    "loose objects are empty": emptied,
    "no objects": lambda repository: shutil.rmtree(repository / "objects"),
    "no refs": lambda repository: shutil.rmtree(repository / "refs"),
    "an empty HEAD": lambda repository: (repository / "HEAD").write_text(""),
    "a file": lambda repository: (shutil.rmtree(repository), repository.write_text("")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_repository_is_made_again(user, plain_sha256, what):
    """It is no fault of a patch, and nothing that only a user could mend."""
    user.build()
    DAMAGE[what](user.cache / "vllm.git")
    for name in ("wheels", "audits"):
        shutil.rmtree(user.cache / name)
    run = user.ok("--tag", user.tag, "--no-stage", "--json")
    assert json.loads(run.stdout)["sha256"] == plain_sha256
    assert "the source repository is damaged; it is made again" in run.stderr
    assert "damaged" not in user.ok("--tag", user.tag, "--no-stage").stderr
