from __future__ import annotations
import contextlib, os, sys, subprocess, json, time
import pytest
from .conftest import as_user
from .release import VERSION, sha256, X86, ARM, FAILING
from tests.index.checking import listed

def go(tool, *a, **k):
    p = tool.start(*a, **k); o, e = p.communicate(timeout=60)
    print(a, '->', p.returncode, o[-300:], e[-600:])
    return p.returncode, o, e

def test_cli(release, tool, tmp_path):
    index = tmp_path / "index"
    wheel = release.wheel(); report = release.report(wheel)
    go(tool, "publish", wheel, "--index", index, "--channel", "staging")
    outs = []
    outs.append(go(tool, "promote", VERSION, "--from", "../x", "--index", index, "--report", report))
    outs.append(go(tool, "promote", VERSION, "--from", "simple", "--index", index, "--report", report))
    outs.append(go(tool, "yank", VERSION, "--channel", "A B", "--index", index, "--reason", "x"))
    outs.append(go(tool, "yank", VERSION, "--channel", "staging", "--index", index, "--reason", "x\ny <b>\x1b[31m"))
    f = tmp_path / "file"; f.write_text("x")
    outs.append(go(tool, "publish", wheel, "--index", f, "--report", report))
    outs.append(go(tool, "publish", tmp_path / "absent.whl", "--index", index, "--report", report))
    outs.append(go(tool, "publish", tmp_path, "--index", index, "--report", report))
    outs.append(go(tool, "publish", report, "--index", index, "--report", report))
    outs.append(go(tool, "publish", report, "--index", index, "--channel", "staging"))
    outs.append(go(tool, "publish", wheel, "--index", index, "--report", "/dev/null"))
    outs.append(go(tool, "publish", wheel, "--index", index, "--report", "/dev/zero")) if 0 else None
    outs.append(go(tool, "publish", wheel, "--index", index, "--report", report, "--json"))
    outs.append(go(tool, "check-report", tmp_path / "absent.whl", "--report", report))
    outs.append(go(tool, "check-report", tmp_path, "--report", report))
    outs.append(go(tool, "sign", report, "--key", tmp_path, ))
    outs.append(go(tool, "sign", tmp_path, "--key", release.key))
    outs.append(go(tool, "sign", "--show-line", "--sigstore"))
    outs.append(go(tool, "sign", "--show-line", "--key", release.key, "--principal", "a b\nevil ssh-ed25519 AAA"))
    broken = release.dist / "broken" ; broken.mkdir()
    b = broken / wheel.name; b.write_bytes(b"PK nonsense")
    outs.append(go(tool, "publish", b, "--index", tmp_path / "i2", "--channel", "staging"))
    outs.append(go(tool, "publish", b, "--index", tmp_path / "i2", "--report", release.report(b)))
    (release.root / "ci" / "policy.toml").write_bytes(b"\xff\xfe")
    outs.append(go(tool, "publish", wheel, "--index", index, "--report", report))
    (release.root / "ci" / "policy.toml").unlink()
    outs.append(go(tool, "publish", wheel, "--index", index, "--report", report))
    bad = [o for o in outs if "Traceback" in o[2]]
    print("BAD", bad)
    assert not bad

def test_servers(release, tool, pypiserver, devpi, team, tmp_path):
    wheel = release.wheel(); report = release.report(wheel)
    outs = []
    b = release.dist / "broken"; b.mkdir(); b = b / wheel.name; b.write_bytes(b"PK nonsense")
    rb = release.report(b)
    outs.append(go(tool, "publish", b, "--index", pypiserver, "--report", rb, **as_user()))
    outs.append(go(tool, "publish", wheel, "--index", devpi.url + "nobody/none/", "--report", report, **as_user(*team)))
    outs.append(go(tool, "publish", wheel, "--index", f"{devpi.url}{team[0]}/stable", "--report", report, **as_user(*team)))
    outs.append(go(tool, "publish", wheel, "--index", f"{devpi.url}{team[0]}/stable/+simple", "--report", report, **as_user(*team)))
    outs.append(go(tool, "publish", wheel, "--index", f"{devpi.url}{team[0]}/staging/../stable/", "--report", report, **as_user(*team)))
    outs.append(go(tool, "publish", wheel, "--index", f"{devpi.url}{team[0]}/stable/../staging/", "--channel", "staging", **as_user(*team)))
    outs.append(go(tool, "publish", wheel, "--index", f"{devpi.url}{team[0]}/staging?x=1", **as_user(*team)))
    outs.append(go(tool, "promote", VERSION, "--index", f"{devpi.url}{team[0]}/staging/", "--to", "../../x", "--report", report, **as_user(*team)))
    outs.append(go(tool, "promote", "nope", "--index", f"{devpi.url}{team[0]}/staging/", "--report", report, **as_user(*team)))
    outs.append(go(tool, "publish", wheel, "--index", "http://127.0.0.1:notaport/", "--report", report))
    outs.append(go(tool, "publish", wheel, "--index", "http://[::1/", "--report", report))
    outs.append(go(tool, "publish", wheel, "--index", "http://a b/", "--report", report))
    outs.append(go(tool, "publish", wheel, "--index", "http://nohost.invalid/", "--report", report))
    outs.append(go(tool, "publish", wheel, "--index", "http://" + "a"*300 + "/", "--report", report))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login\n garbage {{{"); (tmp_path / "netrc").chmod(0o600)
    outs.append(go(tool, "publish", wheel, "--index", pypiserver, "--report", report, NETRC=str(tmp_path / "netrc")))
    bad = [o for o in outs if "Traceback" in o[2]]
    print("BAD", bad)
    assert not bad
