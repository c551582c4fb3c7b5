"""Signatures by an identity instead of a key, where the user has one: sigstore, an optional extra.

The bundle lies beside its file as ``FILE.sigstore.json``. Signing takes the identity that a CI
service offers (GitHub Actions, GitLab) and needs the network; so does the first verification on a
machine, which fetches sigstore's trust root.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from builder import atomic
from builder.errors import SignatureRefused, ToolchainError
from builder.signing import Signer

SUFFIX = ".sigstore.json"


@dataclass(frozen=True)
class Identity:
    """Who may sign: a certificate's identity (a workflow's URL, an address), and who vouches."""

    identity: str
    issuer: str


def bundle_path(file: Path) -> Path:
    return file.with_name(f"{file.name}{SUFFIX}")


def sign(file: Path) -> Path:
    """Sign a file with this machine's ambient identity.

    :returns: the bundle beside the file.
    :raises ToolchainError: sigstore is not installed, offers no identity, or cannot be reached.
    """
    try:
        from sigstore.errors import Error  # noqa: PLC0415 - an optional extra
        from sigstore.models import ClientTrustConfig  # noqa: PLC0415
        from sigstore.oidc import IdentityToken, detect_credential  # noqa: PLC0415
        from sigstore.sign import SigningContext  # noqa: PLC0415
    except ImportError as error:
        raise _not_installed() from error
    try:
        token = detect_credential()
        if token is None:
            raise ToolchainError(
                "this machine offers sigstore no identity",
                where="sigstore",
                next_step="run it in a CI job that may ask for an OIDC token (id-token: write), "
                "or sign with an SSH key: --key KEY",
            )
        context = SigningContext.from_trust_config(ClientTrustConfig.production())
        with context.signer(IdentityToken(token)) as signer:
            bundle = signer.sign_artifact(file.read_bytes()).to_json()
    except (Error, OSError) as error:
        raise _unreachable(error) from error
    target = bundle_path(file)
    atomic.write_text(target, bundle)
    return target


def verify(data: bytes, bundle: bytes, allowed: Collection[Identity], where: str) -> Signer:
    """Return whose signature it is, where it is one of the allowed identities'.

    :raises SignatureRefused: altered, or by somebody else.
    :raises ToolchainError: sigstore is not installed, or its trust root cannot be had.
    """
    try:
        from sigstore.errors import Error, VerificationError  # noqa: PLC0415 - an optional extra
        from sigstore.models import Bundle, InvalidBundle  # noqa: PLC0415
        from sigstore.verify import Verifier, policy  # noqa: PLC0415
    except ImportError as error:
        raise _not_installed() from error
    try:
        found = Bundle.from_json(bundle)
    except (InvalidBundle, ValueError) as error:
        raise _refused("not a bundle of sigstore's", where, error) from error
    try:
        verifier = Verifier.production()
    except (Error, OSError) as error:
        raise _unreachable(error) from error
    reasons: list[Exception] = []
    for who in allowed:
        try:
            verifier.verify_artifact(
                data, found, policy.Identity(identity=who.identity, issuer=who.issuer)
            )
        except VerificationError as error:
            reasons.append(error)
        else:
            return Signer(who.identity, kind="sigstore")
    raise _refused("no allowed identity signed these bytes", where, *reasons)


def _refused(what: str, where: str, *reasons: Exception) -> SignatureRefused:
    return SignatureRefused(
        what,
        where=where,
        details=tuple(
            dict.fromkeys(str(reason).splitlines()[0] for reason in reasons if str(reason))
        ),
        next_step="sign it with an allowed identity, or add that to the policy's sigstore list",
    )


def _unreachable(error: Exception) -> ToolchainError:
    return ToolchainError(
        f"sigstore cannot be used from here: {error}",
        where="sigstore",
        next_step="check the network, or sign with an SSH key: --key KEY",
    )


def _not_installed() -> ToolchainError:
    return ToolchainError(
        "sigstore is not installed; it is an optional part",
        where="sigstore",
        next_step="pip install 'vllm-glm5-builder[sigstore]', or sign with an SSH key: --key KEY",
    )
