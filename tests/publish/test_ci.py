"""The pipeline files: valid, of commands that exist, for all releases, and closed to strangers."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from platformdirs import user_cache_path

from builder import cli, pin, policy, series, signing
from builder.gpu_report import Gpu
from builder.locations import default_cache, default_project
from tests.commands import ROOT
from tests.gate.reports import H200, TESTS

from .release import ARM, FAILING, X86

GITHUB, GITLAB = ROOT / "ci" / "github-actions.yml", ROOT / "ci" / "gitlab.yml"
BOTH = pytest.mark.parametrize("file", [GITHUB, GITLAB], ids=["github", "gitlab"])
SCHEMAS = {
    GITHUB: ["--builtin-schema", "vendor.github-workflows"],
    GITLAB: ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"],
}
BUILDER = "python -m builder "
GB10 = Gpu("NVIDIA GB10", "12.1", 128_000_000_000)
CARDS = {"x86_64": H200.capability, "aarch64": GB10.capability}


def load(file):
    return yaml.safe_load(file.read_text())


def scripts(file):
    """Return what each job runs, by job."""
    data = load(file)
    if file == GITHUB:
        return {
            name: [step["run"] for step in job["steps"] if "run" in step]
            for name, job in data["jobs"].items()
        }
    return {
        name: [*job.get("before_script", ()), *job["script"]]
        for name, job in data.items()
        if isinstance(job, dict) and "script" in job
    }


def builder_lines(file):
    lines = "\n".join(text for texts in scripts(file).values() for text in texts).splitlines()
    return [line.strip() for line in lines if BUILDER in line]


def words(line):
    """Return the arguments of a line, with the CI's own variables filled in."""
    command = line.partition(BUILDER)[2].partition(" > ")[0].partition(" | ")[0]
    return shlex.split(filled(command, {"tag": "v0.20.2", "arch": "x86_64", "channel": "stable"}))


def filled(text, cell):
    """Put a cell of the matrix where either CI does."""
    for name, value in cell.items():
        for written in (f"${{{{ matrix.{name} }}}}", f"${name.upper()}"):
            text = text.replace(written, value)
    assert "matrix." not in text, text
    return text


def cells(file, job):
    """Return the cells of a job's matrix: tag, arch and channel of each."""
    if file == GITLAB:
        return [
            dict(zip((name.lower() for name in row), values, strict=True))
            for row in load(file)[job]["parallel"]["matrix"]
            for values in itertools.product(*row.values())
        ]
    matrix = load(file)["jobs"][job]["strategy"]["matrix"]
    plain = itertools.product(matrix["tag"], matrix["arch"])
    channels = {more["arch"]: more["channel"] for more in matrix["include"]}
    return [{"tag": tag, "arch": arch, "channel": channels[arch]} for tag, arch in plain]


def valid(file, path):
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *SCHEMAS[file], str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@BOTH
def test_the_form(file, tmp_path):
    done = valid(file, file)
    assert done.returncode == 0, done.stdout
    broken = tmp_path / "broken.yml"
    broken.write_text(file.read_text().replace("timeout", "tiemout").replace("needs:", "neds:"))
    assert valid(file, broken).returncode, "the control: the schema knows the keys"


@BOTH
def test_each_command_takes_these_options(file, monkeypatch, capsys):
    lines = builder_lines(file)
    assert len(lines) >= 8
    registered = {each.name for each in cli.app.registered_commands} | {"--tag"}
    for line in lines:
        if words(line)[0] in registered:
            assert helped(words(line), monkeypatch) == 0, (line, capsys.readouterr())
    assert helped(["publish", "--no-such-option"], monkeypatch) == 2
    missing = {words(line)[0] for line in lines} - registered
    if missing == {"upstream"}:
        pytest.xfail("`upstream` comes with the rebase")
    assert not missing


def helped(arguments, monkeypatch):
    """Parse the options; --help keeps the command from running."""
    monkeypatch.setattr(sys, "argv", ["builder", *arguments, "--help"])
    return cli.main()


