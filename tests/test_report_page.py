"""report.html in a headless Chromium: opens without network, fits, is walked with the keyboard."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Page, browser, find_browser

import seekforge.compile.report
from seekforge.compile.report import REPORT_NAME, page
from seekforge.runtime.manifest import read_manifest

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
SIZES = [(1280, 900), (390, 844), (360, 640)]
STATUS = "document.getElementById('what').textContent"
VISIBLE = "document.querySelector('{}').getClientRects().length > 0"


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def url(tiny_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page by itself, in a folder whose name is no plain ASCII."""
    engine = tiny_engine("deepseek_v3", "onnxruntime")
    folder = tmp_path_factory.mktemp("reports") / "pages é"
    folder.mkdir()
    return Path(shutil.copy(engine / REPORT_NAME, folder)).as_uri()


def rendered(tab: Page, folder: Path) -> int:
    """Bytes of the compressed picture: an empty page of that size has a few thousand."""
    return tab.screenshot(folder / "shot.png").stat().st_size


@needs_browser
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_opens_anywhere(
    tab: Page, url: str, size: tuple[int, int], dark: bool, tmp_path: Path
) -> None:
    tab.open("about:blank", *size, dark)
    empty = rendered(tab, tmp_path)
    tab.open(url, *size, dark)
    assert tab.requests == [url] and tab.errors == []
    assert tab.run("document.documentElement.scrollWidth") == tab.run("innerWidth") == size[0]
    assert rendered(tab, tmp_path) > 5 * empty
    background = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark, background
    # No text is cut off at the right, but in areas that scroll or end a long name with dots.
    wide = tab.run("""[...document.querySelectorAll('p, h1, h2, dd, dt, li')].filter(
        (e) => e.getClientRects().length && !e.closest('.scroll, nav, #columns, .strip, .hide')
            && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.textContent)""")
    assert wide == []


@needs_browser
def test_keys_walk_passes_and_layers(tab: Page, url: str) -> None:
    tab.open(f"{url}#layer=1&pass=rope")
    assert tab.run(STATUS).startswith("Layer 1, rope: ")
    tab.run("document.querySelector('#steps [aria-selected=true]').focus()")
    for key, name in (("ArrowRight", "qkv"), ("ArrowRight", "swiglu"), ("ArrowLeft", "qkv")):
        tab.press(key)
        assert tab.run(STATUS).startswith(f"Layer 1, {name}: ")
        assert tab.run("location.hash") == f"#layer=1&pass={name}"
    tab.press("ArrowUp")
    assert tab.run(STATUS).startswith("Layer 0, qkv: ")
    for _ in range(3):  # the last one stays
        tab.press("ArrowDown")
    assert tab.run(STATUS).startswith("Outside the layers, qkv: ")
    assert tab.run("document.activeElement.getAttribute('role')") == "tab"
    selected = "[...document.querySelectorAll('[aria-selected=true]')].map((e) => e.textContent)"
    assert len(tab.run(selected)) == 2  # one layer, one pass
    tab.press("Home")
    assert tab.run(STATUS).startswith("Outside the layers, export: ")


@needs_browser
def test_what_the_columns_show(tab: Page, url: str) -> None:
    tab.open(f"{url}#layer=1&pass=rms_norm")
    count = "document.querySelectorAll('#{} .row.{}').length"
    gone, came = tab.run(count.format("before", "gone")), tab.run(count.format("after", "came"))
    assert (gone, came) == (24, 4)  # four norms of six nodes each
    assert tab.run(STATUS).startswith("Layer 1, rms_norm: 24 nodes gone, 4 new, ")
    lines = tab.run("[...document.querySelectorAll('#lines .link')].map((p) => p.dataset.after)")
    assert len(lines) == 24 and len(set(lines)) == 4
    # A node that stayed stands at the same height on both sides.
    assert tab.run("""[...document.querySelectorAll('#before .row.kept')].every((row) => {
        const name = row.querySelector('.side').textContent;
        const twin = [...document.querySelectorAll('#after .row')]
            .find((other) => other.querySelector('.side').textContent === name);
        return row.getBoundingClientRect().top === twin.getBoundingClientRect().top; })""")
    folded = tab.run("document.querySelectorAll('.fold').length")
    tab.run("document.getElementById('unfold').click()")
    assert folded > 0 and tab.run("document.querySelectorAll('.fold').length") == 0


@needs_browser
def test_from_the_source_to_the_backend(tab: Page, url: str) -> None:
    tab.open(f"{url}#layer=1&pass=export")
    source = tab.run("[...document.querySelectorAll('#before .main')].map((e) => e.textContent)")
    assert any("self.weight * hidden_states" in line for line in source)
    tab.open(f"{url}#layer=1&pass=ONNX nodes")
    kinds = tab.run("[...document.querySelectorAll('#after .main')].map((e) => e.textContent)")
    assert kinds.count("RMSNormalization") == 4 and "RotaryEmbedding" in kinds
    assert tab.run("document.querySelectorAll('#lines .link').length") >= len(kinds)


