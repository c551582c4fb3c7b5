"""N of +glm5.N follows what ships, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder import revision
from builder.errors import RevisionError
from builder.pin import PinnedFile
from tests.series.fork import FILES, TAG


@pytest.fixture
def pin(fork, developer):
    data = developer.patch({"vllm/new.py": "x = 1\n"}, "One")
    fork.put({"0001-one.patch": data, "0002-two.patch": developer.patch({"vllm/b.py": ""}, "Two")})
    return fork.pin()


def check(fork, pin):
    return revision.checked_revision(pin, fork.series())


def test_it_has_to_be_set_first(fork, pin):
    with pytest.raises(RevisionError, match="never set") as caught:
        check(fork, pin)
    assert caught.value.next_step == f"python -m builder revision --tag {TAG} --raise"
    assert revision.raise_revision(pin, fork.series()).number == 1
    assert check(fork, pin) == 1


def test_raising_twice_is_raising_once(fork, pin):
    revision.raise_revision(pin, fork.series())
    before = (fork.folder() / "revision").stat()
    assert revision.raise_revision(pin, fork.series()).number == 1
    assert (fork.folder() / "revision").stat().st_mtime_ns == before.st_mtime_ns


def edit_patch(fork):
    file = fork.folder() / "0001-one.patch"
    file.write_bytes(file.read_bytes().replace(b"x = 1", b"x = 2"))


def edit_message(fork):
    file = fork.folder() / "0001-one.patch"
    file.write_bytes(file.read_bytes().replace(b"Subject: One", b"Subject: Ones"))


def reorder(fork):
    (fork.folder() / "series").write_text("0002-two.patch\n0001-one.patch\n")


def rename(fork):
    (fork.folder() / "0001-one.patch").rename(fork.folder() / "0001-1.patch")
    (fork.folder() / "series").write_text("0001-1.patch\n0002-two.patch\n")


def drop(fork):
    (fork.folder() / "0002-two.patch").unlink()
    (fork.folder() / "series").write_text("0001-one.patch\n")


def want_alias(fork):
    (fork.folder() / "settings.toml").write_text("alias = true\n")


@pytest.mark.parametrize("change", [edit_patch, edit_message, reorder, rename, drop, want_alias])
def test_what_ships_has_changed(fork, pin, change):
    revision.raise_revision(pin, fork.series())
    change(fork)
    with pytest.raises(RevisionError, match="still 1"):
        check(fork, pin)
    assert revision.raise_revision(pin, fork.series()).number == 2
    assert check(fork, pin) == 2


def test_another_upstream_file_or_wheel_format(fork, pin, monkeypatch):
    revision.raise_revision(pin, fork.series())
    other = PinnedFile("x", 1, "1" * 64)
    for changed in (replace(pin, sdist=other), replace(pin, wheels={"x86_64": other}),
                    replace(pin, wheels=pin.wheels | {"aarch64": other})):  # fmt: skip
        with pytest.raises(RevisionError, match="still 1"):
            check(fork, changed)
    assert check(fork, replace(pin, commit="f" * 40)) == 1  # known more fully, the same bytes
    monkeypatch.setattr(revision, "WHEEL_FORMAT", revision.WHEEL_FORMAT + 1)
    with pytest.raises(RevisionError, match="still 1"):
        check(fork, pin)


def test_what_does_not_ship_changes_nothing(fork, pin):
    revision.raise_revision(pin, fork.series())
    (fork.folder() / "series").write_text("# why\n0001-one.patch  # first\n\n0002-two.patch\n")
    (fork.project.patches / "common" / "0009-other.patch").write_text("x")
    fork.release(FILES, "v1.9.0")
    assert check(fork, pin) == 1


def test_sharing_a_patch_changes_no_wheel(fork, pin):
    revision.raise_revision(pin, fork.series())
    common = fork.project.patches / "common" / "0001-one.patch"
    (fork.folder() / "0001-one.patch").rename(common)
    (fork.folder() / "series").write_text("../common/0001-one.patch\n0002-two.patch\n")
    assert check(fork, pin) == 1


@pytest.mark.parametrize(
    "text",
    ["", "revision = 1\n", 'digest = "x"\n', 'revision = 0\ndigest = "x"\n', "revision =\n",
     'revision = "1"\ndigest = "x"\n', 'revision = true\ndigest = "x"\n', "\xff"],
)  # fmt: skip
def test_a_damaged_file_is_never_guessed_at(fork, pin, text):
    """A number that is given again would put two wheels under one version."""
    (fork.folder() / "revision").write_bytes(text.encode("latin-1"))
    for act in (revision.checked_revision, revision.raise_revision):
        with pytest.raises(RevisionError) as caught:
            act(pin, fork.series())
        assert "--raise" not in caught.value.next_step
    assert (fork.folder() / "revision").read_bytes() == text.encode("latin-1")


def test_the_command(fork, pin):
    assert "never set" in fork.run("revision", "--tag", TAG, code=19).stderr
    assert fork.run("revision", "--tag", TAG, "--raise").stdout == "+glm5.1\n"
    assert fork.run("revision", "--tag", TAG).stdout == "+glm5.1\n"
    drop(fork)
    assert "--raise" in fork.run("revision", "--tag", TAG, code=19).stderr
