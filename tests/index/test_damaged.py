"""An index never lists other bytes under a name that it has listed: not those of a damaged disk."""

from __future__ import annotations

import json
import os
import zipfile

import pytest

from builder.errors import AuditError, VersionExistsError
from builder.index import list_wheels, publish, set_yanked

from .checking import listed, sha256
from .wheels import write_wheel


@pytest.fixture
def index(tmp_path):
    return tmp_path / "index"


@pytest.fixture
def held(index, wheel):
    return publish(index, wheel).path


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def on_page(held):
    page = json.loads((held.parent / "index.v1_json").read_text())
    return next(file for file in page["files"] if file["filename"] == held.name)


def test_a_damaged_wheel_is_not_listed_with_its_new_hash(index, held, wheel, tmp_path, capsys):
    damage(held)
    for version in ("0.20.2+glm5.2", "0.20.2+glm5.3"):  # not by the second one either
        publish(index, write_wheel(tmp_path, version))
        assert on_page(held)["hashes"]["sha256"] == sha256(wheel) != sha256(held)
        assert f"{held}: damaged since it was published" in capsys.readouterr().err
    assert sha256(wheel) in (held.parent / "index.html").read_text()
    set_yanked(index, "staging", list_wheels(index, "staging")[:1], "damaged")
    assert on_page(held)["yanked"] == "damaged"
    assert on_page(held)["hashes"]["sha256"] == sha256(wheel)


@pytest.mark.parametrize("cut", [False, True])
def test_its_own_bytes_heal_it(index, held, wheel, capsys, cut):
    if cut:
        held.write_bytes(held.read_bytes()[:100])
    else:
        damage(held)
    result = publish(index, wheel)
    assert not result.already_there
    assert sha256(held) == sha256(wheel)
    assert "gets its own bytes back" in capsys.readouterr().err
    assert listed(held.parent.parent) == {wheel.name}
    assert publish(index, wheel).already_there
    assert not capsys.readouterr().err


def test_other_bytes_do_not_heal_it(index, held, wheel, tmp_path):
    """Not even those that lie there now: what was published is what the page says."""
    damage(held)
    copy = tmp_path / "copy" / held.name
    copy.parent.mkdir()
    copy.write_bytes(held.read_bytes())
    with pytest.raises(VersionExistsError) as caught:
        publish(index, copy)
    assert f"sha256 there  {sha256(wheel)}" in str(caught.value)
    publish(index, wheel)
    assert sha256(held) == sha256(wheel)


def test_a_damaged_copy_in_another_channel_does_not_block_the_good_one(index, held, wheel):
    damage(held)
    done = publish(index, wheel, channel="stable", approved=sha256(wheel))
    assert sha256(done.path) == sha256(wheel)


def test_metadata_beside_a_wheel_is_the_wheels(index, held, wheel):
    beside = held.with_name(f"{held.name}.metadata")
    own = beside.read_bytes()
    beside.write_bytes(own + b"Requires-Dist: evil\n")
    publish(index, wheel)
    assert beside.read_bytes() == own
    assert on_page(held)["core-metadata"]["sha256"] == sha256(beside)


def test_a_touched_wheel_is_no_damaged_one(index, held, wheel, capsys):
    os.utime(held, (1, 1))
    assert publish(index, wheel).already_there
    assert not capsys.readouterr().err
    assert on_page(held)["hashes"]["sha256"] == sha256(wheel)
    assert on_page(held)["upload-time"].startswith("1970")


@pytest.mark.parametrize("folder", ["evil-0.20.2+glm5.1", "vllm_glm5-9", "vllm_glm5"])
def test_the_dist_info_folder_has_the_wheels_name(index, wheel, tmp_path, folder):
    """pip and uv refuse others, when it is too late."""
    other = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            target.writestr(name.replace("vllm_glm5-0.20.2+glm5.1", folder), source.read(name))
    with pytest.raises(AuditError, match="dist-info contradicts the file name"):
        publish(index, other)
    assert list_wheels(index, "staging") == ()
    publish(index, wheel)


@pytest.mark.parametrize(
    "changed",
    [
        {"requires-python": 7},
        {"yanked": 7},
        {"size": "large"},
        {"hashes": {"sha256": 7}},
        {"hashes": ["sha256"]},
        {"core-metadata": {"sha256": None}},
        {"upload-time": 0},
        {"filename": 7},
    ],
)
def test_a_page_of_another_shape_is_written_anew(index, held, wheel, tmp_path, changed):
    """Somebody's script wrote it, say: the wheels that lie there are what counts."""
    path = held.parent / "index.v1_json"
    right = path.read_text()
    page = json.loads(right)
    page["files"][0] |= changed
    path.write_text(json.dumps(page))
    assert list_wheels(index, "staging") == ()
    publish(index, wheel)
    assert path.read_text() == right
    publish(index, write_wheel(tmp_path, "0.20.2+glm5.2"))
    assert [w.version for w in list_wheels(index, "staging")] == ["0.20.2+glm5.1", "0.20.2+glm5.2"]


@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "7", '{"files": 7}', '{"files": ["x"]}'])
def test_a_page_that_is_none_is_written_anew(index, held, wheel, text):
    path = held.parent / "index.v1_json"
    right = path.read_text()
    path.write_text(text)
    publish(index, wheel)
    assert path.read_text() == right
