"""`fetch`: only pinned bytes, nothing fetched twice, every failure named with what to do."""

from __future__ import annotations

import hashlib
import os
import pty
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from builder import console, fetch, package_index
from builder import pin as pins
from builder.errors import HashMismatchError, PackageIndexError
from builder.locations import Cache
from tests.build import madeup
from tests.build.package_server import Fault


@pytest.fixture
def fetched(user, index, monkeypatch):
    """Fetch the official wheel in this process; the index can be told to misbehave before."""
    settings = package_index.IndexSettings((index.url,), None, 5.0)
    monkeypatch.setattr(package_index, "pip_settings", lambda: settings)
    monkeypatch.setattr(package_index, "ATTEMPTS", 1)
    pin = pins.load(user.project / "upstream", madeup.TAG)
    return lambda: fetch.fetch(pin, pin.wheel("x86_64"), Cache(user.cache))


@pytest.fixture
def wheel(upstream):
    name = next(n for n in upstream.files["vllm"] if n.startswith("vllm-9.1.0-10-"))
    return name, upstream.files["vllm"][name]


def leftovers(user):
    return [p.name for p in (user.cache / "downloads").rglob("*") if p.is_file()
            and not p.name.endswith((".lock", ".whl", ".tar.gz"))]  # fmt: skip


@pytest.mark.parametrize("cuts", [[300_000], [100_000, 70_000, 1]], ids=["once", "three times"])
def test_a_broken_download_goes_on_where_it_stopped(fetched, index, wheel, cuts):
    name, data = wheel
    index.faults[name] = [Fault(cut=size) for size in cuts]
    assert fetched().read_bytes() == data
    assert index.bytes_sent(name) == len(data)  # not one byte twice
    offsets = [sum(cuts[:n]) for n in range(len(cuts) + 1)]
    assert [item.range for item in index.served] == [
        f"bytes={offset}-" if offset else None for offset in offsets
    ]


def test_the_next_run_goes_on_too(user, index, wheel):
    name, data = wheel
    index.faults[name] = [Fault(cut=200_000), Fault(cut=0), Fault(cut=0)]
    said = user.fails(5, "--tag", user.tag)
    assert "200000 bytes are kept" in said
    assert "where it stopped" in said
    index.served.clear()
    assert "resumed at 0.2 MB" in user.ok("--tag", user.tag, "--no-stage").stderr
    assert index.bytes_sent(name) == len(data) - 200_000


def test_a_server_without_ranges_sends_all_of_it_again(fetched, index, wheel):
    name, data = wheel
    index.ranges = False
    index.faults[name] = [Fault(cut=300_000)]
    assert fetched().read_bytes() == data
    assert [item.sent for item in index.served] == [300_000, len(data)]


def test_a_server_that_ends_early_without_saying_so(fetched, index, wheel, user):
    name, data = wheel
    index.faults[name] = [Fault(cut=300_000, nameless=True)]
    assert fetched().read_bytes() == data
    (user.cache / "downloads").rename(user.cache / "gone")
    index.faults[name] = [Fault(cut=0, nameless=True, always=True)]
    with pytest.raises(PackageIndexError, match="broke 2 times"):  # and it comes to an end
        fetched()


def test_other_bytes_are_refused_and_not_kept(user, index, wheel):
    name, data = wheel
    index.faults[name] = [Fault(flip=True)]
    said = user.fails(4, "--tag", user.tag)
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    assert name in said
    assert hashlib.sha256(data).hexdigest() in said
    assert hashlib.sha256(flipped).hexdigest() in said
    assert not list((user.cache / "downloads").rglob("*.whl"))
    assert not leftovers(user)
    assert user.build()["mode"] == "repack"  # the next run is right


@pytest.mark.parametrize("damage", ["shorter", "longer", "another file"])
def test_a_server_with_another_file_under_the_name(fetched, index, wheel, damage):
    name, data = wheel
    served = {"shorter": data[:1000], "longer": data + b"more", "another file": bytes(len(data))}
    index.files["vllm"][name] = served[damage]
    with pytest.raises((HashMismatchError, PackageIndexError)):
        fetched()
    index.files["vllm"][name] = data
    assert fetched().read_bytes() == data


def test_a_part_of_another_file_costs_one_more_download(fetched, index, wheel, user):
    name, data = wheel
    folder = user.cache / "downloads" / hashlib.sha256(data).hexdigest()
    folder.mkdir(parents=True)
    part = folder / f"{name}.part"
    part.write_bytes(bytes(1000))
    with pytest.raises(HashMismatchError):
        fetched()
    assert fetched().read_bytes() == data
    part.write_bytes(data + b"more than the file has")
    (folder / name).unlink()
    assert fetched().read_bytes() == data
    assert not part.exists()
    (folder / name).unlink()
    part.write_bytes(data)  # complete, but for the rename
    index.served.clear()
    assert fetched().read_bytes() == data
    assert not index.served


@pytest.mark.parametrize("damage", ["truncated", "altered", "emptied"])
def test_a_damaged_cache_is_repaired(fetched, wheel, damage, capsys):
    path = fetched()
    data = wheel[1]
    path.write_bytes({"truncated": data[:5000], "altered": b"X" + data[1:], "emptied": b""}[damage])
    assert fetched().read_bytes() == data
    assert "damaged" in capsys.readouterr().err


