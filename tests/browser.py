"""Pages in a real browser: all of them in one start of Debian's chromium, at two widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
WHY_NOT = "chromium is not installed; tests/install_chromium does it on Debian, as root"
WIDTHS = (1280, 390)

HARNESS = """<!doctype html><meta charset="utf-8"><pre id="found"></pre><script>
const pages = PAGES, widths = WIDTHS, found = {};
const overlap = (a, b) =>
  a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
async function look(name, path, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  frame.src = path;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const page = frame.contentDocument, root = page.documentElement;
  const texts = [...page.querySelectorAll("svg text")].filter(text => text.textContent.trim());
  const told = text => text.textContent;
  const clipped = texts.filter(text => {
    const box = text.getBoundingClientRect(), svg = text.closest("svg").getBoundingClientRect();
    return box.left < svg.left - 1 || box.right > svg.right + 1 || box.bottom > svg.bottom + 1;
  }).map(told);
  const collide = [];
  for (const svg of page.querySelectorAll(".plot svg")) {
    const inside = texts.filter(text => text.closest("svg") === svg);
    const boxes = inside.map(text => [text, text.getBoundingClientRect()]);
    boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
      if (overlap(a, b)) collide.push(`${told(one)} / ${told(other)}`);
    }));
  }
  const bar = page.querySelector("[data-tip]");
  bar?.dispatchEvent(new frame.contentWindow.PointerEvent("pointermove", {bubbles: true}));
  const zoom = page.querySelector(".zoom input"), zoomed = page.querySelector(".zoom ~ .plot .scroll > svg");
  const before = zoomed?.getBoundingClientRect().width;
  if (zoom) { zoom.value = 1000; zoom.dispatchEvent(new frame.contentWindow.Event("input")); }
  const after = zoomed?.getBoundingClientRect().width;
  if (zoomed) zoomed.style.width = "100%";
  found[name][width] = {
    overflow: root.scrollWidth - root.clientWidth,
    clipped, collide,
    tip: bar ? [page.getElementById("tip")?.textContent, bar.dataset.tip] : null,
    zoom: zoom ? after / before : null,
    background: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
    headline: page.querySelector("h1").textContent,
    order: [...page.querySelectorAll("h1, figure, table")].slice(0, 3).map(one => one.tagName),
    bars: [...page.querySelectorAll("figure")].map(figure => [...figure.querySelectorAll(".bar, .span")].map(
      bar => [bar.getBoundingClientRect().width, bar.dataset.tip])),
    tables: [...page.querySelectorAll("table")].map(table => [...table.rows].map(
      row => [...row.cells].map(cell => cell.textContent))),
  };
  frame.remove();
}
(async () => {
  for (const [name, path] of Object.entries(pages)) {
    found[name] = {};
    for (const width of widths) await look(name, path, width);
  }
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script>"""


def open_pages(
    pages: Mapping[str, str], folder: Path, *, dark: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """What the browser found on each page, by width, and all that it wrote to its console."""
    assert CHROMIUM is not None
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html)
    harness = folder / "harness.html"
    names = json.dumps({name: f"{name}.html" for name in pages})
    harness.write_text(HARNESS.replace("PAGES", names).replace("WIDTHS", json.dumps(WIDTHS)))
    ran = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
            *("--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", "--window-size=1400,900"),
            *(("--blink-settings=preferredColorScheme=0",) if dark else ()),
            *("--virtual-time-budget=20000", "--dump-dom", harness.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    match = re.search(r'<pre id="found">(.+?)</pre>', ran.stdout, re.DOTALL)
    assert match is not None, ran.stderr[-2000:]
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(unescape(match[1])), console
