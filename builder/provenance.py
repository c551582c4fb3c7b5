"""What a wheel was made of: the SBOM inside it (PEP 770), and the statement beside it.

Inside stands only what determines the content. The tool's version and the build mode may change
without changing a byte, so they stand beside. Neither names a user, a host or a path.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass

from builder import __version__
from builder.apply import AppliedSeries
from builder.classify import Mode
from builder.locations import DISTRIBUTION, UPSTREAM_DISTRIBUTION
from builder.pin import Pin, PinnedFile
from builder.revision import WHEEL_FORMAT

SBOM_NAME = "vllm-glm5.cdx.json"
_NAMESPACE = uuid.UUID("3b0f2a9e-6d5a-5b0e-9a63-6c9f5e0c7a11")


@dataclass(frozen=True)
class SbomFacts:
    """What an SBOM of ours says, read back."""

    tag: str
    patches: tuple[tuple[str, str], ...]


def sbom(pin: Pin, official: PinnedFile, applied: AppliedSeries, version: str) -> bytes:
    """Return the CycloneDX 1.6 document, the same bytes for the same inputs."""
    from cyclonedx.model import HashAlgorithm, HashType, Property  # noqa: PLC0415 - slow
    from cyclonedx.model.bom import Bom  # noqa: PLC0415
    from cyclonedx.model.component import Component, ComponentType, Pedigree  # noqa: PLC0415
    from cyclonedx.output import make_outputter  # noqa: PLC0415
    from cyclonedx.schema import OutputFormat, SchemaVersion  # noqa: PLC0415
    from packageurl import PackageURL  # noqa: PLC0415

    def file(name: str, sha256: str, number: int) -> Component:
        return Component(
            type=ComponentType.FILE,
            name=name,
            bom_ref=f"{number:03d}-{name}",
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
        )

    upstream = Component(
        type=ComponentType.LIBRARY,
        name=UPSTREAM_DISTRIBUTION,
        version=pin.version,
        bom_ref="upstream",
        purl=PackageURL("pypi", None, UPSTREAM_DISTRIBUTION, pin.version),
        components=[
            file(pin.sdist.name, pin.sdist.sha256, 1),
            file(official.name, official.sha256, 2),
        ],
        properties=[
            Property(name="vllm-glm5:tag", value=pin.tag),
            Property(name="vllm-glm5:commit", value=pin.commit[:9]),
        ],
    )
    patches = [
        file(patch.name, patch.sha256, number)
        for number, patch in enumerate(applied.patches, start=1)
    ]
    bom = Bom()
    bom.metadata.component = Component(
        type=ComponentType.LIBRARY,
        name=DISTRIBUTION,
        version=version,
        bom_ref="wheel",
        purl=PackageURL("pypi", None, DISTRIBUTION, version),
        pedigree=Pedigree(ancestors=[upstream]),
        components=patches,
        properties=[Property(name="vllm-glm5:wheel-format", value=str(WHEEL_FORMAT))],
    )
    # A random serial number or today's time would make every build another one.
    seed = "\n".join([version, official.sha256, *(patch.sha256 for patch in applied.patches)])
    bom.serial_number = uuid.uuid5(_NAMESPACE, seed)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string()
    document = json.loads(text)
    document["metadata"].pop("timestamp", None)
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def read_sbom(data: bytes) -> SbomFacts:
    """Read tag and patches from an SBOM that ``sbom`` wrote.

    :raises KeyError, ValueError: it is another document.
    """
    component = json.loads(data)["metadata"]["component"]
    (upstream,) = component["pedigree"]["ancestors"]
    tag = next(p["value"] for p in upstream["properties"] if p["name"] == "vllm-glm5:tag")
    patches = sorted(component.get("components", ()), key=lambda item: str(item["bom-ref"]))
    return SbomFacts(
        tag=tag,
        patches=tuple((item["name"], item["hashes"][0]["content"]) for item in patches),
    )


def statement(
    pin: Pin,
    official: PinnedFile,
    applied: AppliedSeries,
    *,
    wheel_name: str,
    wheel_sha256: str,
    version: str,
    mode: Mode,
) -> bytes:
    """Return the in-toto statement (SLSA provenance v1) that lies beside the wheel."""

    def material(file: PinnedFile) -> dict[str, object]:
        return {"name": file.name, "digest": {"sha256": file.sha256}}

    document = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": wheel_name, "digest": {"sha256": wheel_sha256}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:vllm-glm5:wheel",
                "externalParameters": {"tag": pin.tag, "version": version, "mode": str(mode)},
                "internalParameters": {"wheelFormat": WHEEL_FORMAT},
                "resolvedDependencies": [
                    material(pin.sdist),
                    material(official),
                    *(
                        {"name": patch.name, "digest": {"sha256": patch.sha256}}
                        for patch in applied.patches
                    ),
                ],
            },
            "runDetails": {
                "builder": {
                    "id": "urn:vllm-glm5:builder",
                    "version": {"vllm-glm5-builder": __version__},
                }
            },
        },
    }
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