@BOTH
def test_scripts_are_shell(file):
    for texts in scripts(file).values():
        for text in texts:
            plain = re.sub(r"\$\{\{.*?\}\}", "x", text)
            done = subprocess.run(["bash", "-n"], input=plain, text=True, capture_output=True,
                                  check=False)  # fmt: skip
            assert done.returncode == 0, (text, done.stderr)


def test_both_run_the_same_commands():
    def shape(file):
        return {
            (job, words(line)[0])
            for job, texts in scripts(file).items()
            for text in texts
            for line in text.splitlines()
            if BUILDER in line
        }

    assert shape(GITHUB) == shape(GITLAB)


def test_all_releases_for_all_machines():
    """Who adds a series adds it to the matrix."""
    project = default_project()
    tags = set(series.series_tags(project))
    machines = {arch for tag in tags for arch in pin.load(project.pins, tag).wheels}
    everything = sorted(itertools.product(tags, machines))
    for file, job in itertools.product((GITHUB, GITLAB), ("build", "gate", "publish")):
        assert sorted((c["tag"], c["arch"]) for c in cells(file, job)) == everything, (file, job)


def test_nothing_is_published_without_its_gate():
    jobs = load(GITHUB)["jobs"]
    assert jobs["gate"]["needs"] == "build"
    assert jobs["publish"]["needs"] == "gate"
    assert [need["job"] for need in load(GITLAB)["publish"]["needs"]] == ["build", "gate"]
    for file in (GITHUB, GITLAB):
        for line in builder_lines(file):
            if words(line)[0] in {"publish", "promote"}:
                assert "--report" in words(line)
                assert "staging" not in line


def test_a_channel_has_its_own_environment_and_is_one_of_the_policy():
    """Whose card passes for another channel needs another index, on devpi say."""
    shipped = policy.load_default(default_project())
    environments = {GITHUB: load(GITHUB)["jobs"]["publish"], GITLAB: load(GITLAB)["publish"]}
    for file, job in environments.items():
        for cell in cells(file, "publish"):
            assert filled(job["environment"], cell) == cell["channel"]
            assert shipped.channel(cell["channel"]).capability.contains(CARDS[cell["arch"]])
    one, other = ({tuple(cell.values()) for cell in cells(f, "publish")} for f in environments)
    assert one == other


def runs(job, **values):
    """Tell whether GitHub runs a job, whose condition has one of the few forms that ours have."""
    text = job.get("if", "true").strip().removeprefix("${{").removesuffix("}}").strip()
    if "cancelled()" not in text:  # what it adds by itself
        needed = [f" && needs.{job['needs']}.result == 'success'"] if "needs" in job else []
        text = f"!cancelled() && {text}{''.join(needed)}"
    text = re.sub(r"\b(?:github|needs)\.[\w.]+", lambda found: f"values[{found[0]!r}]", text)
    text = text.replace("!cancelled()", "not values['cancelled']").replace("&&", "and")
    return eval(text.replace("true", "True"), {"values": values})


@pytest.mark.parametrize("failing", ["", "build", "gate"])
def test_a_release_that_fails_keeps_no_other_one_back_on_github(failing):
    """A job there can need another one's whole matrix, and no cell of it."""
    jobs = load(GITHUB)["jobs"]
    for event, ref, cancelled in itertools.product(
        ("push", "workflow_dispatch", "pull_request", "schedule"),
        ("refs/heads/main", "refs/heads/other"), (False, True),
    ):  # fmt: skip
        values = {"github.event_name": event, "github.ref": ref, "cancelled": cancelled}
        result = {}
        for job in ("build", "gate", "publish"):
            done = "failure" if job == failing else "success"
            result[job] = done if runs(jobs[job], **values) else "skipped"
            values[f"needs.{job}.result"] = result[job]
        ours = ref == "refs/heads/main" and event in {"push", "workflow_dispatch"} and not cancelled
        for job in ("gate", "publish"):
            assert (result[job] != "skipped") == ours, (job, values)


