"""The commands that mend an environment, in pip's words or in uv's."""

from __future__ import annotations

import shlex
from pathlib import Path

from builder import alias
from builder.install_lines import PRIVATE_PLACEHOLDER, index_options, simple_url
from builder.installed import Installed
from builder.judgement import State
from builder.locations import DISTRIBUTION


class Installer:
    """pip's words where the environment has pip, else uv's."""

    def __init__(self, python: Path, *, has_pip: bool, index: str | Path | None) -> None:
        self._python = str(python)
        self._has_pip = has_pip
        self._index = index or PRIVATE_PLACEHOLDER

    def uninstall(self, *names: str) -> str:
        if self._has_pip:
            return shlex.join([self._python, "-m", "pip", "uninstall", "-y", *names])
        return shlex.join(["uv", "pip", "uninstall", "--python", self._python, *names])

    def install(self, *what: str, ours: bool, again: bool = False) -> str:
        """Install with dependencies, or only put this one's files back (``again``)."""
        pip, uv = index_options(self._index) if ours and not again else ([], [])
        if ours and again:
            private = simple_url(self._index)
            pip, uv = ["--index-url", private], ["--default-index", private]
        if all(each.endswith(".whl") for each in what):
            pip, uv = [], []
        if self._has_pip:
            force = ["--force-reinstall", "--no-deps"] if again else []
            return shlex.join([self._python, "-m", "pip", "install", *force, *what, *pip])
        force = ["--reinstall", "--no-deps"] if again else []
        return shlex.join(["uv", "pip", "install", "--python", self._python, *force, *what, *uv])


def repair(
    state: State, found: tuple[Installed, ...], package: Path | None, tools: Installer
) -> tuple[str, ...]:
    """Return the commands, in order; none where nothing is wrong."""
    if state in {State.HEALTHY, State.SOURCE_TREE}:
        return ()
    ours = next((dist for dist in found if dist.name == DISTRIBUTION), None)
    owner = next((dist for dist in found if dist.missing or dist.edited), None)
    if state in {State.DELETED, State.EDITED} and owner is not None:
        is_ours = owner.name == DISTRIBUTION
        what = owner.source or f"{owner.name}=={owner.version}"
        return (tools.install(what, ours=is_ours, again=True),)
    install = tools.install(*_wanted(ours, found), ours=True)
    if state in {State.NOTHING, State.ALIAS_ONLY}:
        return (install,)
    if state is State.ORPHANED:
        return shlex.join(["rm", "-r", str(package)]), install
    names = list(dict.fromkeys(dist.name for dist in found if not dist.alias))
    remove = [tools.uninstall(*names)]
    if any(not dist.files for dist in found if not dist.alias):  # pip cannot without a RECORD
        remove = [
            shlex.join(["rm", "-r", str(d.dist_info)]) for d in found if not (d.files or d.alias)
        ]
    return *remove, install


def _wanted(ours: Installed | None, found: tuple[Installed, ...]) -> list[str]:
    """Return what to install: the same version again, and its alias where it has one."""
    stand_in = next((dist for dist in found if dist.alias), None)
    known = ours or stand_in
    if known is None:
        return [DISTRIBUTION]
    wanted = [(ours and ours.source) or f"{DISTRIBUTION}=={known.version}"]
    if known.requires_alias or (stand_in and stand_in.version == known.version):
        source = Path(ours.source) if ours and ours.source else None
        beside = source and source.with_name(alias.alias_name(known.version))
        found_beside = beside is not None and beside.is_file()
        wanted.append(str(beside) if found_beside else alias.requirement(known.version))
    return wanted
