"""A series with ``alias = true``: METADATA requires the alias, in every mode, and nothing else."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from email import message_from_bytes
from pathlib import Path

import pytest

from builder.digests import sha256_of
from builder.errors import AuditError
from builder.index import list_wheels
from tests.build import killing, madeup
from tests.series.sudden_death import command_killed_at

VERSION = "9.1.0+glm5.1"
INFO = f"vllm_glm5-{VERSION}.dist-info"
METADATA = f"{INFO}/METADATA"
LINE = f"Requires-Dist: vllm=={VERSION}\n".encode()
ALIAS = f"vllm-{VERSION}-py3-none-any.whl"
MORE = [
    *madeup.SERIES,
    ("Need more", {"requirements/cuda.txt": lambda text: text + "gguf>=0.19\n"}),
    ("Say more", {"README.md": "# vllm\n\nMore.\n"}),
]


def require_alias(user):
    """Write the setting as if the series had had it from the beginning: N stays 1."""
    folder = user.project / "patches" / user.tag
    (folder / "settings.toml").write_text("alias = true\n")
    (folder / "revision").unlink()
    user.ok("revision", "--tag", user.tag, "--raise")
    return user


def without_line(data):
    content = madeup.read_member(data, METADATA)
    assert content.count(LINE) == 1
    return madeup.rewritten(data, {METADATA: content.replace(LINE, b"")})


@pytest.fixture(scope="module")
def built(build_wheel, tmp_path_factory):
    user, _ = build_wheel(tmp_path_factory.mktemp("alias"), MORE)
    wheel = Path(require_alias(user).build()["wheel"])
    return user, wheel.read_bytes()


@pytest.mark.parametrize("patches", [MORE, []], ids=["with patches", "with none"])
def test_both_modes_end_in_the_same_bytes(make_user, patches):
    user = require_alias(make_user(patches))
    repacked = user.build()
    crossed = user.build("--mode", "setup-py", out=user.home / "cross")
    assert (repacked["mode"], crossed["mode"]) == ("repack", "setup-py")
    assert repacked["sha256"] == crossed["sha256"]
    for result in (repacked, crossed):
        assert Path(result["alias"]).name == ALIAS


def test_a_build_by_upstreams_own_setup_has_it_too(make_user):
    """Where setup.py itself was changed, METADATA is its own, and the line is added to that."""
    changes = {"setup.py": lambda text: text.replace('"audio": ["soundfile"]', '"audio": ["x"]')}
    user = require_alias(make_user([("Steer the build", changes)]))
    result = user.build()
    assert result["mode"] == "setup-py"
    content = madeup.read_member(Path(result["wheel"]).read_bytes(), METADATA)
    assert content.count(LINE) == 1
    assert b'Requires-Dist: x; extra == "audio"' in content
    user.ok("verify", result["wheel"])


def test_a_compiled_wheel_has_it_and_is_verified(make_user):
    compiled = {"csrc/ops.c": lambda text: text.replace('"_C", NULL', '"_C", "glm5 was here"')}
    user = require_alias(make_user([("Answer", compiled)], tag=madeup.SOURCE_TAG))
    result = user.build()
    assert result["mode"] == "source"
    data = Path(result["wheel"]).read_bytes()
    content = madeup.read_member(data, "vllm_glm5-9.2.0+glm5.1.dist-info/METADATA")
    assert content.count(b"Requires-Dist: vllm==9.2.0+glm5.1\n") == 1
    user.ok("verify", result["wheel"])
    wheel = Path(result["wheel"])
    wheel.unlink()  # a link to the cache
    info = "vllm_glm5-9.2.0+glm5.1.dist-info/METADATA"
    line = b"Requires-Dist: vllm==9.2.0+glm5.1\n"
    wheel.write_bytes(madeup.rewritten(data, {info: content.replace(line, b"")}))
    assert "METADATA Requires-Dist" in user.fails(16, "verify", wheel)


def test_it_is_one_line_more_than_without(built, make_user):
    """And it stands among the plain requirements, before those of the extras."""
    plain = Path(make_user(MORE).build()["wheel"]).read_bytes()
    content = madeup.read_member(built[1], METADATA)
    assert content.replace(LINE, b"") == madeup.read_member(plain, METADATA)
    requires = message_from_bytes(content).get_all("Requires-Dist")
    position = requires.index(f"vllm=={VERSION}")
    assert "extra ==" not in requires[position - 1]
    assert "extra ==" in requires[position + 1]
    names = {METADATA, f"{INFO}/RECORD"}
    ours, theirs = madeup.members(built[1]), madeup.members(plain)
    assert {n for n in ours if ours[n] != theirs.get(n)} == names


def test_the_audit_explains_the_line(built, verify):
    user, data = built
    explained = {item.member: item.explained_by for item in verify(data).differences}
    assert explained[f"{METADATA}: vllm=={VERSION}"] == ("settings.toml: alias = true",)
    said = user.ok("verify", user.home / "dist" / madeup.WHEEL_NAME).stdout
    assert f"\n  settings.toml: alias = true\n    added    {METADATA}: vllm=={VERSION}\n" in said


def changed(old, new):
    def change(data):
        content = madeup.read_member(data, METADATA)
        assert content.count(old) == 1
        return madeup.rewritten(data, {METADATA: content.replace(old, new)})

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without_line, f"vllm=={VERSION} 0 times"),
        (changed(LINE, LINE + LINE), f"vllm=={VERSION} 2 times"),
        (changed(LINE, LINE.replace(b"glm5.1", b"glm5.2")), f"vllm=={VERSION} 0 times"),
        (changed(LINE, LINE + b"Requires-Dist: vllm\n"), "vllm"),
        (changed(LINE, LINE + LINE.replace(b"glm5.1", b"glm5.2")), "vllm==9.1.0+glm5.2"),
    ],
    ids=["missing", "twice", "of another version", "a looser one beside", "two versions"],
)
def test_nothing_but_that_line(built, verify, change, named):
    with pytest.raises(AuditError) as caught:
        verify(change(built[1]))
    assert "METADATA Requires-Dist" in str(caught.value)
    assert named in str(caught.value)


def test_without_the_setting_the_line_is_foreign(built, make_user, tmp_path):
    """The very wheel that passes above, beside a series that does not ask for the alias."""
    user = make_user(MORE)
    user.build()
    wheel = tmp_path / madeup.WHEEL_NAME
    wheel.write_bytes(built[1])
    assert f"vllm=={VERSION}" in user.fails(16, "verify", wheel)


def test_the_setting_raises_the_revision(user):
    user.build()
    folder = user.project / "patches" / user.tag
    (folder / "settings.toml").write_text("alias = true\n")
    assert "revision --tag" in user.fails(19, "--tag", user.tag)
    user.ok("revision", "--tag", user.tag, "--raise")
    result = user.build()
    assert result["version"] == "9.1.0+glm5.2"
    assert b"vllm==9.1.0+glm5.2" in Path(result["wheel"]).read_bytes()


def test_another_cache_entry_than_without(make_user):
    """The setting changes and N does not, as in a work tree: no wheel or audit of before counts."""
    user = make_user()
    plain = user.build()
    required = require_alias(user).build()
    assert required["version"] == plain["version"]
    assert required["sha256"] != plain["sha256"]
    assert len(required["audit"]["differences"]) == len(plain["audit"]["differences"]) + 1
    shutil.rmtree(user.cache / "wheels")  # the audit of the old wheel alone is left
    folder = user.project / "patches" / user.tag
    (folder / "settings.toml").unlink()
    (folder / "revision").unlink()
    user.ok("revision", "--tag", user.tag, "--raise")
    assert "settings.toml" not in json.dumps(user.build()["audit"])


def test_both_are_staged_and_named(make_user):
    user = require_alias(make_user())
    result = user.build(stage=True)
    staged = {w.path.name for w in list_wheels(Path(result["index"]), "staging")}
    assert staged == {madeup.WHEEL_NAME, ALIAS}
    for line in result["install"]:
        words = shlex.split(line)
        assert {f"vllm-glm5=={VERSION}", f"vllm=={VERSION}"} <= set(words)
    left_alone = user.build()  # not staged: no index has the alias
    for line in left_alone["install"]:
        assert {left_alone["wheel"], left_alone["alias"]} <= set(shlex.split(line))
        assert all(Path(word).is_file() for word in shlex.split(line) if word.endswith(".whl"))


def test_the_alias_is_verified_byte_for_byte(make_user):
    user = require_alias(make_user())
    alias = Path(user.build()["alias"])
    assert f"stands for vllm-glm5 {VERSION};" in user.ok("verify", alias).stdout
    said = json.loads(user.ok("verify", alias, "--json").stdout)
    assert said == {"alias_for": VERSION, "sha256": sha256_of(alias)}
    data = alias.read_bytes()
    later = alias.with_name(ALIAS.replace("glm5.1", "glm5.2"))
    later.write_bytes(data)  # requires glm5.1, whatever it is called
    assert "not the alias that this tool writes" in user.fails(16, "verify", later)
    alias.unlink()  # a link to the cache
    alias.write_bytes(data + b"\0")
    assert "not the alias that this tool writes" in user.fails(16, "verify", alias)
    alias.unlink()
    assert "no such file" in user.fails(1, "verify", alias)


def test_a_killed_build_stages_both_or_neither(make_user):
    """Killed before each change of a file below dist/, where a build delivers and stages."""
    user = require_alias(make_user())
    dist = user.home / "dist"
    index = dist / "index"
    expected = user.build(stage=True)  # from here on all but the last steps is in the cache

    arguments = user.command("--tag", user.tag, "--out", dist)[3:]

    def killed_at(number):
        return command_killed_at(number, dist, arguments, user.environment(), user.home)

    shutil.rmtree(dist)
    assert not killed_at(10_000)
    assert {w.path.name for w in list_wheels(index, "staging")} == {ALIAS, madeup.WHEEL_NAME}
    delivered, staged = [], []
    for number in itertools.count(1):
        shutil.rmtree(dist)
        if not killed_at(number):
            break
        delivered.append({path.name for path in dist.glob("*.whl")})
        assert delivered[-1] in (set(), {ALIAS}, {ALIAS, madeup.WHEEL_NAME})
        found = list_wheels(index, "staging") if index.exists() else []
        staged.append({w.path.name for w in found})
        assert staged[-1] in (set(), {ALIAS}, {ALIAS, madeup.WHEEL_NAME})
        assert user.build(stage=True) == expected
        assert {w.path.name for w in list_wheels(index, "staging")} == {ALIAS, madeup.WHEEL_NAME}
        assert not killing.leftovers(dist)
    for seen in (delivered, staged):
        assert [len(names) for names in seen] == sorted(len(names) for names in seen)
        assert set() in seen
    assert {ALIAS, madeup.WHEEL_NAME} in delivered
    assert number > 10
