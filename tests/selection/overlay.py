"""Puts one vLLM source tree over an installed vLLM, which lends its compiled extensions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class Overlay(MetaPathFinder):
    """Finds vllm and its modules in the first root that has them; packages are merged."""

    def __init__(self, *roots: Path) -> None:
        self.roots = roots

    def find_spec(self, name, path=None, target=None):
        parts = name.split(".")
        if parts[0] != "vllm":
            return None
        places = [root.joinpath(*parts) for root in self.roots]
        packages = [place for place in places if place.is_dir()]
        for place in places:
            if (place / "__init__.py").exists():
                return importlib.util.spec_from_file_location(
                    name,
                    place / "__init__.py",
                    submodule_search_locations=[str(package) for package in packages],
                )
            module = place.with_name(place.name + ".py")
            if module.exists():
                return importlib.util.spec_from_file_location(name, module)
        return None  # an extension, or a folder without __init__.py


class Upstreams(importlib.metadata.Distribution, MetaPathFinder):
    """The distribution vllm: upstream's own tree disables Triton where there is none."""

    def find_spec(self, name, path=None, target=None):
        return None

    def find_distributions(self, context):
        return [self] if context.name == "vllm" else []

    def read_text(self, filename):
        version = os.environ["VLLM_GLM5_TAG"].removeprefix("v")
        return f"Name: vllm\nVersion: {version}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return Path(path)


def install(tree: Path | None) -> None:
    """Import vllm from this tree, and what it lacks from the installed one."""
    if tree is not None:
        spec = importlib.util.find_spec("vllm")
        assert spec is not None
        assert spec.origin is not None
        sys.meta_path.insert(0, Overlay(tree, Path(spec.origin).parent.parent))
        is_ours = (tree / "vllm" / "distribution.py").exists()  # patch 0001: it asks for either
        if not is_ours and not list(importlib.metadata.distributions(name="vllm")):
            sys.meta_path.append(Upstreams())
