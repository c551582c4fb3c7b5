"""docs/performance.md is what its own command makes of the stored runs; the pictures apart."""

from __future__ import annotations

import copy
import inspect
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture
def pages(monkeypatch, tmp_path):
    """performance_page, writing to a folder of its own, where nothing is drawn."""
    pytest.importorskip("numpy")
    names = ("matplotlib", "matplotlib.pyplot", "matplotlib.axes")
    matplotlib, pyplot, axes = modules = [ModuleType(name) for name in names]
    matplotlib.pyplot, matplotlib.rcParams, axes.Axes = pyplot, {}, object
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    ours = ("performance_page", "kernels_page", "engine_page")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import performance_page

    for page, draw in (
        (performance_page, "draw"),
        (performance_page.kernels_page, "draw"),
        (performance_page.engine_page, "draw_speed"),
        (performance_page.engine_page, "draw_shares"),
    ):
        monkeypatch.setattr(page, draw, lambda *_: None)
    monkeypatch.setattr(performance_page, "DOCS", tmp_path)
    yield performance_page
    for name in ours:
        sys.modules.pop(name, None)


def arguments(text: str) -> list[str]:
    """Those of the command that the page names."""
    found = re.search(r"performance_page\.py ((?:[^`]|\n)+)`", text)
    assert found
    return found[1].replace("\\\n", " ").split()


def written(pages, monkeypatch, given: list[str]) -> str:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["performance_page.py", *given])
    pages.main()
    return (pages.DOCS / "performance.md").read_text()


def test_the_page_is_what_the_stored_runs_give(pages, monkeypatch, capsys):
    text = (DOCS / "performance.md").read_text()
    assert written(pages, monkeypatch, arguments(text)) == text
    assert f"written {pages.DOCS / 'performance.md'}" in capsys.readouterr().out  # where to look
    pictures = re.findall(r"!\[.*\]\((.+\.svg)\)", text)
    assert len(pictures) >= 2
    assert all((DOCS / picture).is_file() for picture in pictures)


def test_the_readme_names_the_same_command():
    """With less the page would lose the engine's part."""
    page, readme = (
        (folder / name).read_text()
        for folder, name in ((DOCS, "performance.md"), (ROOT, "README.md"))
    )
    assert arguments(readme) == arguments(page)


def test_a_kernel_that_was_not_measured_is_a_dash(pages, monkeypatch, tmp_path):
    given = arguments((DOCS / "performance.md").read_text())
    place = given.index("--kernels") + 1
    stored = json.loads((ROOT / given[place]).read_text())
    run = copy.deepcopy(stored)
    run["sparse_mla"][0]["ours_fp8"] = None  # a peer that raised
    file = tmp_path / "lacking.json"
    file.write_text(json.dumps(run))
    text = written(pages, monkeypatch, [*given[:place], str(file), *given[place + 1 :]])
    shapes = len(stored["sparse_mla"])
    assert f" of the {shapes - 1} measured times lie between the two." in text
    assert re.search(r"\| 8 x 1 \|.* serial \| - \|", text)


@pytest.mark.parametrize(
    ("longer", "said"), [(1.25, " 9 lie above the upper one, by up to 25%."), (1.0, "")]
)
def test_a_time_above_what_was_predicted_is_named(pages, longer, said):
    given = arguments((DOCS / "performance.md").read_text())
    rows = json.loads((ROOT / given[0]).read_text())["rows"]
    upper = {
        pages.shape(row): longer * row["microseconds"]["time"]
        for row in pages.picked(rows, "H200", "fp8")
    }
    inside = 0 if said else len(upper)
    line = f"{inside} of the {len(upper)} measured times lie between the two.{said}"
    assert pages.inside(rows, upper)[1] == line


def test_where_the_fp8_cache_does_not_pay_is_read_from_the_run(pages):
    """The words stood there for any run, and were wrong of the next one."""
    given = arguments((DOCS / "performance.md").read_text())
    rows = json.loads((ROOT / given[0]).read_text())["rows"]
    for row in rows:
        row["microseconds"] |= {"least": 1.0, "time": 2.0}
    assert "the lower one nowhere and the upper one nowhere." in pages.fp8_words(rows)
    last = pages.picked(rows, "RTX PRO 6000", "fp8")[-1]
    last["microseconds"]["time"] = 2.1
    assert f"and the upper one at {pages.shape(last)}." in pages.fp8_words(rows)
    pages.picked(rows, "H200", "fp8")[0]["microseconds"]["least"] = 3.0  # another card's
    assert "the lower one nowhere and" in pages.fp8_words(rows)


def test_the_guide_says_what_the_page_measured():
    """What the fp8 cache takes of the bfloat16 cache's time, which each new run moves."""
    measured = r"at 8 heads ([\d.]+ to [\d.]+),"
    found = re.search(measured, (DOCS / "performance.md").read_text())
    assert found
    assert f"it was measured to take {found[1]} of it" in (DOCS / "rtx-pro-6000.md").read_text()


