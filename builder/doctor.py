"""Find out whose vllm files an environment holds, and say what to run.

The distributions ``vllm`` and ``vllm-glm5`` own the same files. pip and uv do not notice: the one
installed last wins, and uninstalling either takes files from both. The RECORD of each says which
bytes it installed, so the files on the disk tell whose they are.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from builder import metadata
from builder.errors import MixedInstallError, ToolchainError
from builder.install_lines import PRIVATE_PLACEHOLDER, index_options, simple_url, with_hint
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION

PACKAGE = "vllm"

# -E and the first line: neither PYTHONPATH nor the working folder decide what is found. Not -I,
# which would hide packages of the user's own site; not -S, which would hide site-packages. vllm is
# located without being imported.
_PROBE = """
import sys
if sys.path[0] == "": del sys.path[0]
import importlib.util, json
spec = importlib.util.find_spec("vllm")
print(json.dumps({
    "path": sys.path,
    "package": list(spec.submodule_search_locations or ()) if spec else [],
    "pip": importlib.util.find_spec("pip") is not None,
}))
"""
_DIST_INFO = re.compile(r"(?P<name>[^-]+)-(?P<version>.+)\.dist-info")
_SHOWN = 5  # file names in a message


class State(StrEnum):
    """What an environment holds; those from BOTH on are faults."""

    NOTHING = "neither is installed"
    SOURCE_TREE = "an editable install or a source tree"
    UPSTREAM = "upstream only"
    HEALTHY = "healthy"
    BOTH = "both are installed over each other"
    SHADOWED = "another vllm is imported than the installed vllm-glm5"
    DELETED = "files are missing, as after an uninstall of the other distribution"
    EDITED = "files differ from what was installed"
    ALIAS_ONLY = "the alias vllm without the vllm-glm5 that it stands for"
    ORPHANED = "files that no installed distribution owns"

    @property
    def broken(self) -> bool:
        return list(State).index(self) >= list(State).index(State.BOTH)


@dataclass(frozen=True)
class Installed:
    """One distribution, and how its files of the package compare with its RECORD.

    :param folder: the folder (``site-packages``) that it is installed in.
    :param files: how many files of the package vllm its RECORD lists; 0 for the alias and for
        editable installs.
    :param missing: listed files that are not there.
    :param edited: listed files with other bytes.
    :param source: the wheel that it was installed from, where it was named directly.
    """

    name: str
    version: str
    folder: str
    alias: bool
    editable: bool
    files: int
    missing: tuple[str, ...]
    edited: tuple[str, ...]
    source: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and the commands that repair it, in order.

    :param package: the folder that ``import vllm`` takes; None where there is none.
    """

    python: str
    state: State
    summary: str
    package: str | None
    installed: tuple[Installed, ...]
    details: tuple[str, ...]
    commands: tuple[str, ...]

    @property
    def broken(self) -> bool:
        return self.state.broken


def examine(python: Path, *, index: str | Path | None = None) -> Diagnosis:
    """Diagnose an environment, and insist that it is not broken.

    :param python: its interpreter, or the environment's folder.
    :param index: URL or folder of the channel to reinstall from, for the printed commands.
    :raises MixedInstallError: the files are not those that the metadata promises.
    :raises ToolchainError: that interpreter does not run.
    """
    diagnosis = diagnose(python, index=index)
    if diagnosis.broken:
        raise MixedInstallError(
            diagnosis.summary,
            where=diagnosis.python,
            details=(*map(_describe, diagnosis.installed), *diagnosis.details),
            next_step="\n    ".join(["run, in this order:", *diagnosis.commands]),
        )
    return diagnosis


def render(diagnosis: Diagnosis) -> str:
    lines = [f"{diagnosis.python}: {diagnosis.summary}"]
    lines += [f"  {line}" for line in (*map(_describe, diagnosis.installed), *diagnosis.details)]
    if diagnosis.commands:
        lines += ["run, in this order:" if diagnosis.broken else f"to have {DISTRIBUTION}, run:"]
        lines += [f"  {command}" for command in diagnosis.commands]
    return "\n".join(lines)


