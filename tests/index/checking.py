"""What an installer verifies before it takes a file that a page lists."""

from __future__ import annotations

import hashlib
import html.parser
import json
import zipfile
from pathlib import Path
from urllib.parse import unquote


class Links(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.found.append(dict(attrs))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def listed(simple: Path) -> set[str]:
    """Check each file that any page below ``simple`` lists, and return their names.

    The pages are read before the files, as an installer reads them.
    """
    names = set()
    for page in simple.glob("*/index.html"):
        for link in Links(page.read_text()).found:
            href, _, digest = link["href"].partition("#sha256=")
            file = page.parent / unquote(href)
            assert sha256(file) == digest, file
            core = file.with_name(f"{file.name}.metadata")
            assert link["data-core-metadata"] == f"sha256={sha256(core)}", core
            with zipfile.ZipFile(file) as archive:
                assert archive.testzip() is None
            names.add(file.name)
    for page in simple.glob("*/index.v1_json"):
        for entry in json.loads(page.read_text())["files"]:
            file = page.parent / unquote(entry["url"])
            assert sha256(file) == entry["hashes"]["sha256"], file
            assert file.stat().st_size == entry["size"]
            core = file.with_name(f"{file.name}.metadata")
            assert entry["core-metadata"] == {"sha256": sha256(core)}
            names.add(file.name)
    return names
