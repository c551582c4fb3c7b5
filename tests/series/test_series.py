"""The series file and its folder: each disagreement is a line of one error."""

from __future__ import annotations

import pytest

from builder.errors import SeriesError, UnknownTagError
from builder.locations import Project
from builder.series import nearest_series, read_series, series_tags, unlisted_common
from tests.series.fork import FILES, TAG


def put(fork, text, *names, common=()):
    for name in names:
        (fork.folder() / name).write_text("x")
    for name in common:
        (fork.project.patches / "common" / name).write_text("x")
    (fork.folder() / "series").write_bytes(text if isinstance(text, bytes) else text.encode())


FAULTS = {
    "listed, not there": ("0001-a.patch\n", (), (), "0001-a.patch is listed, but there is no such"),
    "common listed, not there": (
        "../common/0001-a.patch\n", (), (), "../common/0001-a.patch is listed, but there is no such",
    ),
    "listed twice": ("0001-a.patch\n0001-a.patch\n", ("0001-a.patch",), (), "is listed twice"),
    "there, not listed": (
        "0001-a.patch\n", ("0001-a.patch", "0002-b.patch"), (), "0002-b.patch lies in the folder",
    ),
    "a stray one without a number": (
        "", ("wip.patch",), (), "wip.patch lies in the folder, but is not listed",
    ),
    "number twice": (
        "0001-a.patch\n0001-b.patch\n", ("0001-a.patch", "0001-b.patch"), (),
        "number 0001 is used by 0001-a.patch and 0001-b.patch",
    ),
    "number twice with a common one": (
        "0001-a.patch\n../common/0001-b.patch\n", ("0001-a.patch",), ("0001-b.patch",),
        "number 0001 is used by 0001-a.patch and ../common/0001-b.patch",
    ),
    "number of a common one that is not listed": (
        "0001-a.patch\n", ("0001-a.patch",), ("0001-b.patch",),
        "number 0001 is used by 0001-a.patch and ../common/0001-b.patch",
    ),
    "no number": ("a.patch\n", (), (), "line 1: 'a.patch' is not NNNN-name.patch"),
    "another folder": ("0001-a.patch\n../v1/0002-b.patch\n", ("0001-a.patch",), (), "line 2: "),
    "outside": ("../../0001-a.patch\n", (), (), "line 1: '../../0001-a.patch'"),
    "absolute": ("/tmp/0001-a.patch\n", (), (), "line 1: "),
    "strip level": ("0001-a.patch -p0\n", (), (), "line 1: '0001-a.patch -p0'"),
    "not UTF-8": (b"0001-\xff.patch\n", (), (), "not UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named(fork, case):
    text, names, common, said = FAULTS[case]
    put(fork, text, *names, common=common)
    with pytest.raises(SeriesError) as caught:
        fork.series()
    assert any(said in line for line in caught.value.details), caught.value.details
    assert caught.value.where.endswith(f"{TAG}/series")
    assert "builder series" in caught.value.next_step


def test_all_faults_at_once(fork):
    put(fork, "0001-a.patch\nbad\n0001-b.patch\n", "0001-b.patch", "0007-c.patch")
    with pytest.raises(SeriesError, match="4 faults") as caught:
        fork.series()
    assert len(caught.value.details) == 4


def test_comments_blank_lines_and_order(fork):
    put(
        fork,
        "# what this is\n\n0003-c.patch  # why\n  ../common/0001-a.patch\n0002-b.patch -p1\n#0009-x\n",
        "0003-c.patch", "0002-b.patch", common=("0001-a.patch", "0010-other-release.patch"),
    )  # fmt: skip
    entries = fork.series().entries
    assert [entry.line for entry in entries] == [
        "0003-c.patch", "../common/0001-a.patch", "0002-b.patch",
    ]  # fmt: skip
    assert [entry.number for entry in entries] == [3, 1, 2]
    assert [entry.is_common for entry in entries] == [False, True, False]
    assert all(entry.path.is_file() for entry in entries)


def test_crlf_in_the_series_file_is_harmless(fork):
    put(fork, "0001-a.patch\r\n0002-b.patch\r\n", "0001-a.patch", "0002-b.patch")
    assert len(fork.series().entries) == 2


def test_an_unknown_release_lists_the_known_ones(fork):
    fork.release(FILES, "v1.10.0")
    fork.release(FILES, "v1.9.0")
    (fork.project.patches / "v-mine").mkdir()
    (fork.project.patches / "v-mine" / "series").touch()
    assert series_tags(fork.project) == [TAG, "v1.9.0", "v1.10.0", "v-mine"]
    with pytest.raises(UnknownTagError, match=r"v1\.2\.3, v1\.9\.0, v1\.10\.0") as caught:
        read_series(fork.project, "v2.0.0")
    assert "v2.0.0/series" in caught.value.next_step
    assert "rebase --from v1.10.0 --onto v2.0.0" in caught.value.next_step


@pytest.mark.parametrize(
    ("tag", "source"),
    [
        ("v1.11.0", "v1.10.0"),
        ("v1.9.1", "v1.9.0"),  # a patch release of the older line, not of the newest one
        ("v1.10.0rc1", "v1.9.0"),
        ("v1.0.0", TAG),
        ("v-mine", TAG),
    ],
)
def test_a_release_starts_from_the_series_before_it(fork, tag, source):
    assert nearest_series(series_tags(fork.project), tag) == TAG
    fork.release(FILES, "v1.10.0")
    fork.release(FILES, "v1.9.0")
    assert nearest_series(series_tags(fork.project), tag) == source


def test_nothing_to_start_from(tmp_path):
    assert nearest_series(series_tags(Project(tmp_path)), TAG) is None


def test_a_shared_patch_that_no_series_names(fork):
    put(fork, "../common/0001-a.patch\n", common=("0001-a.patch", "0002-b.patch"))
    assert unlisted_common(fork.project) == ["0002-b.patch"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("alias = 1\n", "values"), ("other = 1\n", "other"), ("alias =\n", "TOML"), ("\xff", "TOML")],
)
def test_settings_that_are_none(fork, text, said):
    (fork.folder() / "settings.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(SeriesError, match=said):
        fork.series()


def test_the_setting(fork):
    assert fork.series().requires_alias is False
    (fork.folder() / "settings.toml").write_text("alias = true\n")
    assert fork.series().requires_alias is True


def test_the_command_ends_with_the_documented_code(fork):
    put(fork, "0001-a.patch\n")
    run = fork.run("series", "--tag", TAG, "--json", code=11)
    assert "0001-a.patch is listed, but there is no such file" in run.stderr
    assert '"exit_code": 11' in run.stdout
    assert "v1.2.3" in fork.run("series", "--tag", "v9.9.9", code=3).stderr
