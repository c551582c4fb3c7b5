"""A small upstream release, a developer's own repository of it, and a fork's project on it.

The developer's side is plain git that knows nothing of the tool: it makes the patch files that the
tests hand to the tool, and it is the control for what git does by itself.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder import export
from builder.apply import AppliedSeries, apply_series, read_patches
from builder.checkout import SourceTree, from_sdist
from builder.edit import edit, require_clean
from builder.fetch import cached_path
from builder.locations import Cache, Project
from builder.patchfile import Patch
from builder.pin import Pin, PinnedFile, save
from builder.repository import Git
from builder.series import Series, read_series
from tests.commands import ROOT, advised

TAG = "v1.2.3"
AUTHOR = "vllm-glm5 maintainers"
EMAIL = "maintainers@vllm-glm5.invalid"
DATE = "1700000000 +0100"
TRAILERS = (
    "Upstream-Status: Pending\n"
    'Drop-When: path vllm/core.py contains "ready"\n'
    f"Signed-off-by: {AUTHOR} <{EMAIL}>\n"
)
REASON = (
    "Servers with such a card stop at start-up, because the table has no entry for it.\n"
    "An entry costs nothing elsewhere; a fallback would hide the next card.\n"
)

CORE = '''"""Core."""

import os


class Engine:
    """An engine."""

    def start(self, size):
        total = 0
        for step in range(size):
            total += step
        return total

    def stop(self):
        self.running = False
        return None


class Worker:
    def start(self, size):
        self.size = size
        return self.size


def main():
    engine = Engine()
    print(engine.start(3))


if __name__ == "__main__":
    main()
'''

FILES: dict[str, str | bytes] = {
    "README.md": "# vllm\n\nServing.\n",
    "LICENSE": "Apache\n",
    ".gitattributes": "*.txt text eol=crlf\n*.dat binary\n*.lock -diff\n",
    ".gitignore": "*.log\n",
    "pyproject.toml": '[project]\nname = "vllm"\ndynamic = ["version", "dependencies"]\n',
    "setup.py": "from setuptools import setup\n\nsetup()\n",
    "requirements/common.txt": "requests >= 2\n",
    "requirements/cuda.txt": "-r common.txt\ntorch == 2.0\n",
    "csrc/ops.cu": "int add(int a, int b) {\n  return a + b;\n}\n",
    "vllm/__init__.py": "",
    "vllm/core.py": CORE,
    "vllm/table.json": '{\n  "a": 1,\n  "b": 2\n}\n',
    "vllm/dos.py": "def one():\r\n    x = 1\r\n    y = 2\r\n    return x + y\r\n",
    "vllm/no_end.py": "first = 1\nsecond = 2\nthird = 3",
    "vllm/notes.txt": "one\ntwo\nthree\n",
    "vllm/deps.lock": "a=1\nb=2\nc=3\n",
    "tests/test_core.py": "def test_core():\n    assert True\n",
}


def message(subject: str, *, body: str = REASON, trailers: str = TRAILERS) -> str:
    return "\n".join(part for part in (f"{subject}\n", f"{body}", trailers) if part)


def clean_environment(**more: str) -> dict[str, str]:
    """What a developer without any git settings has."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "XDG_CONFIG_HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "LC_ALL": "C",
        "GIT_AUTHOR_NAME": AUTHOR,
        "GIT_AUTHOR_EMAIL": EMAIL,
        "GIT_AUTHOR_DATE": DATE,
        "GIT_COMMITTER_NAME": "Somebody",
        "GIT_COMMITTER_EMAIL": "somebody@example.invalid",
        "GIT_EDITOR": "false",
    } | more


def as_bytes(data: str | bytes) -> bytes:
    return data if isinstance(data, bytes) else data.encode()


