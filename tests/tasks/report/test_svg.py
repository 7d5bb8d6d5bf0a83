"""Pictures of the report."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from tasks.report import svg


def test_ticks_are_round_and_hold_the_values() -> None:
    assert svg.ticks(0, 1) == [0, 0.5, 1]
    assert svg.ticks(0.12, 0.47) == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert svg.ticks(3, 3) == [2.6, 2.8, 3.0, 3.2, 3.4]
    assert svg.ticks(0, 0) == [-1, -0.5, 0, 0.5, 1]


def test_numbers_are_short() -> None:
    assert [svg.number(v) for v in (0, 2500, 0.12345, 250_000, 0.00001)] == ["0", "2,500", "0.123", "250k", "1e-5"]


def test_a_number_may_be_none() -> None:
    """As a reward of NaN in a sample."""
    assert [svg.number(float(v)) for v in ("nan", "inf", "-inf")] == ["nan", "inf", "-inf"]


def test_a_curve_lies_on_its_axes_and_is_told_in_words() -> None:
    picture = ET.fromstring(svg.curves("a <b>", {"x & y": [(0, 0.0), (10, 1.0)]}))
    line = picture.find("polyline")
    assert line is not None and line.attrib["points"] == "46.0,154.0 290.0,10.0"  # bottom left, top right
    assert picture.findtext("title") == "a <b>"
    assert picture.findtext("desc") == "x & y from 0 at 0 to 1 at 10"


def test_series_differ_in_dashes_too() -> None:
    styles = [svg.style_of(number) for number in range(12)]
    assert len(set(styles)) == 12


def test_arcs_lead_from_what_was_made_to_what_was_made_from_it() -> None:
    picture = ET.fromstring(svg.arcs("lineage", ["base", "sft", "r1"], [(0, 1), (1, 2)]))
    assert [title.text for title in picture.iterfind("path/title")] == ["base → sft", "sft → r1"]


def test_long_numbers_at_the_axis_have_room() -> None:
    picture = ET.fromstring(svg.curves("small", {"x": [(0, -0.0015), (10, 0.0)]}))
    for text in picture.findall("text"):
        if text.attrib["text-anchor"] == "end":
            assert float(text.attrib["x"]) >= 8 * len(text.text or "")
