"""Where things are: the project's pins and patches, and the cache.

``VLLM_GLM5_CACHE`` moves the cache; without it, the platform's own cache folder is taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.errors import BuilderError

DISTRIBUTION = "vllm-glm5"
UPSTREAM_DISTRIBUTION = "vllm"

# The Cache Directory Tagging Specification (bford.info/cachedir): backup programs leave it out.
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = """\
Signature: 8a477f597d28d172789f06886806bc55
# This is the cache of vllm-glm5; `python -m builder clean` deletes what the tool put here.
# These names were here before it came, and stay:
"""
_MADE = ("downloads", "vllm.git", "wheels", "audits", "environments", "work", "series", "logs",
         "releases", "renames", "test-trees", "test-environments", "test-wheels")  # fmt: skip
_LOCKS = (*(f"{name}.lock" for name in _MADE), "git.lock", "export.lock", "gpu.lock",
          "work-trees.lock")  # fmt: skip


@dataclass(frozen=True)
class Project:
    """What is versioned: pins, patches, the GPU suite and the policy that its reports meet."""

    root: Path

    @property
    def pins(self) -> Path:
        return self.root / "upstream"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def suite(self) -> Path:
        return self.root / "tests" / "gpu"

    @property
    def policy(self) -> Path:
        return self.root / "ci" / "policy.toml"


@dataclass(frozen=True)
class Cache:
    """Everything here can be deleted and is made again.

    CACHEDIR.TAG the tool was here first, apart from the names that stand in it
    downloads/   files by sha256, as the index gave them
    vllm.git     one repository for all releases
    wheels/      built wheels by the digest of their inputs
    audits/      results of audits by the sha256s of both wheels
    series/      series that were applied, by the digest of their patches
    logs/        what upstream's own build said last
    environments/ build environments by the digest of their requirements
    releases/    pins of releases that are not adopted
    renames/     which files upstream renamed between two releases
    work/        scratch folders of running builds
    """

    root: Path

    @property
    def downloads(self) -> Path:
        return self.root / "downloads"

    @property
    def repository(self) -> Path:
        return self.root / "vllm.git"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def audits(self) -> Path:
        return self.root / "audits"

    @property
    def environments(self) -> Path:
        return self.root / "environments"

    @property
    def work(self) -> Path:
        """Scratch space: here, so that a rename suffices; elsewhere where this is read-only."""
        if not os.access(self.root, os.W_OK) and self.root.exists():
            import tempfile  # noqa: PLC0415 - keeps --help quick

            return Path(tempfile.gettempdir())
        return self.root / "work"

    def claim(self) -> None:
        """Note which names were there before the tool, and that all others are its own.

        :raises DiskFullError: there is no room even for that.
        """
        from builder import atomic  # noqa: PLC0415 - keeps --help quick

        try:
            with atomic.disk_full_is_an_error(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
            # Listed first: another process that makes a folder has written the tag before.
            foreign = sorted(path.name for path in self.root.iterdir())
            if not (self.root / _TAG).exists():
                text = _TAG_TEXT + "".join(f"{name}\n" for name in foreign)
                atomic.create(self.root / _TAG, text.encode())
        except OSError as error:
            if error.errno not in atomic.UNWRITABLE or not self.root.is_dir():
                raise  # else it is filled already, and cannot be cleaned either

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep ``clear`` out; any number of commands use the cache at once."""
        import fcntl  # noqa: PLC0415 - keeps --help quick

        while True:
            self.claim()
            if not (self.root / _TAG).exists():  # read-only, and filled by an older version
                yield
                return
            with (self.root / _TAG).open("rb") as tag:
                fcntl.flock(tag, fcntl.LOCK_SH)
                if os.fstat(tag.fileno()).st_nlink:
                    yield
                    return
            # it was cleared while this waited

    def clear(self, *, again: bool = False) -> list[str]:
        """Delete what is listed above; return the names of what else lies there, and stays.

        Waits until nobody uses it. A user may have named a folder as the cache that holds other
        things too: what was there before stays.

        :param again: somebody else has cleaned it while this waited.
        :raises BuilderError: the tool has never used this folder; all of it stays.
        """
        import fcntl  # noqa: PLC0415 - keeps --help quick

        from builder import atomic  # noqa: PLC0415
        from builder.console import say  # noqa: PLC0415

        if not self.root.is_dir():
            return []
        try:
            tag = (self.root / _TAG).open("rb")
        except FileNotFoundError:
            if again or not self._holds_something():  # somebody begins it, or has just ended it
                return []
            raise self._not_ours() from None
        with tag:
            try:
                fcntl.flock(tag, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"waiting: another process uses the cache ({self.root})")
                fcntl.flock(tag, fcntl.LOCK_EX)
            if not os.fstat(tag.fileno()).st_nlink:  # cleaned meanwhile, and in use again perhaps
                return self.clear(again=True)
            text = tag.read().decode(errors="replace")
            if not text.startswith(_TAG_TEXT):
                raise self._not_ours()  # another program's
            kept = text.removeprefix(_TAG_TEXT).splitlines()
            ours = {*_MADE, *_LOCKS} - {*kept}
            for name in ours:
                atomic.remove(self.root / name)
            atomic.clear_up(self.root)
            left = sorted({path.name for path in self.root.iterdir()} - {_TAG})
            if not ours & {*left}:  # else this disk refuses, and the next ``clear`` goes on
                atomic.remove(self.root / _TAG)
        if not left:
            with suppress(OSError):  # somebody fills it again already
                self.root.rmdir()
        return left

    def _holds_something(self) -> bool:
        from builder import atomic  # noqa: PLC0415 - keeps --help quick

        with suppress(FileNotFoundError):
            return any(not path.name.startswith(atomic.PREFIX) for path in self.root.iterdir())
        return False

    def _not_ours(self) -> BuilderError:
        from builder.errors import BuilderError  # noqa: PLC0415 - keeps --help quick

        return BuilderError(
            f"no cache that this tool has filled: it has no {_TAG} of it; nothing was deleted",
            where=str(self.root),
            next_step="check VLLM_GLM5_CACHE; delete by hand what nobody needs there",
        )


def default_project() -> Project:
    """Return the checkout that holds this package, else the data that was installed with it."""
    package = Path(__file__).resolve().parent
    checkout = package.parent
    if (checkout / "upstream").is_dir() and (checkout / "patches").is_dir():
        return Project(checkout)
    return Project(package / "data")


def default_cache() -> Cache:
    if override := os.environ.get("VLLM_GLM5_CACHE"):
        return Cache(Path(override).expanduser().absolute())
    from platformdirs import user_cache_path  # noqa: PLC0415 - keeps --help quick

    return Cache(user_cache_path(DISTRIBUTION))
