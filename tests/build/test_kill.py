"""A build that was killed anywhere and started again ends as if it had not been killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builder import atomic
from tests.build import killing
from tests.build.package_server import Fault

COUNT = int(os.environ.get("VLLM_GLM5_KILLS", "30"))


@pytest.fixture
def honest(make_user):
    """What an undisturbed build ends with, and how long it takes."""
    user = make_user()
    start = time.monotonic()
    result = user.build(stage=True)
    return user, result["sha256"], time.monotonic() - start


def files_of(user):
    """Every file of the cache that stays, locks apart, by relative name."""
    return sorted(
        str(path.relative_to(user.cache))
        for path in user.cache.rglob("*")
        if path.is_file() and not path.name.endswith(".lock") and "environments" not in path.parts
    )


def test_killed_at_any_moment_the_next_run_ends_right(honest, make_user):
    reference, sha256, duration = honest
    expected = files_of(reference)
    users = [make_user(project=reference.project) for _ in range(COUNT)]

    def kill_and_build(user, moment):
        after, number, whole_group = moment
        out = user.home / "dist"
        command = user.command("--tag", user.tag, "--out", out)
        while True:
            killed = killing.run_and_kill(
                command, user.environment(), user.home,
                after=after, number=number, whole_group=whole_group,
            )  # fmt: skip
            if killed.in_time:
                break
            after *= 0.7  # it was done before: this machine is quicker now
            for path in (*user.cache.iterdir(), out):
                if not path.is_symlink():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if number is signal.SIGINT and "interrupted" in killed.stderr:
            # Python ends by the signal where it came in the middle of an exec(); a shell shows 130.
            assert killed.returncode in (130, -signal.SIGINT)
            assert "Traceback" not in killed.stderr, killed
        result = user.build(stage=True)
        assert result["sha256"] == sha256, killed
        assert result["staged"]
        killing.wait_until_quiet(user.cache)
        left = killing.leftovers(user.cache, out)
        if left:  # an orphan outlived the run: the next one has to clear up after it
            user.build(stage=True)
            left = killing.leftovers(user.cache, out)
        assert not left, killed
        grown = set(files_of(user)) ^ set(expected)
        assert not {name for name in grown if not name.startswith("vllm.git/")}, killed
        shutil.rmtree(user.home.parent)
        return killed

    # Two at a time: they share nothing but the index, and other moments come up.
    with ThreadPoolExecutor(2) as pool:
        killed = list(
            pool.map(kill_and_build, users, killing.moments(COUNT, duration * 1.2, seed=5))
        )
    assert all(item.in_time for item in killed)
    assert any("interrupted" in item.stderr for item in killed)


def test_killed_again_and_again_nothing_piles_up(make_user, honest):
    """The same cache, killed many times: it holds no more than after one good build."""
    reference, sha256, duration = honest
    user = make_user(project=reference.project)
    command = user.command("--tag", user.tag, "--out", user.home / "dist")
    killing.kill_repeatedly(
        command, user.environment(), user.home, killing.moments(COUNT // 3, duration, seed=6)
    )
    assert user.build(stage=True)["sha256"] == sha256
    killing.wait_until_quiet(user.cache)
    user.build(stage=True)
    assert not killing.leftovers(user.cache, user.home / "dist")
    size = sum(path.stat().st_size for path in user.cache.rglob("*") if path.is_file())
    plain = sum(path.stat().st_size for path in reference.cache.rglob("*") if path.is_file())
    assert size < plain * 1.2


@pytest.mark.parametrize("mode", ["setup-py"])
def test_killed_in_the_middle_of_upstreams_build(make_user, mode):
    user = make_user()
    expected = user.build(stage=False)["sha256"]
    user.build("--mode", mode, out=user.home / "warm")
    for wheel in (user.cache / "wheels").glob("*"):
        shutil.rmtree(wheel)
    command = user.command(
        "--tag", user.tag, "--mode", mode, "--out", user.home / "cross", "--no-stage"
    )
    process = subprocess.Popen(
        command, env=user.environment(), cwd=user.home, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    for line in process.stderr:
        if line.startswith("build: upstream's setup.py"):
            break
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.stderr.close()
    process.wait()
    assert list((user.cache / "work").iterdir())  # it was in the middle
    assert user.build("--mode", mode, out=user.home / "cross")["sha256"] == expected
    assert not killing.leftovers(user.cache, user.home)


@pytest.mark.parametrize("shared", [True, False], ids=["one cache", "two caches"])
def test_two_builders_at_once_both_end_right(make_user, honest, shared, index):
    reference, sha256, _ = honest
    first = make_user(project=reference.project)
    second = make_user(project=reference.project, cache=first.cache if shared else None)
    out = [user.home / "dist" for user in (first, second)]
    if shared:
        out[1] = out[0]  # even the same folder and index
    processes = [
        subprocess.Popen(
            user.command("--tag", user.tag, "--out", folder, "--json"), cwd=user.home,
            env=user.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for user, folder in zip((first, second), out, strict=True)
    ]  # fmt: skip
    for process in processes:
        stdout, stderr = process.communicate()
        assert process.returncode == 0, stderr
        assert json.loads(stdout)["sha256"] == sha256
    if shared:
        names = [item.name for item in index.served]
        assert len(names) == len(set(names)) + 2  # each file once; twice by the reference
    for user, folder in zip((first, second), out, strict=True):
        assert not killing.leftovers(user.cache, folder)


def test_a_terminated_run_ends_with_130_and_says_so(user, index, upstream):
    name = next(n for n in upstream.files["vllm"] if n.startswith("vllm-9.1.0-10-"))
    index.faults[name] = [Fault(rate=50_000)]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process = subprocess.Popen(
            user.command("--tag", user.tag, "--no-stage", "--json"), cwd=user.home, text=True,
            env=user.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=killing.hear_interrupts,  # noqa: PLW1509
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while not any(item.name == name and item.sent for item in index.served):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        stdout, stderr = process.communicate()
        assert process.returncode == 130
        assert "goes on where it stopped" in stderr
        assert json.loads(stdout)["exit_code"] == 130
        index.served.clear()
        index.faults[name] = [Fault(rate=50_000)]
    index.faults.clear()
    assert user.build()["mode"] == "repack"
    sent = index.bytes_sent(name)
    assert 0 < sent < len(upstream.files["vllm"][name])


# The pieces that this rests on.


def test_replacing_keeps_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    atomic.write_text(path, "old")

    def fail():
        with atomic.replacing(path) as file:
            file.write(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        fail()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_only_what_dead_writers_left_is_removed(tmp_path):
    path = tmp_path / "file"
    dead = tmp_path / ".vllm-glm5-tmp-file-dead"
    dead.write_bytes(b"half")
    other = tmp_path / ".vllm-glm5-tmp-another-file-dead"
    other.write_bytes(b"half")
    with atomic.replacing(path) as first:
        first.write(b"first")
        with atomic.replacing(path) as second:  # does not take the living writer's file away
            second.write(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert not dead.exists()
    assert other.exists()


def test_scratch_folders_of_the_living_stay(tmp_path):
    with atomic.scratch_folder(tmp_path) as mine:
        (mine / "x").touch()
        with atomic.scratch_folder(tmp_path) as other:
            assert other != mine
            assert (mine / "x").exists()
    assert not list(tmp_path.iterdir())
    dead = tmp_path / ".vllm-glm5-tmp-dead"
    dead.mkdir()
    (dead / "x").touch()
    Path(f"{dead}.lock").touch()
    with atomic.scratch_folder(tmp_path):
        assert not dead.exists()
    assert not list(tmp_path.iterdir())
