"""Turns a pinned vLLM release and a numbered patch series into an installable wheel."""

__version__ = "0.1.0"
