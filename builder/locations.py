"""Where things are: the project's pins and patches, and the cache.

``VLLM_GLM5_CACHE`` moves the cache; without it, the platform's own cache folder is taken.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "vllm-glm5"
UPSTREAM_DISTRIBUTION = "vllm"


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
        return self.root / "work"

    def clear(self) -> list[str]:
        """Delete what is listed above; return the names of what else lies there, and stays.

        A user may have named a folder as the cache that holds other things too.
        """
        import shutil  # noqa: PLC0415 - keeps --help quick

        from builder import atomic  # noqa: PLC0415

        made = ("downloads", "vllm.git", "wheels", "audits", "environments", "work", "series",
                "logs", "test-trees", "test-environments", "test-wheels")  # fmt: skip
        for name in made:
            folder = self.root / name
            if folder.is_symlink():
                folder.unlink()
            shutil.rmtree(folder, ignore_errors=True)
        for name in (*made, "git", "export"):
            (self.root / f"{name}.lock").unlink(missing_ok=True)
        atomic.clear_up(self.root)
        if not self.root.exists():
            return []
        if kept := sorted(path.name for path in self.root.iterdir()):
            return kept
        self.root.rmdir()
        return []


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
