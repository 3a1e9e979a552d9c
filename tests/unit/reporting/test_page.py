"""A page holds all it shows, and its pictures are named for those who do not see."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

import cpcompile as cp
from cpcompile.reporting.drawing.heat_maps import short
from cpcompile.reporting.drawing.page import Section, Table, page
from cpcompile.reporting.drawing.pictures import short as shortened


class Tags(HTMLParser):
    """Opened and closed tags of a page, and its attributes."""

    VOID = ("meta", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.seen = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def a_section(**changes):
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq": 8192}
    plan = cp.plan(**(sizes | {"ranks": 4} | changes))
    return Section("4 ranks & more", plan, ("layers.0", "layers.1"), 2)


def pictures(text):
    """The SVG of each picture."""
    found = re.findall(r'src="data:image/svg\+xml,([^"]+)"', text)
    return [unquote(each) for each in found]


@pytest.fixture(scope="module")
def text():
    table = Table(("call", "ms"), (("<top level>", "1.5"),))
    return page("A <title>", ["a line"], table, [a_section()])


def test_the_page_is_well_formed_and_complete(text):
    tags = Tags(text)
    assert tags.open == []
    assert tags.seen.count("table") == 2 and tags.seen.count("img") == 4
    assert "&lt;top level&gt;" in text and "A &lt;title&gt;" in text
    assert "4 ranks &amp; more" in text
    assert "Calls: layers.0, layers.1" in text
    assert "over 2 calls, predicted with the rates of h100_sxm" in text
    assert text.count('<tr class="chosen">') == 1


def test_the_page_refers_to_nothing_outside(text):
    links = [v for k, v in Tags(text).attributes if k in ("src", "href")]
    assert links and all(v.startswith("data:") for v in links)
    assert "http" not in re.sub(r'src="data:[^"]+', "", text)
    for svg in pictures(text):
        links = re.findall(r"(?:xlink:)?href='([^']*)'", svg)
        assert links and all(link.startswith(("#", "data:")) for link in links)
        assert "url(http" not in svg and "@import" not in svg


def test_pictures_have_units_on_their_axes(text):
    words = [set(ElementTree.fromstring(svg).itertext()) for svg in pictures(text)]
    chosen, rings, work, curves = words
    for timeline in (chosen, rings):
        assert "time since the start of the call (ms)" in timeline
        assert "compute" in timeline and "waits for a message on its way" in timeline
    assert any(word.startswith("ring zigzag: ") for word in rings)
    assert any(word.startswith("ring fold: ") for word in rings)
    assert "(query, key) pairs that a rank computes in a step, per head" in work
    assert {"contiguous", "zigzag", "striped", "fold", "step", "rank"} <= work
    assert "predicted time of one call (ms)" in curves
    assert {"ring", "all_gather", "ulysses", "hybrid", "on 4 ranks"} <= curves


def test_a_page_of_many_plans_is_small():
    """Seven rank counts, as `cpcompile plan --cp 2,4,8,16,32,64,128` has them."""
    sections = [a_section(ranks=2**i, seq=131072) for i in range(1, 8)]
    assert len(page("plans", [], None, sections)) < 1_000_000


def test_a_picture_is_the_same_when_it_is_short():
    svg = """<?xml version="1.0"?><svg><!-- c --><metadata>m</metadata>
    <defs><style type="text/css">*{a: b}</style></defs>
    <g id="unused"><path id="used" d="M 1.2345 -0.999" style="fill: red"/></g>
    <text>1.2345 ms</text>
    <use xlink:href="#used" clip-path="url(#p1)" style="stroke: blue"/>
    <use xlink:href="#used" clip-path="url(#p1)" style="stroke: blue"/></svg>"""
    assert shortened(svg) == (
        "<svg><defs><style type='text/css'>*{a: b}"
        ".s1{stroke: blue;clip-path: url(#p1)}</style></defs>"
        "<g><path id='used' d='M 1.23 -0.99' style='fill: red'/></g>"
        "<text>1.2345 ms</text>"
        "<use xlink:href='#used' class='s1'/><use xlink:href='#used' class='s1'/></svg>"
    )


def test_pictures_have_words(text):
    alts = [value for key, value in Tags(text).attributes if key == "alt"]
    assert [alt.split(" ")[0] for alt in alts] == [
        "timeline",
        "timeline",
        "work",
        "time",
    ]
    assert "contiguous: slowest rank 1.750 x mean" in alts[2]


def test_equal_plans_give_equal_pages():
    one, other = (page("title", [], None, [a_section(ranks=1)]) for _ in range(2))
    assert one == other


def test_one_rank_has_no_ring():
    assert len(pictures(page("title", [], None, [a_section(ranks=1)]))) == 2


def test_not_causal():
    text = page("title", [], None, [a_section(causal=False)])
    assert len(pictures(text)) == 4
    assert "ring zigzag: " not in pictures(text)[1]


@pytest.mark.parametrize("causal", [True, False])
def test_other_keys_than_queries(causal):
    """Balanced layouts need as many keys as queries, and are not drawn."""
    text = page("title", [], None, [a_section(kv_seq=4096, causal=causal)])
    assert len(pictures(text)) == 4
    assert "ring zigzag: " not in pictures(text)[1]
    assert "ring fold: " not in pictures(text)[1]


def test_many_ranks_stay_small():
    text = page("title", [], None, [a_section(ranks=256, seq=2**20)])
    assert len(text) < 2_000_000


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError) as caught:
        page("title", [], None, [a_section()])
    assert (
        str(caught.value) == 'pictures need matplotlib: pip install "cpcompile[plot]"'
    )


def test_short_numbers():
    counts = (0, 999, 1000, 134_225_920, 2 * 10**12, 3 * 10**15)
    assert [short(c) for c in counts] == ["0", "999", "1k", "134M", "2T", "3P"]
