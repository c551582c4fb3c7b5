"""git, isolated from the user: one way to run it, and the one repository for all releases.

GitPython passes the whole environment on, so a GIT_DIR, GIT_CONFIG_COUNT or an attributes file of
the user would change what ``am`` takes and ``format-patch`` writes; here the environment is made
from nothing. What each variable and flag is for stands beside it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder import atomic
from builder.console import say
from builder.errors import BuilderError, ToolchainError
from builder.locations import Cache

IDENTITY = ("vllm-glm5 maintainers", "maintainers@vllm-glm5.invalid")

# What a build may take from the user's environment: where programs and scratch space are, and how
# `fetch` of --source git reaches the network.
_PASSED = ("PATH", "TMPDIR", "SSH_AUTH_SOCK", "SSL_CERT_FILE", "GIT_SSL_CAINFO")
_PASSED_FOR_NETWORK = ("HOME", "http_proxy", "https_proxy", "all_proxy", "no_proxy", "ALL_PROXY")

_ENVIRONMENT = {
    "LC_ALL": "C",  # messages are parsed
    "TZ": "UTC",
    "HOME": "/nonexistent",  # no ~/.gitconfig, no ~/.config/git
    "XDG_CONFIG_HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",  # no /etc/gitconfig
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",  # no /etc/gitattributes
    "GIT_TERMINAL_PROMPT": "0",  # fail instead of asking for a password
    "GIT_EDITOR": "false",  # nothing may open an editor
    "GIT_ADVICE": "0",
    # status would write the index, and leave its lock in a person's work tree where it is killed
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_COMMITTER_NAME": IDENTITY[0],
    "GIT_COMMITTER_EMAIL": IDENTITY[1],
}

_CONFIGURATION = (
    "-c", f"core.hooksPath={os.devnull}",  # a hook could change or refuse a commit
    "-c", "core.autocrlf=false",  # bytes stay bytes
    "-c", "core.fsmonitor=false",  # starts a daemon
    "-c", "gc.auto=0",  # no background process in the middle of a build
    "-c", "maintenance.auto=false",
    "-c", "commit.gpgSign=false",  # a signature would change the commit id
    "-c", "advice.detachedHead=false",
    "-c", "core.quotePath=false",
    "-c", "protocol.file.allow=always",
    "-c", "safe.directory=*",  # the cache may belong to another user (CI)
    "-c", "core.fsync=committed",  # a commit that we report survives a power cut
)  # fmt: skip

# Highest precedence of all attributes: upstream's own .gitattributes cannot convert line ends or
# call a text binary, and hunk headers name the Python function or class.
ATTRIBUTES = "* -text -ident -filter -working-tree-encoding !merge !diff\n*.py diff=python\n"


class GitError(BuilderError):
    """git ended with an error that no stage understands."""


@dataclass(frozen=True)
class Git:
    """git commands in one folder: a work tree or a bare repository."""

    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return ["git", *_CONFIGURATION, *arguments]

    def environment(self, *, network: bool = False) -> dict[str, str]:
        passed = _PASSED + (_PASSED_FOR_NETWORK if network else ())
        return _ENVIRONMENT | {name: os.environ[name] for name in passed if name in os.environ}

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        environment: Mapping[str, str] | None = None,
        network: bool = False,
    ) -> bytes:
        """Run ``git arguments`` and return its stdout.

        :raises GitError: git failed; the message holds what it said.
        :raises DiskFullError: it found no space.
        """
        result = self.attempt(*arguments, stdin=stdin, environment=environment, network=network)
        if result.returncode:
            said = result.stderr.decode(errors="replace").strip().splitlines()
            if atomic.says_disk_full(said, self.folder):
                raise atomic.disk_full_error(self.folder)
            raise GitError(
                f"git {arguments[0]} failed with status {result.returncode}",
                where=str(self.folder),
                details=tuple(said[-12:]),
                next_step="read git's message above; `python -m builder clean` deletes the cache, "
                "which is made anew",
            )
        return result.stdout

    def attempt(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        environment: Mapping[str, str] | None = None,
        network: bool = False,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run git and leave the exit status to the caller."""
        env = self.environment(network=network) | dict(environment or {})
        try:
            return subprocess.run(
                self.command(*arguments),
                cwd=self.folder,
                env=env,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise ToolchainError(
                "git is not installed",
                next_step="install git 2.36 or newer and run the command again",
            ) from error

    def blob(self, name: str) -> bytes | None:
        """Return the bytes of a blob by any name that git knows; None where there is none."""
        result = self.attempt("cat-file", "blob", name)
        return result.stdout if result.returncode == 0 else None

    def text(self, *arguments: str) -> str:
        return self.run(*arguments).decode().strip()

    def changes(self) -> list[str]:
        """Return what differs from HEAD in the work tree, untracked files too, as status writes it.

        Two letters (the index, the work tree), a space and the path.
        """
        return self.run("status", "--porcelain", "--untracked-files=all").decode().splitlines()

    def resolve(self, name: str) -> str | None:
        """Return the commit id that ``name`` stands for, or None."""
        result = self.attempt("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        return result.stdout.decode().strip() if result.returncode == 0 else None


def open_repository(cache: Cache) -> Git:
    """Return the shared bare repository of the cache; make it where it is missing.

    All releases share it, so that a 3-way merge between releases finds every blob.
    """
    path = cache.repository
    if not _is_usable(path):
        with (
            atomic.disk_full_is_an_error(path),
            atomic.exclusive(path, "the source repository"),
        ):
            if not _is_usable(path):
                if path.exists():
                    say("the source repository is damaged; it is made again")
                atomic.remove(path)
                with atomic.scratch_folder(path.parent) as scratch:
                    made = Git(scratch / "made.git")
                    made.folder.mkdir()
                    # No template: the user's could bring hooks. `main` is never used; it is named
                    # so that git does not advise about it.
                    made.run("init", "--bare", "--quiet", "--template=", "--initial-branch=main")
                    (made.folder / "info").mkdir(exist_ok=True)
                    (made.folder / "info" / "attributes").write_text(ATTRIBUTES)
                    made.folder.rename(path)
    return Git(path)


def _is_usable(repository: Path) -> bool:
    """Tell whether all is there that git needs, and no object is empty, as a power cut leaves it.

    git calls such an object missing, which would read as if a patch did not fit.
    """
    if not all((repository / name).is_dir() for name in ("objects", "refs")):
        return False
    head = repository / "HEAD"
    objects = (repository / "objects").glob("??/[0-9a-f]*")
    return head.is_file() and all(path.stat().st_size for path in (head, *objects))
