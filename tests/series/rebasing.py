"""A patch made on one release and applied on the next."""

from __future__ import annotations

import shutil

import pytest

from builder.errors import MisplacedHunkError
from tests.series.fork import TAG, Developer, Fork

NEXT = "v1.3.0"


class Rebase:
    """A patch made on an old release and applied on a new one that differs in some files."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, path, old, edited, new, *, knows_old=True, context=3):
        shutil.rmtree(self.folder, ignore_errors=True)
        files = {"vllm/__init__.py": ""}
        developer = Developer.new(self.folder / "developer", files | {path: old})
        self.data = developer.patch({path: edited}, options=(f"--unified={context}",))
        self.patch_file = self.folder / "0001-x.patch"
        self.patch_file.write_bytes(self.data)
        self.path = path
        self.new_files = files | {path: new}
        fork = Fork.new(self.folder / "fork", files | {path: old})
        fork.release(files | {path: new}, NEXT)
        if knows_old:
            fork.source(TAG)
        self.fork = fork
        self.applied = fork.apply_one(self.data, tag=NEXT)
        return fork.blob(self.applied, path)

    def refused(self, *arguments, **options):
        with pytest.raises(MisplacedHunkError) as caught:
            self(*arguments, **options)
        assert self.fork.leftovers() == []
        assert caught.value.next_step
        return str(caught.value)

    @property
    def moved(self):
        return [(m.number, m.offset, m.scope) for m in self.applied.patches[0].moved]

    def plain_git(self):
        """What `git am` by itself makes of it: exit status and the file's bytes."""
        self.new = Developer.new(self.folder / "new", self.new_files)
        status = self.new.attempt("am", "--keep-cr", str(self.patch_file)).returncode
        return status, self.new.read(self.path)
