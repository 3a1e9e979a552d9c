"""The page in headless Chromium: no errors, and it fits on phones and desks.

The page is put into a frame of the width that is asked for, because Chromium's own
window is never as narrow as a phone.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

from cpcompile.reporting.drawing.page import Table, page
from tests.unit.reporting.test_page import a_section

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
BACKGROUNDS = {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}
# What the frame tells: how wide its page became, the paper, and pictures not drawn.
ASK = """
<script>
window.onerror = message => { document.title += "error: " + message; };
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const style = getComputedStyle(page.body);
  const pictures = [...page.images];
  document.querySelector("pre").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth,
    paper: style.backgroundColor,
    pictures: pictures.length,
    empty: pictures.filter(x => !x.complete || x.naturalWidth == 0).length,
  });
});
</script>
"""


def in_chromium(text, width, scheme, folder):
    """What the page says of itself, and what Chromium's console says."""
    frame = (
        f'<!DOCTYPE html><meta charset="utf-8"><iframe width="{width}" height="800" '
        f'style="border:0" srcdoc="{html.escape(text)}"></iframe><pre></pre>{ASK}'
    )
    path = folder / "frame.html"
    path.write_text(frame)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}"]
    # 0 is dark, 1 light: PreferredColorScheme of Blink.
    command += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    (found,) = re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    console = [x for x in done.stderr.splitlines() if ":CONSOLE" in x]
    return json.loads(html.unescape(found)), console


@pytest.mark.timeout(200)
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("scheme", BACKGROUNDS)
@pytest.mark.parametrize("width", [390, 1200], ids=["phone", "desk"])
def test_the_page_fits_and_says_no_error(tmp_path, width, scheme):
    name = "a_module_of_some_depth.with_a_long_name.of_layers.0.self_attention"
    table = Table(("call", "ms"), ((name, "1.5"),))
    text = page("A <title>", [f"the call {name}, twice {name}"], table, [a_section()])
    found, console = in_chromium(text, width, scheme, tmp_path)
    assert console == []
    assert found["width"] <= width
    assert found["paper"] == BACKGROUNDS[scheme]
    assert found["pictures"] == 4 and found["empty"] == 0


@pytest.mark.timeout(200)
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_check_finds_what_is_wrong(tmp_path):
    text = page("t", [], None, [])
    wide = '<p style="width: 900px">wide</p><img src="data:image/svg+xml,no">'
    wide += "<script>missing()</script>"
    broken = text.replace("</body>", f"{wide}</body>")
    found, console = in_chromium(broken, 390, "light", tmp_path)
    assert found["width"] > 390 and found["empty"] == 1
    assert any("missing is not defined" in line for line in console)
