"""Signatures over reports and provenance: SSH keys, in OpenSSH's own format (PROTOCOL.sshsig).

A signature lies beside its file as ``FILE.sig``, what ``ssh-keygen -Y sign`` writes. Whose keys
count stands in an allowed-signers file (``man ssh-keygen``, ALLOWED SIGNERS): principal, options
such as ``valid-before``, key. The namespace keeps a signature over one kind of file from counting
for another.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from builder import atomic
from builder.credentials import variables_of_children
from builder.errors import SignatureRefused, ToolchainError

REPORT = "gpu-report@vllm-glm5"
PROVENANCE = "provenance@vllm-glm5"
SUFFIX = ".sig"
NAMESPACES = {"report": REPORT, "provenance": PROVENANCE}


@dataclass(frozen=True)
class Signer:
    """Who signed: the principal of the allowed-signers file, or an identity of sigstore."""

    principal: str
    kind: str = "ssh"


def signature_path(file: Path) -> Path:
    return file.with_name(f"{file.name}{SUFFIX}")


def sign(file: Path, key: Path, namespace: str, data: bytes | None = None) -> Path:
    """Sign a file with a private key, or with the agent's where ``key`` is a public one.

    :param data: what the file was written with, where somebody could have changed it since.
    :returns: the signature beside the file.
    :raises ToolchainError: ssh-keygen is missing, or cannot use the key.
    """
    target = signature_path(file)
    data = file.read_bytes() if data is None else data
    atomic.write_bytes(target, _signature(data, key, namespace))
    return target


def require_key(key: Path) -> None:
    """Sign something that counts for nothing, before half an hour of work relies on the key.

    :raises ToolchainError: ssh-keygen is missing, or cannot use the key.
    """
    _signature(b"", key, "trial@vllm-glm5")


def _signature(data: bytes, key: Path, namespace: str) -> bytes:
    run = _ssh_keygen(["-Y", "sign", "-f", str(key), "-n", namespace], data)
    if run.returncode or not run.stdout.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        raise ToolchainError(
            "ssh-keygen did not sign with that key",
            where=str(key),
            details=tuple(run.stderr.decode(errors="replace").splitlines()),
            next_step="give --key the path of a private key (ssh-keygen -t ed25519 makes one)",
        )
    return run.stdout


def allowed_signers_line(key: Path, principal: str, namespace: str) -> str:
    """Return the line that allows a key, for the allowed-signers file.

    :raises ToolchainError: no public key can be read from the file.
    """
    run = _ssh_keygen(["-y", "-P", "", "-f", str(key)])
    if run.returncode:
        public = key.with_name(f"{key.name}.pub")
        if not public.is_file():
            raise ToolchainError(
                "no public key in that file or beside it",
                where=str(key),
                details=tuple(run.stderr.decode(errors="replace").splitlines()),
                next_step="give --key the path of a private key",
            )
        text = public.read_text()
    else:
        text = run.stdout.decode()
    return f'{principal} namespaces="{namespace}" {" ".join(text.split()[:2])}'


def verify(
    data: bytes,
    signature: bytes,
    allowed_signers: Path,
    namespace: str,
    *,
    principals: Collection[str],
    now: datetime,
    where: str,
) -> Signer:
    """Return whose signature it is, where it is by one of ``principals`` and valid now.

    :raises SignatureRefused: altered, expired, revoked by its absence, or for another purpose.
    :raises ToolchainError: ssh-keygen is missing.
    """
    # In UTC, as the process is told to reckon: OpenSSH before 9.1 takes no time that ends with Z.
    time = f"-Overify-time={now.astimezone(UTC):%Y%m%d%H%M%S}"
    with tempfile.NamedTemporaryFile(suffix=".sig") as file:
        file.write(signature)
        file.flush()
        intact = _ssh_keygen(
            ["-Y", "check-novalidate", "-n", namespace, "-s", file.name, time], data
        )
        if intact.returncode:
            raise _refused("the signature is not over these bytes for this purpose", where, intact)
        for name in principals:
            last = _ssh_keygen(
                ["-Y", "verify", "-f", str(allowed_signers), "-I", name, "-n", namespace,
                 "-s", file.name, time],
                data,
            )  # fmt: skip
            if not last.returncode:
                return Signer(name)
        # Only for the reason: of a key that stands in several lines, it names those of the first.
        found = _ssh_keygen(
            ["-Y", "find-principals", "-s", file.name, "-f", str(allowed_signers), time]
        )
    names = found.stdout.decode(errors="replace").splitlines() if not found.returncode else []
    if not names:
        raise _refused("signed by a key that is not allowed now", where, found, intact)
    if not set(principals) & {part for line in names for part in line.split(",")}:
        what = f"signed by {', '.join(names)}, whom this channel does not list as a signer"
        raise _refused(what, where)
    raise _refused("the signer may not sign this", where, last)


def _refused(what: str, where: str, *runs: subprocess.CompletedProcess[bytes]) -> SignatureRefused:
    lines = [line for run in runs for line in (run.stderr + run.stdout).decode(errors="replace")
             .splitlines()]  # fmt: skip
    return SignatureRefused(
        what,
        where=where,
        details=tuple(line.replace(tempfile.gettempdir(), "") for line in lines),
        next_step="sign it with an allowed key (python -m builder sign), or add the key to the "
        "policy's allowed signers",
    )


def _ssh_keygen(arguments: list[str], data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments], input=data, capture_output=True, check=False,
            env=variables_of_children() | {"TZ": "UTC0"},
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ToolchainError(
            "ssh-keygen is not installed",
            where="PATH",
            next_step="install OpenSSH's client (8.2 or newer)",
        ) from error