class Developer:
    """Plain git in a folder."""

    FORMAT = (
        "--stdout", "--keep-subject", "--zero-commit", "--full-index", "--no-signature",
        "--no-stat", "--no-renames", "--no-encode-email-headers", "--unified=3",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def new(cls, folder: Path, files: Mapping[str, str | bytes] = FILES) -> Developer:
        folder.mkdir(parents=True)
        self = cls(folder)
        self.git("init", "--quiet", "--initial-branch=main")
        (folder / ".git" / "info").mkdir(exist_ok=True)
        (folder / ".git" / "info" / "attributes").write_text("* -text !diff\n*.py diff=python\n")
        self.commit(dict(files), "release\n")
        self.git("tag", "release")
        return self

    def attempt(self, *arguments: str, stdin: bytes | None = None, **environment: str):
        return subprocess.run(
            ["git", *arguments],
            cwd=self.folder, env=clean_environment(**environment),
            input=stdin, capture_output=True, check=False,
        )  # fmt: skip

    def git(self, *arguments: str, stdin: bytes | None = None, **environment: str) -> bytes:
        result = self.attempt(*arguments, stdin=stdin, **environment)
        assert result.returncode == 0, (arguments, result.stderr, result.stdout)
        return result.stdout

    def write(self, changes: Mapping[str, str | bytes | None]) -> None:
        for path, data in changes.items():
            file = self.folder / path
            if data is None:
                file.unlink()
            else:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(as_bytes(data))

    def commit(self, changes: Mapping[str, str | bytes | None], text: str, **environment) -> str:
        self.write(changes)
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--cleanup=verbatim", "--allow-empty", "-F-",
                 stdin=text.encode(), **environment)  # fmt: skip
        return self.head

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD").decode().strip()

    def read(self, path: str, commit: str = "HEAD") -> bytes:
        return self.git("cat-file", "blob", f"{commit}:{path}")

    def patch(
        self,
        changes: Mapping[str, str | bytes | None],
        subject: str = "Do the thing",
        *,
        text: str | None = None,
        options: tuple[str, ...] = (),
        **environment: str,
    ) -> bytes:
        """Commit the changes and return the commit as a patch file."""
        self.commit(changes, text or message(subject), **environment)
        return self.git("format-patch", *self.FORMAT, *options, "-1", "HEAD")

    def reset(self, commit: str = "release") -> None:
        self.git("reset", "--quiet", "--hard", commit)
        self.git("clean", "--quiet", "-fdx")


def write_sdist(path: Path, files: Mapping[str, str | bytes], version: str) -> PinnedFile:
    """Write the release as upstream's index would serve it."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(f"vllm-{version}/{name}")
            member.size, member.mtime, member.mode = len(as_bytes(data)), 1_600_000_000, 0o644
            archive.addfile(member, io.BytesIO(as_bytes(data)))
    raw = path.read_bytes()
    return PinnedFile(path.name, len(raw), hashlib.sha256(raw).hexdigest())


@dataclass
class Fork:
    """A project with one or more releases and their series, and a cache."""

    root: Path
    project: Project
    cache: Cache

    @classmethod
    def new(cls, root: Path, files: Mapping[str, str | bytes] = FILES, tag: str = TAG) -> Fork:
        fork = cls(root, Project(root / "project"), Cache(root / "cache"))
        (fork.project.patches / "common").mkdir(parents=True)
        fork.release(files, tag)
        return fork

    def release(self, files: Mapping[str, str | bytes], tag: str = TAG) -> Pin:
        """Pin a release and put its sdist where the download would be."""
        sdist = self.root / f"vllm-{tag[1:]}.tar.gz"
        pinned = write_sdist(sdist, files, tag[1:])
        wheel = PinnedFile(f"vllm-{tag[1:]}-cp38-abi3-manylinux1_x86_64.whl", 1, "0" * 64)
        pin = Pin(tag=tag, version=tag[1:], commit="123456789", requires_python=">=3.10",
                  torch="==2.0", cuda="13.0", sdist=pinned, wheels={"x86_64": wheel})  # fmt: skip
        save(self.project.pins, pin, force=True)
        (self.project.patches / tag).mkdir(exist_ok=True)
        (self.project.patches / tag / "series").touch()
        self._place(pin, sdist)
        return pin

    def _place(self, pin: Pin, sdist: Path) -> None:
        cached = cached_path(self.cache, pin.sdist)
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(sdist.read_bytes())

    def with_cache(self, folder: Path) -> Fork:
        """Return the same project with another, empty cache."""
        other = Fork(self.root, self.project, Cache(folder))
        for sdist in self.root.glob("vllm-*.tar.gz"):
            other._place(self.pin(f"v{sdist.name[5:-7]}"), sdist)
        return other

    def pin(self, tag: str = TAG) -> Pin:
        from builder.pin import load

        return load(self.project.pins, tag)

    def folder(self, tag: str = TAG) -> Path:
        return self.project.patches / tag

    def put(self, patches: Mapping[str, bytes], tag: str = TAG) -> None:
        """Make the series exactly these patches, in this order."""
        for old in self.folder(tag).glob("*.patch"):
            old.unlink()
        for line, data in patches.items():
            (self.folder(tag) / line).write_bytes(data)
        (self.folder(tag) / "series").write_text("".join(f"{line}\n" for line in patches))

    def files(self, tag: str = TAG) -> dict[str, bytes]:
        """Return the series' folder, and common/, as they are."""
        return {
            str(path.relative_to(self.project.patches)): path.read_bytes()
            for folder in (self.folder(tag), self.project.patches / "common")
            for path in sorted(folder.iterdir())
        }

    def series(self, tag: str = TAG) -> Series:
        return read_series(self.project, tag)

    def source(self, tag: str = TAG) -> SourceTree:
        pin = self.pin(tag)
        return from_sdist(pin, cached_path(self.cache, pin.sdist), self.cache)

    def apply(self, tag: str = TAG) -> AppliedSeries:
        return apply_series(self.source(tag), self.series(tag).paths, self.cache)

    def patches(self, tag: str = TAG) -> tuple[Patch, ...]:
        return read_patches(self.series(tag).paths, self.cache)

    def apply_one(self, data: bytes, name: str = "0001-x.patch", tag: str = TAG) -> AppliedSeries:
        self.put({name: data}, tag)
        return self.apply(tag)

    def blob(self, applied: AppliedSeries, path: str) -> bytes:
        return applied.repository.run("cat-file", "blob", f"{applied.head}:{path}")

    def leftovers(self) -> list[str]:
        """List what an ended run should have taken away."""
        found = (
            [str(path) for path in self.cache.work.rglob("*")] if self.cache.work.exists() else []
        )
        worktrees = self.cache.repository / "worktrees"
        if worktrees.exists():
            found += [str(path) for path in worktrees.iterdir()]
        return found

    def advised(self, text: str) -> str:
        """Return the text as it is printed to who named the project."""
        return advised(text, self.project.root)

    def run(
        self, *arguments: object, cwd: Path | None = None, code: int | None = 0, **environment: str
    ):
        """Run the command line as a user; it ends with ``code`` (None: any), never a traceback."""
        process = subprocess.run(
            [sys.executable, "-m", "builder", "--project", str(self.project.root),
             *map(str, arguments)],
            cwd=cwd or self.root,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(self.root),
                 "VLLM_GLM5_CACHE": str(self.cache.root), "PIP_CONFIG_FILE": os.devnull,
                 "PIP_INDEX_URL": "http://127.0.0.1:9/simple"} | environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in process.stderr, process.stderr
        assert code in (None, process.returncode), (
            process.returncode,
            process.stdout,
            process.stderr,
        )
        return process


