"""Folders that would be two channels at once: what one takes untested is in neither then."""

from __future__ import annotations

import pytest

from builder import index
from builder.errors import IndexLayoutError
from tests.index.checking import listed
from tests.index.wheels import write_wheel

VERSION, NEXT = "0.20.2+glm5.1", "0.20.2+glm5.2"


@pytest.fixture
def tested(tmp_path):
    """A wheel of which a gate has approved."""
    wheel = write_wheel(tmp_path / "tested", VERSION)
    return index.Entry(wheel, approved=index.sha256_of(wheel))


@pytest.fixture
def untested(tmp_path):
    return write_wheel(tmp_path / "untested", NEXT)


def test_an_index_in_the_place_of_a_channel(tmp_path, tested, untested):
    folder = tmp_path / "srv" / "staging"
    index.publish_together(folder, [tested], channel="stable")
    with pytest.raises(IndexLayoutError, match="belongs to the index"):
        index.publish(folder.parent, untested)
    assert listed(folder / "simple") == {tested.wheel.name}


def test_a_channel_in_the_place_of_an_index(tmp_path, tested, untested):
    index.publish(tmp_path / "srv", untested)
    folder = tmp_path / "srv" / "staging"
    (tmp_path / "link").symlink_to(folder)
    for same in (folder, folder / "simple" / "..", tmp_path / "link"):
        with pytest.raises(IndexLayoutError, match="belongs to the index"):
            index.publish_together(same, [tested], channel="stable")
    again = index.publish(folder / "..", untested)
    assert again.already_there
    assert listed(folder / "simple") == {untested.name}


def test_an_index_below_another_one_that_shares_no_channel(tmp_path, tested, untested):
    index.publish(tmp_path / "srv" / "index", untested)  # as a build stages, in srv/index/staging
    index.publish_together(tmp_path / "srv", [tested], channel="stable")
    again = index.publish(tmp_path / "srv" / "index", untested)
    assert again.already_there


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("staging", "."),
        ("staging/simple", "../simple"),
        ("staging/simple/vllm-glm5", "../../simple/vllm-glm5"),
        ("staging", "absent"),
    ],
)
def test_a_link_from_staging(tmp_path, tested, untested, link, target):
    folder = tmp_path / "srv"
    index.publish_together(folder, [tested], channel="stable")
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(target)
    with pytest.raises(IndexLayoutError, match="link"):
        index.publish(folder, untested)
    assert listed(folder / "simple") == {tested.wheel.name}


def test_the_index_may_be_a_link(tmp_path, tested, untested):
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "srv"
    folder.symlink_to("disk")
    index.publish_together(folder, [tested], channel="stable")
    index.publish(folder, untested)
    assert listed(tmp_path / "disk" / "simple") == {tested.wheel.name}