@needs_browser
def test_keys_walk_nodes(tab: Page, url: str) -> None:
    tab.open(f"{url}#layer=1&pass=rms_norm")
    tab.run("document.querySelector('#columns [tabindex=\"0\"]').focus()")
    detail = "document.getElementById('detail').textContent"
    side = "document.activeElement.dataset.side"
    first = tab.run(detail)
    assert "aten.pow.Tensor_Scalar" in first and "modeling_deepseek_v3.py:" in first
    assert re.search(r"became\s*rms_norm", first)
    tab.press("ArrowDown")
    assert "aten.mean.dim" in tab.run(detail)
    tab.press("ArrowRight")  # to what it became
    assert "made from" in tab.run(detail) and tab.run(side) == "after"
    tab.press("ArrowLeft")
    assert tab.run(side) == "before"


@needs_browser
def test_tab_reaches_everything_in_order(tab: Page, url: str) -> None:
    tab.open(url)
    seen: list[str] = []
    for _ in range(60):
        tab.press("Tab")
        name = tab.run("(document.activeElement.closest('[id]') || {}).id || ''")
        if tab.run("document.activeElement === document.body"):
            continue  # between the end and the start
        outline = tab.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", name  # where the focus is can be seen
        seen += [] if name in seen else [name]
    wanted = ["theme", "kinds", "previous", "steps", "next", "unfold", "before", "passes", "files"]
    assert [name for name in seen if name in wanted] == wanted
    assert tab.run("document.querySelectorAll('main, nav, header, footer').length") == 4
    unnamed = tab.run("""[...document.querySelectorAll('button, [role=region], svg[role], section')]
        .filter((e) => e.getClientRects().length && !e.textContent.trim()
            && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby'))
        .map((e) => e.outerHTML)""")
    assert unnamed == []


@needs_browser
def test_colours_can_be_switched(tab: Page, url: str) -> None:
    tab.open(url, dark=True)
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = tab.run(colour)
    assert tab.run("document.getElementById('theme').textContent") == "Light"
    tab.run("document.getElementById('theme').click()")
    assert tab.run(colour) == "rgb(255, 255, 255)" != dark
    tab.run("document.getElementById('theme').click()")
    assert tab.run(colour) == dark


@needs_browser
def test_tables_need_no_script(tab: Page, url: str) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.open(url)
        assert not tab.run(VISIBLE.format("#walk"))
        for place in ("#walk-tables", "#passes", "#costs", "#limits"):
            assert tab.run(VISIBLE.format(f"{place} table")), place
    finally:
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


@needs_browser
def test_paper(tab: Page, url: str) -> None:
    tab.open(url)
    tab.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert not tab.run(VISIBLE.format("nav")) and not tab.run(VISIBLE.format("#walk"))
        assert tab.run(VISIBLE.format("#passes table"))
    finally:
        tab.call("Emulation.setEmulatedMedia", media="")


@needs_browser
def test_plots_are_drawn(tab: Page, tiny_engine: Callable[..., Path], tmp_path: Path) -> None:
    engine = tiny_engine("deepseek_v3", "onnxruntime")
    group = {"linears": ["a"], "scaled_error": 1e-3, "ratio": 0.5, "clipped": 0.25, "error": 1e-3}
    groups = [
        group | {"layer": layer, "producer": "mlp.up_proj.weight", "rtn_error": 0.02 + layer}
        for layer in range(3)
    ]
    calibration: dict[str, Any] = {
        "tokens": 7, "rtn_error": 1e-2, "error": 1e-3, "expert_tokens": {"1": [5, 0, 9]},
        "groups": groups,
    }  # fmt: skip
    quantization = {
        "method": "awq-int4", "group_size": 16, "symmetric": True, "skip": [],
        "tensors": {"a": 16}, "calibration": calibration,
    }  # fmt: skip
    manifest = dataclasses.replace(
        read_manifest(engine, check_files=False), quantization=quantization
    )
    file = tmp_path / "plots.html"
    file.write_text(page(manifest, {}, []), encoding="utf-8")
    tab.open(file.as_uri(), 390)
    assert tab.errors == []
    sizes = tab.run("""[...document.querySelectorAll('svg.plot path, svg.plot rect')]
        .map((e) => [e.getAttribute('class'), e.getBBox().width, e.getBBox().height])""")
    (awq,), (plain,) = ([s for s in sizes if s[0] == name] for name in ("one", "two"))
    assert awq[1] == plain[1] > 200 and awq[2] == 0 < plain[2]  # one is level, one rises
    assert [s[0] for s in sizes].count("dot-one") == 3  # the bars
    assert [s[0] for s in sizes if "cell" in s[0]] == ["cell", "cell silent", "cell"]


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1, 2], ids=["light", "dark by system", "dark by choice"])
def test_contrast(theme: int) -> None:
    """At least 4.5 : 1 for every text on every ground that it stands on (WCAG AA)."""
    style = Path(seekforge.compile.report.__file__).with_name("report.css").read_text()
    blocks = re.findall(r"--bg: #.*?color-scheme", style, re.S)
    assert len(blocks) == 3
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[theme]))
    pairs = [(text, ground) for text in ("text", "muted", "accent", "good", "bad", "warn")
             for ground in ("bg", "panel")]  # fmt: skip
    pairs += [("good", "good-bg"), ("bad", "bad-bg"), ("warn", "warn-bg")]
    for text, ground in pairs:
        light, dark = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        ratio = (light + 0.05) / (dark + 0.05)
        assert ratio >= 4.5, f"{text} on {ground}: {ratio:.2f}"
