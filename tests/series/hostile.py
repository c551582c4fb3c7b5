"""A user's git settings, each of which changes what plain git writes or takes."""

from __future__ import annotations

import os
from pathlib import Path

CONFIGURATION = """\
[user]
	name = Somebody Else
	email = else@example.invalid
	signingKey = 0123456789
[commit]
	gpgSign = true
[tag]
	gpgSign = true
[core]
	autocrlf = true
	eol = crlf
	hooksPath = {hooks}
	attributesFile = {home}/.gitattributes
	excludesFile = {home}/.gitignore
	abbrev = 5
	quotePath = true
	pager = false
	whitespace = tab-in-indent,cr-at-eol
	commentChar = "*"
[am]
	threeWay = true
	keepcr = false
	messageId = true
[apply]
	whitespace = fix
	ignoreWhitespace = change
[format]
	signature = a signature
	subjectPrefix = MINE
	numbered = true
	attach = true
	thread = deep
	signOff = true
	headers = "X-Mine: yes\\n"
	pretty = "%h"
	useAutoBase = true
	coverLetter = true
	notes = true
	mboxrd = true
	encodeEmailHeaders = true
[diff]
	noprefix = true
	mnemonicPrefix = true
	external = /bin/false
	context = 9
	interHunkContext = 20
	algorithm = patience
	renames = copies
	suppressBlankEmpty = true
	indentHeuristic = false
	colorMoved = zebra
	orderFile = {home}/order
	wsErrorHighlight = all
	relative = true
	ignoreSubmodules = all
[diff "python"]
	xfuncname = "^(import.*)$"
	textconv = /bin/false
[color]
	ui = always
	diff = always
[i18n]
	commitEncoding = ISO-8859-1
	logOutputEncoding = ISO-8859-1
[log]
	date = relative
	showSignature = true
[mailinfo]
	scissors = true
[trailer]
	separators = "="
[init]
	defaultBranch = elsewhere
	templateDir = {home}/template
	defaultObjectFormat = sha256
[safe]
	bareRepository = explicit
[gpg]
	program = /bin/false
[rebase]
	autoStash = true
[status]
	showUntrackedFiles = no
[extensions]
	worktreeConfig = true
"""


def environment(home: Path) -> dict[str, str]:
    """Write the settings below ``home``; return the variables that a shell there would have."""
    hooks = home / "hooks"
    template = home / "template" / "hooks"
    for folder in (hooks, template, home / ".config" / "git", home / "template" / "info"):
        folder.mkdir(parents=True)
    for folder in (hooks, template):
        for name in ("applypatch-msg", "pre-applypatch", "post-applypatch", "commit-msg",
                     "pre-commit", "post-checkout", "reference-transaction", "post-index-change"):  # fmt: skip
            (folder / name).write_text("#!/bin/sh\necho a hook ran >&2\nexit 1\n")
            (folder / name).chmod(0o755)
    (home / ".gitconfig").write_text(CONFIGURATION.format(home=home, hooks=hooks))
    (home / "order").write_text("*.json\n*.txt\n")
    attributes = "* text=auto eol=crlf ident\n*.py -diff\n*.json binary\n"
    for file in (home / ".gitattributes", home / ".config" / "git" / "attributes",
                 home / "template" / "info" / "attributes"):  # fmt: skip
        file.write_text(attributes)
    (home / ".gitignore").write_text("*.py\n")
    return {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "XDG_CONFIG_HOME": str(home / ".config"),
        "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
        "GIT_DIR": str(home / "nowhere.git"),
        "GIT_WORK_TREE": str(home),
        "GIT_INDEX_FILE": str(home / "index"),
        "GIT_OBJECT_DIRECTORY": str(home / "objects"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "diff.noprefix",
        "GIT_CONFIG_VALUE_0": "true",
        "GIT_CONFIG_PARAMETERS": "'diff.context'='7'",
        "GIT_EXTERNAL_DIFF": "/bin/false",
        "GIT_DIFF_OPTS": "--unified=1",
        "GIT_AUTHOR_NAME": "Somebody Else",
        "GIT_AUTHOR_DATE": "1234567890 +0000",
        "GIT_COMMITTER_DATE": "1234567890 +0000",
        "GIT_COMMITTER_NAME": "Somebody Else",
        "GIT_COMMITTER_EMAIL": "else@example.invalid",
        "GIT_TRACE": "1",
        "GIT_DEFAULT_HASH": "sha256",
        "GIT_NAMESPACE": "elsewhere",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_CEILING_DIRECTORIES": str(home),
        "EDITOR": "/bin/false",
        "TZ": "Asia/Kathmandu",
        "LANG": "de_DE.UTF-8",
    }
