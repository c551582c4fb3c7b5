"""Numbers in sentences."""

from __future__ import annotations


def counted(number: int, one: str, several: str = "") -> str:
    """Return ``1 file``, ``2 files``; ``several`` where it is more than an s: ``files are``."""
    return f"{number} {one if number == 1 else several or f'{one}s'}"
