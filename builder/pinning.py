"""Write a pin: what the package index and the sdist say about one release."""

from __future__ import annotations

import re
import tarfile
import tomllib
import zlib
from pathlib import Path

from builder import atomic, package_index
from builder.errors import PinError
from builder.fetch import download, is_whole
from builder.locations import UPSTREAM_DISTRIBUTION, Cache
from builder.package_index import IndexSettings, ReleaseFile
from builder.pin import RELEASE_TAG, Pin, PinnedFile

ARCHITECTURES = ("x86_64", "aarch64")


def make_pin(tag: str, cache: Cache) -> Pin:
    """Describe the release from the configured index; downloads the sdist, not the wheels.

    :raises PackageIndexError: the index lacks the release.
    :raises PinError: the release lacks an sdist or every wheel, or the sdist tells no commit.
    """
    from packaging.utils import canonicalize_version  # noqa: PLC0415

    version = tag.removeprefix("v")
    if not RELEASE_TAG.fullmatch(tag):
        meant = f"v{tag}" if RELEASE_TAG.fullmatch(f"v{tag}") else "v0.20.2"
        raise PinError(
            "upstream's release tags look like v0.20.2",
            where=tag,
            next_step=f"python -m builder pin {meant}",
        )
    settings = package_index.pip_settings()
    files = package_index.release_files(
        UPSTREAM_DISTRIBUTION, canonicalize_version(version, strip_trailing_zero=False), settings
    )
    files = _kept_by_upstream(files, version)
    wheels = {
        arch: _with_size(chosen, settings)
        for arch in ARCHITECTURES
        if (chosen := official_wheel(files, arch))
    }
    sdists = [file for file in files if file.name.endswith(".tar.gz")]
    if not sdists or not wheels:
        raise PinError(
            f"the release has {len(sdists)} sdists and wheels for {sorted(wheels) or 'no machine'}",
            where=f"{UPSTREAM_DISTRIBUTION} {version}",
            next_step="wait until upstream has published its files, then run the command again",
        )
    sdist = sdists[0]
    _check_spelling(tag, sdist)
    if sdist.sha256 is None:
        raise PinError(
            "the index gives no sha256 for the sdist",
            where=sdist.name,
            next_step="use an index that publishes hashes",
        )
    path = cache.downloads / sdist.sha256 / sdist.name
    with atomic.disk_full_is_an_error(path), atomic.exclusive(path, sdist.name):
        if not is_whole(path, sdist.sha256):
            download(sdist, path, settings, sha256=sdist.sha256, size=sdist.size)
    facts = read_sdist(path)
    return Pin(
        tag=tag,
        version=version,
        commit=facts["commit"],
        requires_python=facts["requires-python"],
        torch=facts["torch"],
        cuda=facts["cuda"],
        sdist=PinnedFile(sdist.name, path.stat().st_size, sdist.sha256),
        wheels=wheels,
    )


def _check_spelling(tag: str, sdist: ReleaseFile) -> None:
    """Refuse another spelling of a version: 0.23 is 0.23.0 to an index, and v0.23 no tag.

    :raises PinError: the release has another tag.
    """
    from packaging.utils import parse_sdist_filename  # noqa: PLC0415

    _, published = parse_sdist_filename(sdist.name)
    if tag != f"v{published}":
        raise PinError(
            f"upstream's tag of that release is v{published}",
            where=tag,
            next_step=f"python -m builder pin v{published}",
        )


def _kept_by_upstream(files: list[ReleaseFile], version: str) -> list[ReleaseFile]:
    """Leave out what upstream has yanked: pip takes it for nobody who does not name the version.

    :raises PinError: that is all of the release.
    """
    kept = [file for file in files if not file.is_yanked]
    if not kept:
        raise PinError(
            "upstream has yanked the release",
            where=f"{UPSTREAM_DISTRIBUTION} {version}",
            next_step="see why on upstream's release page; then pin the release that replaces it",
        )
    return kept


def official_wheel(files: list[ReleaseFile], arch: str) -> ReleaseFile | None:
    """Return the wheel of ``arch`` that pip would take: the one with the highest build number."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename  # noqa: PLC0415

    candidates = []
    for file in files:
        try:
            _, version, build, tags = parse_wheel_filename(file.name)
        except InvalidWheelFilename:
            continue
        platforms = sorted(tag.platform for tag in tags)
        if version.local is None and any(platform.endswith(f"_{arch}") for platform in platforms):
            candidates.append((build, platforms, file))
    return max(candidates, key=lambda found: found[:2])[2] if candidates else None


def _with_size(file: ReleaseFile, settings: IndexSettings) -> PinnedFile:
    if file.sha256 is None:
        raise PinError(
            "the index gives no sha256 for the wheel",
            where=file.name,
            next_step="use an index that publishes hashes",
        )
    size = file.size
    if size is None:  # an HTML index: the server knows
        size = package_index.content_length(file, settings)
    return PinnedFile(file.name, size, file.sha256)


def read_sdist(path: Path) -> dict[str, str]:
    """Read commit, requires-python, torch and CUDA version from upstream's own files.

    :raises PinError: the sdist is not written as upstream's releases are.
    """
    try:
        texts = _texts(path)
        project = tomllib.loads(texts["pyproject.toml"])["project"]
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, KeyError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    commit = re.search(
        r"commit_id\s*(?:=\s*__commit_id__\s*)?=\s*'g?([0-9a-f]{7,40})'",
        texts.get("vllm/_version.py", ""),
    )
    if commit is None:
        raise _unreadable(path, "vllm/_version.py does not tell upstream's commit")
    torch = re.search(
        r"^torch\s*([=<>!~].*?)\s*(#.*)?$", texts.get("requirements/cuda.txt", ""), re.MULTILINE
    )
    cuda = re.search(r'VLLM_MAIN_CUDA_VERSION: str = "([\d.]+)"', texts.get("vllm/envs.py", ""))
    return {
        "commit": commit[1],
        "requires-python": project.get("requires-python", ""),
        "torch": torch[1].replace(" ", "") if torch else "",
        "cuda": cuda[1] if cuda else "",
    }


def _texts(path: Path) -> dict[str, str]:
    wanted = {"vllm/_version.py", "vllm/envs.py", "pyproject.toml", "requirements/cuda.txt"}
    found = {}
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if name in wanted and (file := archive.extractfile(member)):
                found[name] = file.read().decode()
    return found


def _unreadable(path: Path, what: str) -> PinError:
    return PinError(
        f"the sdist does not tell what a pin has to: {what}",
        where=path.name,
        next_step="report this: the release was made in a new way",
    )
