"""Report pages: self-contained, escaped, written whole; pictures without a picture library."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest

from crossloom.errors import UsageError
from crossloom.report import Picture, Report, Section, Table, encode_png, half_blocks, render, write_report


class Page(HTMLParser):
    """Collects start tags, their attributes and the text; notes tags closed out of order."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def picture(shape=(5, 7, 3)):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def page(*tables, title="T", text="", pictures=()):
    return Page(render(Report(title, "lead", [Section("S", text, pictures, tables)])))


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 3), (48, 48, 3)])
def test_png_decodes_to_the_same_pixels(shape, tmp_path):
    rgb = picture(shape)
    path = tmp_path / "a.png"
    path.write_bytes(encode_png(rgb))
    read = matplotlib.image.imread(path)
    np.testing.assert_array_equal(np.rint(read * 255).astype(np.uint8), rgb)


def test_png_of_model_inputs_clips_and_moves_channels_last(tmp_path):
    planes = np.zeros((1, 3, 2, 4), np.float32)
    planes[0, 0, 1, 3] = 1.5
    planes[0, 2, 0, 0] = -1.0
    expected = np.zeros((2, 4, 3), np.uint8)
    expected[1, 3, 0] = 255
    assert encode_png(planes) == encode_png(planes[0]) == encode_png(expected)


@pytest.mark.parametrize(
    "bad",
    [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.int32), np.zeros((3, 0, 4)), np.full((3, 2, 2), np.nan)],
)
def test_what_is_no_picture_is_refused(bad):
    with pytest.raises(UsageError, match="no picture"):
        encode_png(bad)


def test_half_blocks_carry_two_pixels_each():
    rgb = picture((3, 2, 3))
    text = half_blocks(rgb)
    assert text.plain == "▀▀\n▀▀\n"
    styles = [str(span.style) for span in text.spans]
    upper, lower = (tuple(map(int, rgb[row, 1])) for row in (0, 1))
    assert styles[1] == f"rgb({upper[0]},{upper[1]},{upper[2]}) on rgb({lower[0]},{lower[1]},{lower[2]})"
    assert " on " not in styles[2]  # the odd last line has nothing below


def test_page_loads_nothing_and_holds_its_picture():
    png = encode_png(picture())
    found = page(Table("c", ("a",), [(1,)]), pictures=[Picture(png, "a drawing")])
    assert not found.unbalanced and not found.open
    names = [tag for tag, _ in found.tags]
    assert not {"script", "link", "iframe", "object"} & set(names)
    sources = [attrs.get("src") or attrs.get("href") for _, attrs in found.tags if "src" in attrs or "href" in attrs]
    assert len(sources) == 1
    kind, data = sources[0].split(",", 1)
    assert kind == "data:image/png;base64" and base64.b64decode(data) == png
    policy = next(attrs["content"] for tag, attrs in found.tags if tag == "meta" and "http-equiv" in attrs)
    assert policy.startswith("default-src 'none'")


def test_text_is_escaped_everywhere():
    evil = "<script>\"x\" & 'y'</script>"
    found = page(
        Table(evil, (evil,), [(evil,)]),
        Table(evil, (evil,), [(evil,)], folded=True),
        title=evil,
        text=evil,
        pictures=[Picture(encode_png(picture()), evil)],
    )
    assert "script" not in [tag for tag, _ in found.tags]
    # title, h1, text, caption of the picture; caption, header and cell of one table; header and cell of the other.
    assert [t.strip() for t in found.texts].count(evil) == 9
    assert next(attrs["alt"] for tag, attrs in found.tags if tag == "img") == evil


def test_cells_are_formatted_by_type():
    found = page(Table("c", ("a", "b", "c", "d", "e"), [(1234567, 0.000123456, None, True, "x")]))
    cells = [t for t in found.texts if t.strip()][-5:]
    assert cells == ["1234567", "0.0001235", "–", "yes", "x"]
    assert [attrs.get("class") for tag, attrs in found.tags if tag == "td"] == ["number", "number", None, None, None]


def test_bars_are_shares_of_the_largest():
    table = Table("c", ("name", "s"), [("a", 2.0), ("b", 0.5), ("c", 0.0), ("d", None)], bar="s")
    styles = [attrs.get("style") for tag, attrs in page(table).tags if tag == "td"]
    shares = [re.search(r"([\d.]+)%", s)[1] if s else None for s in styles]
    assert shares == [None, "100.0", None, "25.0", None, None, None, None]
    assert page(Table("c", ("s",), [(0,)], bar="s")).tags  # all zero divides by nothing


def test_folded_tables_are_details():
    found = page(Table("ledger", ("a",), [(1,), (2,)], folded=True))
    assert [tag for tag, _ in found.tags if tag in ("details", "caption")] == ["details"]
    assert "ledger (2 rows)" in found.texts


def test_ragged_rows_and_unknown_bars_are_refused():
    with pytest.raises(UsageError, match="a row of 1 cells, 2 columns"):
        Table("c", ("a", "b"), [(1,)])
    with pytest.raises(UsageError, match="no column 'z'"):
        Table("c", ("a", "b"), [(1, 2)], bar="z")


def test_report_is_written_whole_or_not_at_all(tmp_path):
    report = Report("T", "lead", [])
    path = write_report(report, tmp_path / "new" / "r.html")
    assert path.read_text(encoding="utf-8") == render(report)
    assert [p.name for p in path.parent.iterdir()] == ["r.html"]
    with pytest.raises(UsageError, match="it is a folder"):
        write_report(report, tmp_path)