def test_a_time_below_the_floor_is_explained(pages, tmp_path):
    given = arguments((DOCS / "performance.md").read_text())
    run = json.loads((ROOT / given[given.index("--kernels") + 1]).read_text())
    words = "a time can be below the floor"
    assert words in pages.kernels_page.section("a run", run, tmp_path)
    for row in run["sparse_mla"]:
        row["floor"] /= 2
    run["sparse_mla"][0]["flashmla"] = None
    assert words not in pages.kernels_page.section("a run", run, tmp_path)


def test_a_run_without_the_later_columns_has_a_page(pages, tmp_path):
    """Stored before the far pool was measured, and before engines could run at once."""
    given = arguments((DOCS / "performance.md").read_text())
    kernels, engine = (
        json.loads((ROOT / given[given.index(option) + 1]).read_text())
        for option in ("--kernels", "--engine")
    )
    assert "pool of 9.7 GB" in pages.kernels_page.section("a run", kernels, tmp_path)
    for row in kernels["sparse_mla"]:
        del row["ours_far"]
    assert "pool of 9.7 GB" not in pages.kernels_page.section("a run", kernels, tmp_path)
    for at_once, said in ((None, "one after the other,"), (2, "each on a card of its own,")):
        engine["at_once"] = at_once
        if not at_once:
            del engine["at_once"]
        assert said in pages.engine_page.section("a run", engine, tmp_path)
    assert " | - | " not in pages.engine_page.section("a run", engine, tmp_path)
    for row in engine["cells"]:
        row.pop("kernels_us", None)  # as without --trace
    table = pages.engine_page.section("a run", engine, tmp_path)
    assert " | - | " in table
    assert "nan" not in table


def test_the_model_is_fitted_to_what_was_measured(monkeypatch, tmp_path, capsys):
    """Each shape has to have a time; one that has none is named before anything compiles."""
    import sm120_model

    given = arguments((DOCS / "performance.md").read_text())
    stored = json.loads((ROOT / given[given.index("--kernels") + 1]).read_text())
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps(stored))
    times = sm120_model.measured(file)
    assert times.keys() == set(sm120_model.SHAPES)
    assert times[8, 1] == stored["sparse_mla"][0]["ours"]
    stored["sparse_mla"][0]["ours"] = None
    file.write_text(json.dumps(stored))
    monkeypatch.setenv("VLLM_GLM5_TREE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sm120_model.py", "--measured", str(file), "--json", "x"])
    with pytest.raises(SystemExit):
        sm120_model.main()
    assert "has no time of 8 x 1" in capsys.readouterr().err


def test_a_share_of_the_copy_bandwidth_is_asked_for():
    sparse_mla = pytest.importorskip("sparse_mla", reason="needs torch")
    assert sparse_mla.most(8, 64, 35.8) == pytest.approx(35.8 / 0.75)
    assert sparse_mla.most(8, 16, 9.0) == sparse_mla.TARGETS[8, 16]
    assert sparse_mla.most(64, 2048, 1205) == 1900


@pytest.mark.parametrize(
    ("name", "tensors", "others"),
    [
        ("fp8_fp4_mqa_logits", 5, {}),
        ("fp8_fp4_paged_mqa_logits", 6, {"max_model_len": 4096}),
    ],
)
def test_deep_gemm_is_called_as_the_release_has_it(name, tensors, others):
    """Called otherwise it raises, and the table goes without upstream's times."""
    pytest.importorskip("sparse_mla", reason="needs torch")
    from sparse_ops import deep_gemm_options

    function = getattr(pytest.importorskip("vllm.utils.deep_gemm"), name)
    bind = partial(inspect.signature(function).bind, *range(tensors), **others)
    given = bind(**deep_gemm_options(function, 4096)).arguments
    assert given.get("max_seqlen_k", 4096) == 4096
    with pytest.raises(TypeError):
        bind(clean_logits=False, max_seqlen_k=4096)


@pytest.mark.parametrize("script", ["sparse_mla", "tune_sparse_mla", "engine"])
def test_without_a_gpu_a_script_says_so(script, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{script}.py"])
    module = __import__(script)
    with pytest.raises(SystemExit):
        module.main()
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "more", "said"),
    [
        ("engine", ["--json", "not/there.json"], "no folder not for there.json"),
        ("sparse_mla", ["--json", "not/there.json"], "no folder not for there.json"),
        ("tune_sparse_mla", ["--json", "not/there.json"], "no folder not for there.json"),
        ("engine", ["--gpus", "0,2"], "no GPU 2: this Python's torch sees 2"),
    ],
)
def test_what_a_run_would_fail_of_later_is_said_first(
    script, more, said, monkeypatch, capsys, tmp_path
):
    """After minutes of a GPU's time."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *more])
    module = __import__(script)
    with pytest.raises(SystemExit):
        module.main()
    assert said in capsys.readouterr().err