def diagnose(python: Path, *, index: str | Path | None = None) -> Diagnosis:
    """Like :func:`examine`, but return the diagnosis of a broken environment as well."""
    if python.is_dir():
        python = python / "bin" / "python"
    probed = _probe(python)
    # Resolved: lib64 may be a link to lib, and both on the path.
    entries = dict.fromkeys(Path(entry).resolve() for entry in probed["path"])
    folders = [entry for entry in entries if entry.is_dir()]
    found = _installed(folders)
    package = Path(probed["package"][0]).resolve() if probed["package"] else None
    tools = _Commands(python, has_pip=probed["pip"], index=index)
    state, summary, details = _judge(found, package)
    return Diagnosis(
        python=str(python),
        state=state,
        summary=summary,
        package=str(package) if package else None,
        installed=found,
        details=(*details, *_dependants(folders, found)),
        commands=tuple(map(with_hint, _repair(state, found, package, tools))),
    )


def _probe(python: Path) -> dict[str, Any]:
    try:
        said = subprocess.run(
            [python, "-E", "-c", _PROBE], capture_output=True, text=True, check=True, timeout=120
        )
        answer: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said_ = getattr(error, "stderr", None) or str(error)
        if isinstance(error, ValueError | IndexError):
            said_ = "it answers, and not as Python does"
        raise ToolchainError(
            "this interpreter does not run",
            where=str(python),
            details=tuple(str(said_).strip().splitlines()[-_SHOWN:]),
            next_step="name the environment's own: --python ENV/bin/python",
        ) from error
    return answer


def _installed(folders: Iterable[Path]) -> tuple[Installed, ...]:
    found = []
    for folder in folders:
        for dist_info in sorted(folder.glob("*.dist-info")):
            match = _DIST_INFO.fullmatch(dist_info.name)
            name = re.sub(r"[-_.]+", "-", match["name"]).lower() if match else ""
            if match and name in {DISTRIBUTION, UPSTREAM_DISTRIBUTION}:
                found.append(_inspect(dist_info, name, match["version"]))
    return tuple(found)


def _inspect(dist_info: Path, name: str, version: str) -> Installed:
    folder = dist_info.parent
    record = _record(dist_info)
    requires = _metadata(dist_info, "Requires-Dist")
    missing, edited = [], []
    for path, digest in record.items():
        if not (folder / path).is_file():
            missing.append(path)
        elif not _matches(folder / path, digest):
            edited.append(path)
    origin = _direct_url(dist_info)
    stands_for = any(re.match(rf"{DISTRIBUTION}\s*==", line) for line in requires)
    return Installed(
        name=name,
        version=version,
        folder=str(folder),
        alias=name == UPSTREAM_DISTRIBUTION and not record and stands_for,
        editable=bool(origin.get("dir_info", {}).get("editable")),
        files=len(record),
        missing=tuple(missing),
        edited=tuple(edited),
        source=_wheel_of(origin),
    )


def _record(dist_info: Path) -> dict[str, str]:
    """Return the hashes of the package's files; bytecode is not the distribution's."""
    try:
        text = (dist_info / "RECORD").read_text()
    except FileNotFoundError:
        return {}
    rows = (row for row in csv.reader(text.splitlines()) if row)
    return {
        path: digest
        for path, digest, *_ in rows
        if path.startswith(f"{PACKAGE}/") and not path.endswith(".pyc")
    }


def _matches(path: Path, digest: str) -> bool:
    name, _, expected = digest.partition("=")
    if not expected:
        return True
    with path.open("rb") as file:
        found = hashlib.file_digest(file, name).digest()
    return base64.urlsafe_b64encode(found).decode().rstrip("=") == expected.rstrip("=")


def _metadata(dist_info: Path, field: str) -> list[str]:
    try:
        text = (dist_info / "METADATA").read_text(errors="replace")
    except OSError:  # an interrupted uninstall leaves such folders
        return []
    return metadata.parse(text).values(field)


