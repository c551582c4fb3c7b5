"""Names and versions of what is built: ``vllm_glm5-0.20.2+glm5.1-cp38-abi3-...whl``."""

from __future__ import annotations

from builder.errors import AuditError
from builder.locations import DISTRIBUTION


def local_version(version: str, revision: int) -> str:
    """Return PEP 440's local version, the form meant for downstream patches.

    Never ``.postN``: upstream uses it, and it outranks every local version.
    """
    return f"{version}+glm5.{revision}"


def dist_info_name(version: str) -> str:
    return f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info"


def wheel_name(official: str, version: str) -> str:
    """Return the file name: the official wheel's tags under our name, without a build number."""
    tags = official.removesuffix(".whl").split("-")[-3:]
    return f"{DISTRIBUTION.replace('-', '_')}-{version}-{'-'.join(tags)}.whl"


def tag_of(wheel_file: str) -> tuple[str, int]:
    """Return upstream's tag and our revision from the file name of a wheel.

    :raises AuditError: it is not a name that this tool gives.
    """
    import re  # noqa: PLC0415

    match = re.match(r"vllm_glm5-(?P<version>[^-+]+)\+glm5\.(?P<revision>\d+)-", wheel_file)
    if match is None:
        raise AuditError(
            "not the file name of a vllm-glm5 wheel",
            where=wheel_file,
            next_step="give a vllm_glm5-VERSION+glm5.N-...whl",
        )
    return f"v{match['version']}", int(match["revision"])