def test_a_release_needs_its_own_build_and_gate_alone_on_gitlab():
    data = load(GITLAB)
    for job, needed in (("gate", ["build"]), ("publish", ["build", "gate"])):
        assert [need["job"] for need in data[job]["needs"]] == needed
        for need, cell in itertools.product(data[job]["needs"], cells(GITLAB, job)):
            (row,) = need["parallel"]["matrix"]
            named = {
                name.lower(): filled(
                    text.replace("$[[ ", "${{ ").replace(" ]]", " }}").lower(), cell
                )
                for name, (text,) in row.items()
            }
            assert named == cell
            assert named in cells(GITLAB, need["job"])


@pytest.fixture
def publish_job(release, tool, tmp_path):
    """Run the publish job of one cell as the CI does, in a folder of its own; give the exit code."""

    def run(file, cell):
        lines = [line for line in scripts(file)["publish"] if BUILDER in line]
        script = filled("\n".join(lines), cell).replace(
            BUILDER, f"{sys.executable} -m builder --project {release.root} "
        )
        return subprocess.run(
            ["bash", "-e", "-c", script], cwd=tmp_path / "job", capture_output=True, text=True,
            env=tool.variables | {"GLM5_INDEX": str(tmp_path / "index"), "PYTHONPATH": str(ROOT)},
            check=False,
        )  # fmt: skip

    return run


def work_folder(file, cell, folder, wheel, report):
    """Lay out what the jobs before left for this one."""
    dist = folder / "dist" if file == GITHUB else folder / "dist" / f"{cell['tag']}-{cell['arch']}"
    beside = folder if file == GITHUB else dist
    dist.mkdir(parents=True)
    if wheel:
        shutil.copy(wheel, dist)
    if report:
        shutil.copy(report, beside / "gpu-report.json")
        shutil.copy(signing.signature_path(report), beside / "gpu-report.json.sig")


@BOTH
def test_each_cell_publishes_what_its_own_gate_let_through(file, release, publish_job, tmp_path):
    index = tmp_path / "index"
    folders = {"stable": index / "simple", "stable-sm120": index / "stable-sm120" / "simple"}
    for cell in {each["arch"]: each for each in cells(file, "publish")}.values():
        tag, card = {"x86_64": (X86, H200), "aarch64": (ARM, GB10)}[cell["arch"]]
        wheel = release.wheel(tag=tag, folder=cell["arch"])
        passing = release.report(wheel, gpus=(card,), tests=(TESTS[0], TESTS[2]))
        failing = release.report(wheel, gpus=(card,), tests=FAILING, name="failing.json")
        page = folders[cell["channel"]] / "vllm-glm5" / "index.html"
        for left in ((None, None), (wheel, None), (wheel, failing)):
            work_folder(file, cell, tmp_path / "job", *left)
            assert publish_job(file, cell).returncode, left
            assert not page.exists()
            shutil.rmtree(tmp_path / "job")
        work_folder(file, cell, tmp_path / "job", wheel, passing)
        done = publish_job(file, cell)
        assert done.returncode == 0, done.stdout + done.stderr
        assert wheel.name in page.read_text().replace("%2B", "+")
        shutil.rmtree(tmp_path / "job")


