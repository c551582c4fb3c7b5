"""Pins: everything that identifies one upstream release, by hash (``upstream/vX.Y.Z.toml``)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder import atomic
from builder.errors import PinError, UnknownTagError

# upstream's release tags
RELEASE_TAG = re.compile(r"v\d+(\.\d+)+((rc|a|b|\.post)\d+)?")


@dataclass(frozen=True)
class PinnedFile:
    """One file of the release: its name on the index, its size in bytes and its sha256 (hex)."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Pin:
    """One upstream release.

    :param commit: upstream's commit id; the sdist knows nine digits, ``--source git`` all forty.
    :param torch: the requirement on torch, such as ``==2.11.0``; empty where there is none.
    :param cuda: the CUDA version of the official wheels, such as ``13.0``; empty where there is
        none.
    :param wheels: the official wheel of each architecture (``x86_64``, ``aarch64``).
    """

    tag: str
    version: str
    commit: str
    requires_python: str
    torch: str
    cuda: str
    sdist: PinnedFile
    wheels: dict[str, PinnedFile]

    def wheel(self, arch: str) -> PinnedFile:
        """Return the official wheel of ``arch``, or say which architectures there are."""
        if arch not in self.wheels:
            raise PinError(
                f"upstream published no wheel for {arch}",
                where=f"{self.tag}.toml",
                next_step=f"choose --arch from: {', '.join(self.wheels)}",
            )
        return self.wheels[arch]


def pinned_tags(pins: Path) -> list[str]:
    """Return the tags that have a pin, oldest release first."""
    from packaging.version import Version  # noqa: PLC0415 - keeps --help quick

    return sorted((path.stem for path in pins.glob("v*.toml")), key=Version)


def load(pins: Path, tag: str) -> Pin:
    """Read the pin of ``tag``.

    :raises UnknownTagError: there is none; the message lists those that are there.
    :raises PinError: the file is not a pin.
    """
    path = pins / f"{tag}.toml"
    if not path.is_file():
        known = ", ".join(pinned_tags(pins)) or "none"
        if f"v{tag}" in pinned_tags(pins):
            next_step = f"upstream's tag has a v: --tag v{tag}"
        elif tag.strip(" /") in pinned_tags(pins):
            next_step = f"a tag is no folder: --tag {tag.strip(' /')}"
        elif RELEASE_TAG.fullmatch(tag):
            next_step = f"use a pinned tag, or write a pin with: python -m builder pin {tag}"
        else:
            next_step = "use a pinned tag, or pin a release: python -m builder pin v0.20.2"
        raise UnknownTagError(
            f"no pin for {tag!r} (pinned: {known})",
            where=str(pins),
            next_step=next_step,
        )
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        pin = _from_toml(data)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise PinError(
            f"not a valid pin: {type(error).__name__}: {error}",
            where=str(path),
            next_step=f"restore the file from version control, or: python -m builder pin {tag} --force",
        ) from error
    if pin.tag != tag:
        raise PinError(
            f"the file pins {pin.tag!r}",
            where=str(path),
            next_step="give the file the name of the tag that it pins",
        )
    return pin


def _from_toml(data: dict[str, Any]) -> Pin:
    def file(table: dict[str, Any]) -> PinnedFile:
        name, size, sha256 = table["file"], table["size"], table["sha256"]
        if not (isinstance(name, str) and isinstance(size, int) and isinstance(sha256, str)):
            raise TypeError(f"file, size and sha256 expected, found {table}")
        if len(sha256) != 64 or "/" in name:
            raise TypeError(f"bad sha256 or file name in {table}")
        return PinnedFile(name, size, sha256)

    return Pin(
        tag=data["tag"],
        version=data["version"],
        commit=data["commit"],
        requires_python=data["requires-python"],
        torch=data["torch"],
        cuda=data["cuda"],
        sdist=file(data["sdist"]),
        wheels={arch: file(table) for arch, table in data["wheels"].items()},
    )


def to_toml(pin: Pin) -> str:
    """Return the text of the pin's file."""
    import tomlkit  # noqa: PLC0415 - only writing needs it

    def table(file: PinnedFile) -> tomlkit.items.Table:
        result = tomlkit.table()
        result.update({"file": file.name, "size": file.size, "sha256": file.sha256})
        return result

    document = tomlkit.document()
    document.add(tomlkit.comment(f"Written by `python -m builder pin {pin.tag}`."))
    document.update(
        {
            "tag": pin.tag,
            "version": pin.version,
            "commit": pin.commit,
            "requires-python": pin.requires_python,
            "torch": pin.torch,
            "cuda": pin.cuda,
        }
    )
    document["sdist"] = table(pin.sdist)
    wheels = tomlkit.table(is_super_table=True)
    for arch, file in sorted(pin.wheels.items()):
        wheels[arch] = table(file)
    document["wheels"] = wheels
    return tomlkit.dumps(document)


def save(pins: Path, pin: Pin, *, force: bool = False) -> bool:
    """Write the pin; return whether the file changed.

    A full commit id that is already known is kept when the new pin knows only its first digits.

    :raises PinError: an existing pin holds other hashes and ``force`` is off.
    """
    path = pins / f"{pin.tag}.toml"
    if path.is_file():
        try:
            old = load(pins, pin.tag)
        except PinError:
            if not force:
                raise
        else:
            if old.commit.startswith(pin.commit):
                pin = replace(pin, commit=old.commit)
            if old == pin:
                return False
            if not force:
                raise PinError(
                    "the index now describes this release differently; the pin is unchanged",
                    where=str(path),
                    details=_differences(old, pin),
                    next_step="find out why upstream's files changed before you use --force",
                )
    atomic.write_text(path, to_toml(pin))
    return True


def _differences(old: Pin, new: Pin) -> tuple[str, ...]:
    before, after = to_toml(old).splitlines(), to_toml(new).splitlines()
    return tuple(
        [f"pinned: {line}" for line in before if line not in after]
        + [f"now:    {line}" for line in after if line not in before]
    )