def three(developer):
    """A series of three patches that touch Python, CRLF, JSON and a file that the first adds."""
    return {
        "0001-one.patch": developer.patch(
            {"vllm/core.py": CORE.replace("total = 0", "total = 1"), "vllm/new.py": "a = 1\n"},
            "[Core] One größer",
        ),
        "0002-two.patch": developer.patch(
            {"vllm/dos.py": str(FILES["vllm/dos.py"]).replace("y = 2", "y = 3"),
             "vllm/new.py": "a = 2\n", "vllm/run.sh": "#!/bin/sh\n"},
            "[Core] Two",
        ),
        "0003-three.patch": developer.patch(
            {"vllm/table.json": '{\n  "a": 1,\n  "b": 3\n}\n', "vllm/notes.txt": None,
             "vllm/new.py": None, "vllm/deps.lock": "a=1\nb=3\nc=3\n"},
            "[Core] Three",
        ),
    }  # fmt: skip


class Work:
    """The work tree that `edit` makes, and its way back; git in it is the user's."""

    def __init__(self, fork, tag=TAG):
        self.fork, self.tag = fork, tag
        self.folder = fork.root / f"vllm-{tag}"
        if not self.folder.exists():
            edit(fork.apply(tag), self.folder)
        self.user = Developer(self.folder)

    def plan(self):
        require_clean(self.folder)
        git = Git(self.folder)
        base, head = git.text("rev-parse", f"{self.tag}^{{commit}}"), git.text("rev-parse", "HEAD")
        return export.plan_export(
            git, base, head, self.fork.series(self.tag), self.fork.project, self.fork.cache
        )

    def export(self):
        """Export as the command does; return what was written and removed."""
        plan = self.plan()
        if not plan.is_noop:
            export.write_export(plan)
        assert self.fork.leftovers() == []
        return list(plan.written), list(plan.removed)

    def check(self):
        """What CI runs."""
        applied = self.fork.apply(self.tag)
        plan = export.plan_export(
            applied.repository, applied.base, applied.head, self.fork.series(self.tag),
            self.fork.project, self.fork.cache,
        )  # fmt: skip
        export.check_export(plan)
        assert self.fork.leftovers() == []

    def commits(self):
        return self.user.git("rev-list", "--reverse", f"{self.tag}..HEAD").decode().split()

    def rebuild(self, *steps):
        """Go back to the tag and cherry-pick commits; a function in between may change things."""
        self.user.git("reset", "--quiet", "--hard", self.tag)
        for step in steps:
            if callable(step):
                step(self.user)
            else:
                self.user.git("cherry-pick", step)

    def lines(self):
        return [entry.line for entry in self.fork.series(self.tag).entries]
