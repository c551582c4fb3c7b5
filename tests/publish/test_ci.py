"""The pipeline files: valid, of commands that exist, for all releases, and closed to strangers."""

from __future__ import annotations

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

from builder import cli, pin, policy, series
from builder.locations import default_cache, default_project
from tests.commands import ROOT

GITHUB, GITLAB = ROOT / "ci" / "github-actions.yml", ROOT / "ci" / "gitlab.yml"
BOTH = pytest.mark.parametrize("file", [GITHUB, GITLAB], ids=["github", "gitlab"])
SCHEMAS = {
    GITHUB: ["--builtin-schema", "vendor.github-workflows"],
    GITLAB: ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"],
}
BUILDER = "python -m builder "


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
    command = re.sub(r"\$\{\{ matrix\.tag \}\}|\$TAG", "v0.20.2", command)
    command = re.sub(r"\$\{\{ matrix\.arch \}\}|\$ARCH", "x86_64", command)
    assert "${{" not in command, line
    return shlex.split(command)


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
    for job in ("build", "gate", "publish"):
        matrix = load(GITHUB)["jobs"][job]["strategy"]["matrix"]
        assert (set(matrix["tag"]), set(matrix["arch"])) == (tags, machines), job
        (matrix,) = load(GITLAB)[job]["parallel"]["matrix"]
        assert (set(matrix["TAG"]), set(matrix["ARCH"])) == (tags, machines), job


def test_nothing_is_published_without_its_gate():
    jobs = load(GITHUB)["jobs"]
    assert jobs["gate"]["needs"] == "build"
    assert jobs["publish"]["needs"] == "gate"
    assert jobs["publish"]["environment"] == load(GITLAB)["publish"]["environment"] == "stable"
    assert load(GITLAB)["publish"]["needs"] == ["build", "gate"]
    for file in (GITHUB, GITLAB):
        for line in builder_lines(file):
            if words(line)[0] in {"publish", "promote"}:
                assert "--report" in words(line)
                assert "staging" not in line


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
