"""Find out whose vllm files an environment holds, and say what to run.

The distributions ``vllm`` and ``vllm-glm5`` own the same files. pip and uv do not notice: the one
installed last wins, and uninstalling either takes files from both. The RECORD of each says which
bytes it installed, so the files on the disk tell whose they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.errors import MixedInstallError
from builder.install_lines import with_hint
from builder.installed import Installed, dependants, find_installed, probe
from builder.judgement import State, judge
from builder.locations import DISTRIBUTION
from builder.repair import Installer, repair
from builder.words import counted

__all__ = ["Diagnosis", "State", "diagnose", "examine", "render"]


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
    probed = probe(python)
    # Resolved: lib64 may be a link to lib, and both on the path.
    entries = dict.fromkeys(Path(entry).resolve() for entry in probed["path"])
    folders = [entry for entry in entries if entry.is_dir()]
    found = find_installed(folders)
    package = Path(probed["package"][0]).resolve() if probed["package"] else None
    tools = Installer(python, has_pip=probed["pip"], index=index)
    state, summary, details = judge(found, package)
    return Diagnosis(
        python=str(python),
        state=state,
        summary=summary,
        package=str(package) if package else None,
        installed=found,
        details=(*details, *dependants(folders, found)),
        commands=tuple(map(with_hint, repair(state, found, package, tools))),
    )


def _describe(dist: Installed) -> str:
    if dist.alias:
        what = "the alias, without files"
    elif dist.editable:
        what = "editable"
    elif not dist.missing and not dist.edited:
        what = f"{counted(dist.files, 'file')} as its RECORD says"
    else:
        what = f"{counted(dist.files, 'file')}, {len(dist.missing)} missing, {len(dist.edited)} other bytes"
    return f"{dist} in {dist.folder}: {what}"
