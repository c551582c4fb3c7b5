"""Stage apply: one commit per patch with ``git am``, on a clean tree, always the same ids.

No fuzz, no 3-way. Before git gets a patch, ``placement`` says where each hunk belongs; afterwards
git's result must be that, blob by blob.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from builder import atomic, placement, work_tree
from builder.checkout import SourceTree
from builder.console import say
from builder.diff import NULL_BLOB, FileChange
from builder.errors import MisplacedHunkError, PatchConflictError
from builder.locations import Cache
from builder.patchfile import Patch, read_patch
from builder.repository import Git
from builder.words import counted

# Raised whenever what is accepted changes, so that the cache does not answer by older rules.
RULES = 3

AM = (
    "am",
    "--quiet",
    "--keep",  # the subject keeps its [tags]
    "--keep-cr",  # a patch to a CRLF file keeps its line ends
    "--no-scissors",  # a scissors line in a message cuts nothing
    "--no-3way",  # a merge may land in the wrong place without a word
    "--no-gpg-sign",
    "--committer-date-is-author-date",  # the same ids tomorrow
    "--whitespace=nowarn",  # bytes as they are: nothing is "fixed"
)


@dataclass(frozen=True)
class MovedHunk:
    """A hunk that was taken at another line than the patch states."""

    path: str
    number: int
    offset: int
    scope: str


@dataclass(frozen=True)
class AppliedPatch:
    """A patch as a commit."""

    name: str
    sha256: str
    subject: str
    commit: str
    moved: tuple[MovedHunk, ...]


@dataclass(frozen=True)
class AppliedSeries:
    """The series as commits on top of ``base``; ``head`` is the last one."""

    repository: Git
    tag: str
    base: str
    head: str
    patches: tuple[AppliedPatch, ...]


def read_patches(paths: tuple[Path, ...], cache: Cache) -> tuple[Patch, ...]:
    """Read every patch of a series.

    :raises PatchFormatError: the first one that is not acceptable.
    """
    return tuple(read_patch(path, cache.work) for path in paths)


def apply_series(source: SourceTree, paths: tuple[Path, ...], cache: Cache) -> AppliedSeries:
    """Apply the patch files in order on the release's commit.

    What was applied before (the same base, the same bytes) is looked up, not done again.

    :raises PatchFormatError, PatchConflictError, MisplacedHunkError: with the patch and hunk.
    """
    digest = hashlib.sha256(f"{RULES} {source.commit}\n".encode())
    for path in paths:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    key = digest.hexdigest()[:40]
    record = cache.root / "series" / f"{key}.json"
    repository = source.repository
    with atomic.exclusive(record, f"the series {source.tag}"):
        if known := _recorded(record, repository, source):
            work_tree.forget_dead(repository, cache)
            return known
        say(f"apply: {counted(len(paths), 'patch', 'patches')} on {source.tag}")
        patches = read_patches(paths, cache)
        try:
            with atomic.scratch_folder(cache.work) as scratch:
                applied = _apply(repository, source, patches, scratch, cache)
        finally:
            work_tree.forget_dead(repository, cache)
        head = applied[-1].commit if applied else source.commit
        repository.run("update-ref", f"refs/series/{key}", head)  # keeps the commits from gc
        result = AppliedSeries(repository, source.tag, source.commit, head, tuple(applied))
        stored = {"head": head, "patches": [asdict(patch) for patch in applied]}
        atomic.write_text(record, json.dumps(stored, indent=1))
    return result


def _recorded(record: Path, repository: Git, source: SourceTree) -> AppliedSeries | None:
    try:
        data = json.loads(record.read_text())
        head = str(data["head"])
        patches = tuple(
            AppliedPatch(**patch | {"moved": tuple(MovedHunk(**hunk) for hunk in patch["moved"])})
            for patch in data["patches"]
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if repository.resolve(head) is None:
        return None  # the repository was made anew since
    return AppliedSeries(repository, source.tag, source.commit, head, patches)


def _apply(
    repository: Git, source: SourceTree, patches: tuple[Patch, ...], scratch: Path, cache: Cache
) -> list[AppliedPatch]:
    # Only the files that the series touches are written out: a checkout of everything would cost
    # more than the rest of this stage.
    git = work_tree.add(repository, scratch / "tree", source.commit, cache)
    git.run("read-tree", "HEAD")
    touched = {
        path
        for patch in patches
        for change in patch.changes
        for path in (change.old_path, change.new_path)
        if path
    }
    listed = git.run("ls-files", "-z", "--", *sorted(f":(literal){path}" for path in touched))
    if touched and listed:
        git.run("checkout-index", "--force", "-z", "--stdin", stdin=listed)
    return [apply_one(git, patch, repository) for patch in patches]


def apply_one(git: Git, patch: Patch, known: Git) -> AppliedPatch:
    """Make one patch a commit on HEAD of a clean work tree.

    :param known: the repository that may hold the files that the patch was made from.
    :raises PatchConflictError, MisplacedHunkError: HEAD and the files are as before.
    """
    moved: list[MovedHunk] = []
    expected: dict[str, str | None] = {}
    for change in patch.changes:
        moved += _place(git, patch, change, expected, known)
    before = git.text("rev-parse", "HEAD")
    result = git.attempt(*AM, "--", str(patch.file))
    if result.returncode:
        said = (result.stderr + result.stdout).decode(errors="replace").strip().splitlines()
        git.attempt("am", "--abort")
        if atomic.says_disk_full(said, git.folder):
            raise atomic.disk_full_error(git.folder)
        raise PatchConflictError(
            "git am refuses the patch",
            where=patch.name,
            details=tuple(said[:10]),
            next_step="python -m builder edit, correct the patch, then export",
        )
    if fault := _fault(git, before, patch, expected):
        git.run("reset", "--quiet", "--hard", before)
        raise fault
    return AppliedPatch(
        name=patch.name,
        sha256=patch.sha256,
        subject=patch.subject,
        commit=git.text("rev-parse", "HEAD"),
        moved=tuple(moved),
    )


def _fault(
    git: Git, before: str, patch: Patch, expected: dict[str, str | None]
) -> MisplacedHunkError | None:
    """Compare all that the commit changes with what was read of the patch and placed."""
    fields = git.run("diff-tree", "-r", "-z", "--no-renames", before, "HEAD").decode(
        errors="surrogateescape"
    )
    headers, paths = fields.split("\0")[:-1:2], fields.split("\0")[1::2]
    changed = {path: header[1:].split(" ") for header, path in zip(headers, paths, strict=True)}
    added = {change.path: change.mode for change in patch.changes if change.old_path is None}
    for path in sorted(expected.keys() | changed.keys()):
        if path not in expected:
            what = "git changed a file that the patch does not seem to name"
            return _other_than_checked(patch, path, what, "untouched", changed[path][3])
        old_mode, new_mode, _, actual, *_ = changed.get(path, ["", "", "", "", ""])
        if path not in changed:  # a change that changes nothing
            found = git.attempt("rev-parse", "--verify", "--quiet", f"HEAD:{path}")
            actual = found.stdout.decode().strip() or NULL_BLOB
        wanted = expected[path] or NULL_BLOB
        if actual != wanted:
            what = "git put a hunk elsewhere than where its function stands"
            return _other_than_checked(patch, path, what, f"blob {wanted}", f"blob {actual}")
        mode = added.get(path, new_mode if old_mode == "000000" else old_mode)
        if new_mode not in (mode, "000000"):
            what = "git gave the file another mode"
            return _other_than_checked(patch, path, what, f"mode {mode}", f"mode {new_mode}")
    return None


def _other_than_checked(
    patch: Patch, path: str, what: str, expected: str, actual: str
) -> MisplacedHunkError:
    return MisplacedHunkError(
        what,
        where=f"{patch.name}: {path}",
        details=(f"expected {expected}", f"git's    {actual}"),
        next_step="give the patch three lines of context: edit, then export",
    )


def _place(
    git: Git, patch: Patch, change: FileChange, expected: dict[str, str | None], known: Git
) -> list[MovedHunk]:
    where = f"{patch.name}: {change.path}"
    current = _blob(git, f"HEAD:{change.old_path}") if change.old_path else None
    if change.old_path is None:
        if git.attempt("cat-file", "-e", f"HEAD:{change.path}").returncode == 0:
            raise PatchConflictError(
                "the patch adds a file that is there already",
                where=where,
                next_step="see whether upstream has taken the change; then drop or edit the patch",
            )
        data = "".join(line for hunk in change.hunks for line in hunk.postimage)
        expected[change.path] = blob_id(data.encode("utf-8", "surrogateescape"))
        return []
    if current is None:
        verb = "deletes" if change.new_path is None else "changes"
        raise PatchConflictError(
            f"the patch {verb} a file that is not there",
            where=where,
            next_step="find out where upstream moved it; then python -m builder edit, and export",
        )
    same = blob_id(current).startswith(change.old_blob or "-")
    before = current if same else _blob(known, change.old_blob) if change.old_blob else None
    placed, result = placement.place(patch.name, change, current, before, same_blob=same)
    if change.new_path != change.old_path:
        expected[change.old_path] = None
    if change.new_path is not None:
        expected[change.new_path] = blob_id(result)
    return [
        MovedHunk(change.path, item.hunk.number, item.offset, item.scope)
        for item in placed
        if item.offset
    ]


def _blob(git: Git, name: str) -> bytes | None:
    result = git.attempt("cat-file", "blob", name)
    return result.stdout if result.returncode == 0 else None


def blob_id(data: bytes) -> str:
    """Return git's id of a blob."""
    return hashlib.sha1(b"blob %d\0%s" % (len(data), data), usedforsecurity=False).hexdigest()
