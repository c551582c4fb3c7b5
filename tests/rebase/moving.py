"""A fork with two releases: what the developer changed on the old one, tried on the new one."""

from __future__ import annotations

import json

from builder.upstream import try_on
from tests.series.fork import REASON, Developer, Fork, message

OLD, NEW = "v1.2.3", "v1.3.0"
NEVER = "never [it is our own]"

ENGINE = '''\
"""Engine."""

import os


def load(path):
    data = path.read()
    for part in data:
        part.check()
        part.ready = True
    return data


def serve(engine):
    name = os.environ.get("NAME")
    engine.open(name)
    for request in engine:
        request.check()
        request.answer()
    engine.close()
    return name


class Worker:
    size = 1

    def start(self):
        self.size = 2
        return self.size

    def stop(self):
        self.size = 0
'''


def trailers(probe=NEVER):
    return (
        f"Upstream-Status: Pending\nDrop-When: {probe}\n"
        "Signed-off-by: vllm-glm5 maintainers <maintainers@vllm-glm5.invalid>\n"
    )


def edit(text, *pairs):
    """Replace in a text, each exactly once: a test must not silently change nothing."""
    for old, new in pairs:
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    return text


class Moving:
    """The project, the two releases, and ways to look at what the tool makes of the series.

    :param patches: ``(subject, changes)`` or ``(subject, changes, probe)``, each on top of the one
        before; a subject that begins with ``common`` goes into ``patches/common``.
    """

    def __init__(self, root, old, new, patches):
        self.old = {"vllm/__init__.py": ""} | old
        self.new = {"vllm/__init__.py": ""} | new
        self.developer = Developer.new(root / "developer", self.old)
        self.fork = Fork.new(root / "fork", self.old, OLD)
        self.fork.release(self.new, NEW)
        self.data = {}
        for number, (subject, changes, *probe) in enumerate(patches, start=1):
            text = message(subject, trailers=trailers(*probe), body=REASON)
            line = f"{number:04d}-{subject.replace(' ', '-')}.patch"
            line = f"../common/{line}" if subject.startswith("common") else line
            self.data[line] = self.developer.patch(changes, text=text)
        self.fork.put(self.data, OLD)

    def try_on(self):
        tried = list(try_on(OLD, [NEW], self.fork.project, self.fork.cache))
        assert self.fork.leftovers() == []
        return tried

    def trials(self):
        (release,) = self.try_on()
        return release.trials

    def trial(self):
        (trial,) = self.trials()
        return trial

    def rebase(self, *arguments, code=0):
        return self.fork.run("rebase", *arguments, code=code)

    def begin(self, *arguments, code=0):
        return self.rebase("--from", OLD, "--onto", NEW, *arguments, code=code)

    def status(self):
        return json.loads(self.rebase("--status", "--json").stdout)

    @property
    def tree(self):
        return self.fork.project.root / ".rebase" / NEW / "tree"

    @property
    def user(self):
        """Somebody at work in the tree where the rebase stopped."""
        return Developer(self.tree)

    @property
    def report(self):
        return (self.fork.project.root / ".rebase" / f"{NEW}.md").read_text()

    def patches(self):
        """Every file below patches/, with its bytes."""
        root = self.fork.project.patches
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in sorted(root.rglob("*"))
            if path.is_file()
        }

    def result(self, path):
        """The file on the new release with the new series, applied as a build does."""
        return self.fork.blob(self.fork.apply(NEW), path).decode()

    def git_am(self, *, threeway):
        """What git itself makes of the series on the new release: status, and the tree's files."""
        self.developer.git("checkout", "--quiet", "--orphan", "new")
        self.developer.git("rm", "-rfq", ".")
        self.developer.commit(self.new, "new release\n")
        files = [str(self.fork.folder(OLD) / line) for line in self.data]
        options = ("--3way",) if threeway else ()
        status = self.developer.attempt("am", "--keep-cr", *options, *files).returncode
        return status, self.developer.read
