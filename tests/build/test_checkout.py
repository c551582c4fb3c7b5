"""`checkout`: the release as one commit, the same everywhere; nothing leaves the tree."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import tomllib
from dataclasses import replace

import pytest

from builder import checkout
from builder import pin as pins
from builder.errors import SourceMismatchError, UnsafeArchiveError
from builder.locations import Cache
from builder.repository import Git
from tests.build import madeup


def member(name, kind=tarfile.REGTYPE, data=b"", target="", mode=0o644):
    def add(archive):
        info = tarfile.TarInfo(name)
        info.type, info.size, info.linkname, info.mode = kind, len(data), target, mode
        archive.addfile(info, io.BytesIO(data))

    return add


def imported(tmp_path, data, name="cache"):
    """Import the archive as the release; the pin describes it, as if upstream had made it so."""
    path = tmp_path / "vllm-9.1.0.tar.gz"
    path.write_bytes(data)
    file = pins.PinnedFile(path.name, len(data), hashlib.sha256(data).hexdigest())
    pin = pins.Pin(madeup.TAG, "9.1.0", "0" * 9, "", "", "", file, {})
    cache = Cache(tmp_path / name)
    with checkout.using_repository(cache):
        return checkout.from_sdist(pin, path, cache), cache


UNSAFE = {
    "../ in front": (member("../evil.py"), "'../evil.py'"),
    "../ in the middle": (member("vllm-9.1.0/vllm/../../../evil.py"), "/../../../evil.py'"),
    "absolute": (member("/etc/evil"), "'/etc/evil'"),
    "symbolic link out": (
        member("vllm-9.1.0/vllm/link", tarfile.SYMTYPE, target="../../x"), "leaves the tree"),
    "symbolic link out from the top": (
        member("vllm-9.1.0/link", tarfile.SYMTYPE, target="../x"), "leaves the tree"),
    "symbolic link out and in again": (
        member("vllm-9.1.0/link", tarfile.SYMTYPE, target="../vllm-9.1.0/x"), "leaves the tree"),
    "absolute symbolic link": (
        member("vllm-9.1.0/link", tarfile.SYMTYPE, target="/etc/passwd"), "'vllm-9.1.0/link'"),
    "hard link out": (
        member("vllm-9.1.0/link", tarfile.LNKTYPE, target="../passwd"), "leaves the tree"),
    "hard link out by the top": (
        member("vllm-9.1.0/link", tarfile.LNKTYPE, target="vllm-9.1.0/../../x"), "leaves the tree"),
    "absolute hard link": (
        member("vllm-9.1.0/link", tarfile.LNKTYPE, target="/etc/passwd"), "'vllm-9.1.0/link'"),
    "hard link to nothing": (
        member("vllm-9.1.0/link", tarfile.LNKTYPE, target="vllm-9.1.0/no"), "vllm-9.1.0/no"),
    "device": (member("vllm-9.1.0/dev", tarfile.CHRTYPE), "'vllm-9.1.0/dev'"),
    "block device": (member("vllm-9.1.0/dev", tarfile.BLKTYPE), "'vllm-9.1.0/dev'"),
    "pipe": (member("vllm-9.1.0/pipe", tarfile.FIFOTYPE), "'vllm-9.1.0/pipe'"),
    "inside .git": (member("vllm-9.1.0/.git/hooks/post-checkout"), "inside .git"),
    "inside .GIT": (member("vllm-9.1.0/sub/.GIT/config"), "inside .git"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNSAFE)
def test_an_unsafe_member_is_named_and_nothing_is_kept(tmp_path, upstream, what):
    add, named = UNSAFE[what]
    with pytest.raises(UnsafeArchiveError) as caught:
        imported(tmp_path, madeup.sdist_with(upstream.sdist, add))
    assert named in str(caught.value)
    assert caught.value.exit_code == 7
    cache = Cache(tmp_path / "cache")
    git = Git(cache.repository)
    assert git.text("for-each-ref") == ""
    assert git.text("count-objects", "-v").splitlines()[0] == "count: 0"
    assert not list((cache.repository / "objects" / "pack").iterdir())
    assert not list(cache.work.iterdir())
    tree, _ = imported(tmp_path, upstream.sdist)  # the good one still works
    assert git.resolve(f"refs/tags/{madeup.TAG}") == tree.commit


@pytest.mark.parametrize("damage", ["cut", "altered", "no gzip", "empty"])
def test_a_damaged_archive(tmp_path, upstream, damage):
    data = upstream.sdist
    broken = {
        "cut": data[: len(data) // 2],
        "altered": data[:500] + b"\xff" * 2000 + data[2500:],
        "no gzip": gzip.decompress(data),
        "empty": b"",
    }[damage]
    with pytest.raises(UnsafeArchiveError, match=r"not a readable \.tar\.gz"):
        imported(tmp_path, broken)


def test_through_the_command(make_user, index, upstream):
    """A pin over an unsafe archive: refused by name with its own exit code."""
    user = make_user()
    for path in (user.project / "upstream").iterdir():
        path.unlink()
    index.files["vllm"]["vllm-9.1.0.tar.gz"] = madeup.sdist_with(
        upstream.sdist, member("vllm-9.1.0/../../evil.py", data=b"x")
    )
    user.ok("pin", madeup.TAG)
    user.ok("revision", "--tag", madeup.TAG, "--raise")
    assert "evil.py" in user.fails(7, "--tag", user.tag)
    assert not list(user.home.parent.rglob("evil.py"))


def test_the_tree_is_what_a_clone_holds(tmp_path, upstream):
    tree, _ = imported(tmp_path, upstream.sdist)
    git = tree.repository
    listed = git.text("ls-tree", "-r", tree.commit).splitlines()
    ours = {line.split("\t")[1]: line.split()[0] for line in listed}
    theirs = {
        line.split("\t")[1]: line.split()[0]
        for line in madeup.git(upstream.repository, "ls-tree", "-r", madeup.TAG).splitlines()
    }
    assert ours == theirs  # names and exec bits
    assert git.text("rev-parse", f"{tree.commit}^{{tree}}") == madeup.git(
        upstream.repository, "rev-parse", f"{madeup.TAG}^{{tree}}"
    )
    assert "vllm/data/ignored.keep" in ours  # though .gitignore hides it
    assert ours["vllm/utils/run.sh"] == "100755"
    with tarfile.open(fileobj=io.BytesIO(upstream.sdist)) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    generated = {"PKG-INFO", "setup.cfg", "vllm/_version.py", "vllm.egg-info/SOURCES.txt"}
    assert generated <= packed
    assert not generated & ours.keys()


def test_a_setup_cfg_of_upstreams_own_stays(tmp_path):
    own = b"[metadata]\nx = 1\n[egg_info]\ntag_build =\n"
    files = {"setup.cfg": own, "vllm/a.py": b"A = 1\n"}
    tree, _ = imported(tmp_path, madeup.sdist_from(files))
    assert tree.repository.run("cat-file", "blob", f"{tree.commit}:setup.cfg") == own


def test_odd_but_honest_members(tmp_path, upstream):
    def add(archive):
        for name in (
            'quo"ted.py',
            "back\\slash.py",
            "new\nline.py",
            "ümläut.py",
            " blank ",
            "a" * 200,
        ):
            member(f"vllm-9.1.0/vllm/odd/{name}", data=name.encode())(archive)
        member("vllm-9.1.0/./vllm/odd/dot.py", data=b"dot")(archive)
        member("vllm-9.1.0/vllm/odd/link", tarfile.SYMTYPE, target="../engine.py")(archive)
        member("vllm-9.1.0/vllm/odd/hard.py", tarfile.LNKTYPE, target="vllm-9.1.0/vllm/engine.py")(
            archive
        )

    tree, _ = imported(tmp_path, madeup.sdist_with(upstream.sdist, add))
    git = tree.repository
    names = git.run("ls-tree", "-z", "--name-only", tree.commit, "vllm/odd/").decode().split("\0")
    assert {name.rpartition("/")[2] for name in names if name} == {
        'quo"ted.py', "back\\slash.py", "new\nline.py", "ümläut.py", " blank ", "a" * 200, "dot.py",
        "link", "hard.py",
    }  # fmt: skip
    assert git.text("ls-tree", tree.commit, "vllm/odd/link").startswith("120000")
    assert git.run("cat-file", "blob", f"{tree.commit}:vllm/odd/hard.py") == madeup.ENGINE.encode()


def test_the_commit_is_the_same_everywhere(tmp_path, upstream):
    one, _ = imported(tmp_path, upstream.sdist, "one")
    two, _ = imported(tmp_path, upstream.sdist, "two")
    assert one.commit == two.commit
    # The same tree in an archive that was packed again is another release file: another commit.
    again = madeup.sdist_with(upstream.sdist, lambda _: None)
    three, _ = imported(tmp_path, again, "two")
    assert three.commit != one.commit
    assert three.repository.resolve(f"refs/tags/{madeup.TAG}") == three.commit


def test_leftovers_of_a_killed_git_do_not_stop_the_next_run(tmp_path, upstream):
    _, cache = imported(tmp_path, upstream.sdist)
    git = Git(cache.repository)
    git.run("update-ref", "-d", f"refs/tags/{madeup.TAG}")
    for lock in (f"refs/tags/{madeup.TAG}.lock", "packed-refs.lock", "HEAD.lock"):
        path = cache.repository / lock
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    tree, _ = imported(tmp_path, upstream.sdist)
    assert git.resolve(f"refs/tags/{madeup.TAG}") == tree.commit
    assert not list(cache.repository.rglob("*.lock"))


# --source git


@pytest.fixture
def clone(upstream, tmp_path):
    """A repository somewhere else, as `--upstream-url` names it."""
    folder = tmp_path / "clone"
    madeup.git(tmp_path, "clone", "--quiet", str(upstream.repository), str(folder))
    return folder


def test_a_clone_gives_the_same_wheel_and_the_full_commit_id(plain_sha256, user, upstream, clone):
    expected = plain_sha256
    path = user.project / "upstream" / "v9.1.0.toml"
    before = path.read_text()
    result = user.build("--source", "git", "--upstream-url", clone)
    assert result["sha256"] == expected
    pin = tomllib.loads(path.read_text())
    assert pin["commit"] == upstream.commit()
    assert path.read_text() == before.replace(upstream.commit()[:9], upstream.commit())
    assert user.build()["sha256"] == expected  # from the sdist again, with the longer pin
    assert "unchanged" in user.ok("pin", madeup.TAG).stdout


def test_a_relative_path_is_the_users(make_user, clone):
    user = make_user()
    out = user.home / "dist"
    run = user.ok(
        "--tag", user.tag, "--source", "git", "--upstream-url", "clone", "--no-stage", "--json",
        "--out", out, cwd=clone.parent,
    )  # fmt: skip
    assert json.loads(run.stdout)["mode"] == "repack"


def from_clone(user, url):
    pin = pins.load(user.project / "upstream", madeup.TAG)
    cache = Cache(user.cache)
    with checkout.using_repository(cache):
        path = next((user.cache / "downloads").glob("*/*.tar.gz"))
        return checkout.from_git(pin, path, str(url), cache), pin


@pytest.fixture
def ready(make_user):
    """A user whose cache has the sdist."""
    user = make_user()
    user.ok("series", "--tag", user.tag)
    return user


def test_a_moved_tag_is_refused(ready, clone, upstream):
    madeup.write(clone, {"vllm/engine.py": "import this\n"})
    madeup.git(clone, "commit", "--quiet", "--all", "-m", "moved")
    madeup.git(clone, "tag", "--force", madeup.TAG)
    said = ready.fails(20, "--tag", ready.tag, "--source", "git", "--upstream-url", clone)
    assert upstream.commit()[:9] in said
    assert madeup.git(clone, "rev-parse", "HEAD") in said
    git = Git(Cache(ready.cache).repository)
    assert git.resolve(f"refs/upstream/{madeup.TAG}") is None
    madeup.git(clone, "tag", "--force", madeup.TAG, upstream.commit())
    tree, _ = from_clone(ready, clone)  # the right one is taken afterwards
    assert tree.upstream_commit == upstream.commit()


def test_a_tree_that_is_not_the_sdists_is_refused(ready, clone, upstream):
    """A commit that the pin names by nine digits, and another tree: compared path by path."""
    madeup.write(
        clone, {"vllm/engine.py": "import this\n", "vllm/more.py": "", "docs/guide.md": None}
    )
    madeup.git(clone, "add", "--all", "--force")
    madeup.git(clone, "commit", "--quiet", "-m", "another tree")
    madeup.git(clone, "tag", "--force", madeup.TAG)
    pin_path = ready.project / "upstream" / "v9.1.0.toml"
    commit = madeup.git(clone, "rev-parse", "--short=9", "HEAD")
    pin_path.write_text(pin_path.read_text().replace(upstream.commit()[:9], commit))
    with pytest.raises(SourceMismatchError) as caught:
        from_clone(ready, clone)
    assert caught.value.details == ("D docs/guide.md", "M vllm/engine.py", "A vllm/more.py")


def test_what_cannot_be_cloned(ready, tmp_path, clone):
    secret = "http://somebody:s3cret@127.0.0.1:9/vllm.git"
    for url in (str(tmp_path / "nowhere"), secret):
        said = ready.fails(20, "--tag", ready.tag, "--source", "git", "--upstream-url", url)
        assert "s3cret" not in said
        assert "the sdist" in said
    madeup.git(clone, "tag", "--delete", madeup.TAG)
    with pytest.raises(SourceMismatchError, match="cannot be fetched"):
        from_clone(ready, clone)


def test_an_annotated_tag_is_its_commit(ready, clone, upstream):
    madeup.git(
        clone, "tag", "--force", "--annotate", "-m", "release", madeup.TAG, upstream.commit()
    )
    tree, pin = from_clone(ready, clone)
    assert tree.commit == upstream.commit()
    assert replace(pin, commit=tree.upstream_commit) != pin