def test_server_errors_name_status_and_file(fetched, index, wheel, user):
    index.faults[wheel[0]] = [Fault(status=404)]
    with pytest.raises(PackageIndexError, match="404"):
        fetched()
    index.page_status = 500
    with pytest.raises(PackageIndexError) as caught:
        fetched()
    assert "500" in str(caught.value)
    index.page_status = None
    del index.files["vllm"][wheel[0]]
    with pytest.raises(PackageIndexError, match="without this file") as caught:
        fetched()
    assert wheel[0] in str(caught.value)


def test_a_server_error_that_passes_is_tried_again(user, index, wheel):
    index.faults[wheel[0]] = [Fault(status=503), Fault(status=502)]
    assert user.build()["mode"] == "repack"


def test_without_network_a_warm_cache_builds_and_a_cold_one_says_so(make_user):
    warm = make_user()
    first = warm.build()
    warm.index_url = "http://127.0.0.1:9/simple/"
    assert warm.build(out=warm.home / "again")["sha256"] == first["sha256"]
    for path in (warm.cache / "wheels").rglob("*"):
        if path.is_file():
            path.unlink()
    assert warm.build(out=warm.home / "rebuilt")["sha256"] == first["sha256"]
    cold = make_user()
    cold.index_url = warm.index_url
    said = cold.fails(5, "--tag", cold.tag)
    assert "http://127.0.0.1:9/simple/" in said
    assert "pip config" in said


def run_in_small_cache(user, tmp_path, kilobytes, script):
    """Run the shell script with the cache on a tmpfs of so many kilobytes."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel gives no mount namespaces here")
    disk = tmp_path / "disk"
    disk.mkdir()
    build = " ".join(user.command("--tag", user.tag, "--no-stage", "--out", user.home / "dist"))
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c",
         f"mount -t tmpfs -o size={kilobytes}k none {disk} || exit 99\n" + textwrap.dedent(script)],
        cwd=user.home, env=user.environment(VLLM_GLM5_CACHE=str(disk), BUILD=build, DISK=str(disk)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip


# What does not fit any more, in kilobytes of free space: each stage in turn.
@pytest.mark.parametrize("free", [40, 200, 700, 1200])
def test_a_full_disk_is_named_and_the_next_run_goes_on(plain_sha256, user, tmp_path, free):
    run = run_in_small_cache(
        user, tmp_path, 8000,
        f"""
        dd if=/dev/zero of=$DISK/ballast bs=1k count=$((8000 - {free})) 2>/dev/null
        $BUILD; echo "first $?"
        ls $DISK/work 2>/dev/null | sed 's/^/left /'
        find $DISK -name '.vllm-glm5-tmp-*' | sed 's/^/left /'
        rm $DISK/ballast
        $BUILD; echo "second $?"
        """,
    )  # fmt: skip
    assert "Traceback" not in run.stderr
    assert "first 6" in run.stdout, run.stdout + run.stderr
    assert "no space left on the device" in run.stderr
    assert "VLLM_GLM5_CACHE" in run.stderr
    assert "left " not in run.stdout
    assert "second 0" in run.stdout, run.stderr
    (wheel,) = (user.home / "dist").glob("*.whl")
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == plain_sha256


def test_progress_is_lines_without_a_terminal(fetched, index, wheel, monkeypatch, capsys):
    monkeypatch.setattr(console, "PLAIN_INTERVAL", 0.25)
    index.faults[wheel[0]] = [Fault(rate=600_000)]
    fetched()
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("download vllm-9.1.0-10")]
    assert 4 <= len(lines) <= 6  # begin, every quarter of a second, end
    assert "of 1 MB" in lines[1]
    assert "s left" in lines[1]
    assert "done" in lines[-1]
    assert "\x1b" not in said
    assert "\r" not in said


def test_progress_is_a_bar_on_a_terminal(user, index, wheel):
    index.faults[wheel[0]] = [Fault(rate=600_000)]
    master, slave = pty.openpty()
    with subprocess.Popen(
        user.command("--tag", user.tag, "--no-stage"), cwd=user.home, stdout=subprocess.PIPE,
        env=user.environment(TERM="xterm", COLUMNS="120"), stderr=slave,
    ) as process:  # fmt: skip
        os.close(slave)
        shown = b""
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                break
            if not chunk:
                break
            shown += chunk
        process.stdout.read()
    os.close(master)
    assert process.returncode == 0
    assert shown.count(b"\r") > 3  # redrawn in place
    assert "━".encode() in shown
    assert b"kB/s" in shown or b"MB/s" in shown


def test_a_lock_that_is_held_is_waited_for(make_user, index, wheel):
    """The second builder says that it waits, and on what; then it takes what the first made."""
    first = make_user()
    index.faults[wheel[0]] = [Fault(rate=130_000)]
    with subprocess.Popen(
        first.command("--tag", first.tag, "--no-stage", "--json"), cwd=first.home,
        env=first.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as one:  # fmt: skip
        deadline = time.monotonic() + 30
        while not any(item.name == wheel[0] for item in index.served):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second = make_user(project=first.project, cache=first.cache)
        process = second.ok("--tag", second.tag, "--no-stage", "--out", second.home / "dist")
        assert one.wait() == 0
        one.stdout.read()
    assert "waiting: another process is at work on vllm-9.1.0-10" in process.stderr
    assert [item.name for item in index.served].count(wheel[0]) == 1
    assert list((second.home / "dist").glob("*.whl"))


def test_the_cache_can_be_deleted(user):
    (user.cache / "environments").unlink()  # was there before the tool
    user.build()
    user.ok("clean")
    assert not Path(user.cache).exists()