def _direct_url(dist_info: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((dist_info / "direct_url.json").read_text())
    except (OSError, ValueError):
        return {}
    return found


def _wheel_of(origin: dict[str, Any]) -> str | None:
    """Return the wheel named by direct_url.json (PEP 610), where it can still be had."""
    url = origin.get("url", "")
    if "archive_info" not in origin or "@" in urlsplit(url).netloc:
        return None
    if not url.startswith("file:"):
        return str(url)
    path = unquote(urlsplit(url).path)
    return path if Path(path).is_file() else None


def _judge(
    found: tuple[Installed, ...], package: Path | None
) -> tuple[State, str, tuple[str, ...]]:
    """Return the state, one sentence about it, and further facts."""
    owners = [dist for dist in found if dist.files]
    if not owners:
        return _judge_without_files(found, package)
    folder = str(package.parent) if package else owners[0].folder
    used = [dist for dist in owners if dist.folder == folder]
    ours = [dist for dist in owners if dist.name == DISTRIBUTION]
    if not used or (ours and not any(dist.name == DISTRIBUTION for dist in used)):
        details = (f"import vllm takes {package}",)
        return State.SHADOWED, f"{owners[0]} is installed, and another vllm is imported", details
    if len(used) > 1:
        return State.BOTH, *_whose(used)
    (only,) = used
    if only.missing:
        summary = f"{len(only.missing)} of the {only.files} files of {only} are missing"
        return State.DELETED, f"{summary}: another distribution was uninstalled", _some(only)
    if only.edited:
        summary = f"{len(only.edited)} files of {only} are not what was installed"
        return State.EDITED, f"{summary}: something edited or overwrote them", _some(only)
    if only.name == UPSTREAM_DISTRIBUTION:
        return State.UPSTREAM, f"upstream's {only}, without {DISTRIBUTION}", ()
    return State.HEALTHY, f"healthy: {only}", _stale_alias(found, only)


def _judge_without_files(
    found: tuple[Installed, ...], package: Path | None
) -> tuple[State, str, tuple[str, ...]]:
    if any(dist.editable for dist in found):
        return State.SOURCE_TREE, f"an editable install, in {package}", ()
    if any(dist.alias for dist in found) and not any(dist.name == DISTRIBUTION for dist in found):
        return State.ALIAS_ONLY, f"the alias is installed, and no {DISTRIBUTION}", ()
    if found:  # without RECORD, or one that lists nothing
        return State.DELETED, f"{found[0]} has lost its RECORD: an uninstall was cut short", ()
    if package is None or not _own_files(package):
        return State.NOTHING, f"neither {DISTRIBUTION} nor {UPSTREAM_DISTRIBUTION} is installed", ()
    if package.parent.name in {"site-packages", "dist-packages"}:
        return State.ORPHANED, f"{package} belongs to no installed distribution", ()
    return State.SOURCE_TREE, f"a source tree, {package}", ()


def _own_files(package: Path) -> bool:
    return any(p.is_file() and p.suffix != ".pyc" for p in package.rglob("*"))


def _whose(used: list[Installed]) -> tuple[str, tuple[str, ...]]:
    """Say whose files are there: those that their RECORDs tell apart decide."""
    intact = {dist: _telling(dist, used) for dist in used}
    names = " and ".join(str(dist) for dist in used)
    right = [dist for dist, (same, all_) in intact.items() if same == all_]
    if len(right) == len(used):
        whose = "and do not differ in any file"
    elif right:
        whose = f"and the files are those of {right[0]}"
    else:
        whose = "and the files are a mixture of both"
    details = tuple(
        f"{dist}: {same} of the {all_} files that tell them apart are its own"
        for dist, (same, all_) in intact.items()
    )
    return f"{names} are installed over each other, {whose}", details


def _telling(dist: Installed, used: list[Installed]) -> tuple[int, int]:
    """Count the paths that another RECORD lists with other bytes: those that match, and all."""
    records = {other: _record(Path(other.folder) / _dist_info_of(other)) for other in used}
    mine = records.pop(dist)
    telling = {
        path
        for path, digest in mine.items()
        for record in records.values()
        if path in record and record[path] != digest
    }
    wrong = telling & {*dist.missing, *dist.edited}
    return len(telling) - len(wrong), len(telling)


def _dist_info_of(dist: Installed) -> str:
    return f"{dist.name.replace('-', '_')}-{dist.version}.dist-info"


def _some(dist: Installed) -> tuple[str, ...]:
    lines = [f"missing  {path}" for path in dist.missing[:_SHOWN]]
    lines += [f"differs  {path}" for path in dist.edited[:_SHOWN]]
    rest = len(dist.missing) + len(dist.edited) - len(lines)
    return (*lines, f"and {rest} more") if rest else tuple(lines)


def _stale_alias(found: tuple[Installed, ...], ours: Installed) -> tuple[str, ...]:
    return tuple(
        f"the alias is of {dist.version}; install {dist.name}=={ours.version} from the same index"
        for dist in found
        if dist.alias and dist.version != ours.version
    )


def _dependants(folders: list[Path], found: tuple[Installed, ...]) -> tuple[str, ...]:
    """Name who brings upstream's distribution in, where no alias keeps it out."""
    ours = next((dist for dist in found if dist.name == DISTRIBUTION), None)
    if ours is None or any(dist.alias for dist in found):
        return ()
    wanting = sorted(
        dist_info.name.partition("-")[0]
        for folder in folders
        for dist_info in folder.glob("*.dist-info")
        if any(
            re.match(rf"{UPSTREAM_DISTRIBUTION}(?![\w.-])", line) and "extra ==" not in line
            for line in _metadata(dist_info, "Requires-Dist")
        )
    )
    return tuple(
        f"{name} requires {UPSTREAM_DISTRIBUTION}: {UPSTREAM_DISTRIBUTION}=={ours.version}, the "
        "alias (--with-alias), satisfies it without files"
        for name in wanting
    )


def _describe(dist: Installed) -> str:
    if dist.alias:
        what = "the alias, without files"
    elif dist.editable:
        what = "editable"
    elif not dist.missing and not dist.edited:
        what = f"{dist.files} files as its RECORD says"
    else:
        what = f"{dist.files} files, {len(dist.missing)} missing, {len(dist.edited)} other bytes"
    return f"{dist} in {dist.folder}: {what}"


class _Commands:
    """pip's words where the environment has pip, else uv's."""

    def __init__(self, python: Path, *, has_pip: bool, index: str | Path | None) -> None:
        self._python = str(python)
        self._has_pip = has_pip
        self._index = index or PRIVATE_PLACEHOLDER

    def uninstall(self, *names: str) -> str:
        if self._has_pip:
            return shlex.join([self._python, "-m", "pip", "uninstall", "-y", *names])
        return shlex.join(["uv", "pip", "uninstall", "--python", self._python, *names])

    def install(self, what: str, *, ours: bool, again: bool = False) -> str:
        """Install with dependencies, or only put this one's files back (``again``)."""
        pip, uv = index_options(self._index) if ours and not again else ([], [])
        if ours and again:
            private = simple_url(self._index)
            pip, uv = ["--index-url", private], ["--default-index", private]
        if what.endswith(".whl"):
            pip, uv = [], []
        if self._has_pip:
            force = ["--force-reinstall", "--no-deps"] if again else []
            return shlex.join([self._python, "-m", "pip", "install", *force, what, *pip])
        force = ["--reinstall", "--no-deps"] if again else []
        return shlex.join(["uv", "pip", "install", "--python", self._python, *force, what, *uv])


def _repair(
    state: State, found: tuple[Installed, ...], package: Path | None, tools: _Commands
) -> tuple[str, ...]:
    if state in {State.HEALTHY, State.SOURCE_TREE}:
        return ()
    ours = next((dist for dist in found if dist.name == DISTRIBUTION), None)
    if state in {State.DELETED, State.EDITED} and found[0].files:
        owner = next(dist for dist in found if dist.missing or dist.edited)
        is_ours = owner.name == DISTRIBUTION
        what = owner.source or f"{owner.name}=={owner.version}"
        return (tools.install(what, ours=is_ours, again=True),)
    alias = next((dist for dist in found if dist.alias), None)
    version = ours or alias
    wanted = f"{DISTRIBUTION}=={version.version}" if version else DISTRIBUTION
    if ours and ours.source:
        wanted = ours.source
    install = tools.install(wanted, ours=True)
    if state in {State.NOTHING, State.ALIAS_ONLY}:
        return (install,)
    if state is State.ORPHANED:
        return shlex.join(["rm", "-r", str(package)]), install
    names = list(dict.fromkeys(dist.name for dist in found if not dist.alias))
    remove = [tools.uninstall(*names)]
    if any(not dist.files for dist in found if not dist.alias):  # pip cannot without a RECORD
        remove = [
            shlex.join(["rm", "-r", f"{d.folder}/{_dist_info_of(d)}"]) for d in found if not d.files
        ]
    return *remove, install