def test_strangers_reach_neither_our_machine_nor_our_secrets():
    """A pull request's code runs where nothing of ours is."""
    data = load(GITHUB)
    assert data["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in data[True]  # YAML 1.1 reads the key `on` so
    for name, job in data["jobs"].items():
        trusted = "github.event_name != 'pull_request'" in str(job.get("if"))
        if "self-hosted" in str(job["runs-on"]):
            assert trusted, name
        for step in job["steps"]:
            assert "secrets." not in step.get("run", ""), "a command line is seen by everybody"
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False
    for job in ("gate", "publish"):
        (rule,) = load(GITLAB)[job]["rules"]
        assert "$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH" in rule["if"], job


def test_the_watch_runs_each_hour():
    (schedule,) = load(GITHUB)[True]["schedule"]
    assert re.fullmatch(r"\d+ \* \* \* \*", schedule["cron"])
    assert "schedule" in load(GITHUB)["jobs"]["watch"]["if"]
    assert load(GITLAB)["watch"]["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "schedule"'}]


FAKE_GH = """#!/bin/sh
case "$2" in
list) cat issues ;;
create) echo "$4" >> issues; cat "$6" > /dev/null ;;
esac
"""
RELEASES = {"releases": [{"tag": "v0.34.0.post1"}, {"tag": "v0.34.0"}]}


def run_watch(script, folder):
    """Run the last step of the watch, with programs of our own for GitHub's and ours."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (folder / "issues").touch()
    (programs / "python").unlink(missing_ok=True)
    (programs / "python").symlink_to(sys.executable)
    (folder / "upstream.json").write_text(json.dumps(RELEASES))
    for name, text in (
        ("gh", FAKE_GH),
        ("builder", '#!/bin/sh\necho "$@" >> asked\ntouch upstream.md\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-e", "-c", script.replace("python -m builder", "builder")], cwd=folder,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip


def test_the_watch_opens_an_issue_for_each_release_once(tmp_path):
    """Not one an hour; and the title of one release is no other one's."""
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed, which GitHub's machines have")
    script = scripts(GITHUB)["watch"][-1]
    for _ in range(3):
        done = run_watch(script, tmp_path)
        assert done.returncode == 0, done.stderr
    titles = (tmp_path / "issues").read_text().splitlines()
    assert titles == ["Upstream released v0.34.0.post1", "Upstream released v0.34.0"]
    assert "--onto v0.34.0 " in (tmp_path / "asked").read_text()


def test_the_watch_on_gitlab_fails_once_for_each_release(tmp_path):
    job = load(GITLAB)["watch"]
    assert job["cache"]["when"] == "always"
    assert ".cache/told" in job["cache"]["paths"]
    first, second = (run_watch(job["script"][-1], tmp_path) for _ in range(2))
    assert first.returncode
    assert "v0.34.0.post1, v0.34.0" in first.stderr
    assert second.returncode == 0, second.stderr


def test_the_gate_runs_what_the_policy_asks_for():
    """A shorter soak than the policy's would let nothing in, after hours."""
    shipped = policy.load_default(default_project())
    least = {c.at_least["engine soak: seconds"] for c in shipped.channels.values()}
    jobs = (load(GITHUB)["jobs"]["gate"]["env"], load(GITLAB)["gate"]["variables"])
    assert {float(job["VLLM_GLM5_SOAK_SECONDS"]) for job in jobs} == least


def test_gates_on_one_machine_share_what_keeps_them_apart(monkeypatch):
    """Each work folder with a cache of its own would have a lock of its own."""
    for gate in (load(GITHUB)["jobs"]["gate"]["env"], load(GITLAB)["gate"]["variables"]):
        monkeypatch.setenv("VLLM_GLM5_CACHE", gate["VLLM_GLM5_CACHE"])
        assert default_cache().root == user_cache_path("vllm-glm5")


def test_actions_are_pinned():
    """A tag can be moved to another commit; what it runs has our secrets."""
    for line in GITHUB.read_text().splitlines():
        if "uses:" in line:
            assert re.search(r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("file", [GITHUB, GITLAB, ROOT / "ci" / "build"], ids=lambda f: f.name)
def test_what_a_series_leans_on_is_looked_at_before_it_is_built(file):
    lines = [line for line in file.read_text().splitlines() if BUILDER in line]
    contracts = next(n for n, line in enumerate(lines) if "builder contracts --tag" in line)
    builds = [n for n, line in enumerate(lines) if "builder --tag" in line]
    assert builds
    assert all(contracts < n for n in builds)
