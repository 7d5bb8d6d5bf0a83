"""Addresses of a fleet, fixed or in a file that changes."""

from __future__ import annotations

import os

import pytest

from grpo.errors import InputError
from grpo.http.fleet.addresses import Addresses


def test_a_file_has_one_address_a_line_and_is_read_again_when_it_changes(tmp_path):
    file = tmp_path / "fleet"
    file.write_text("# node 1\nhttp://a:8000/v1\n\n  http://b:8000/v1\nhttp://a:8000/v1\n")
    addresses = Addresses([], file)
    assert addresses.current == ["http://a:8000/v1", "http://b:8000/v1"]
    assert not addresses.refresh(1e12)
    file.write_text("http://b:8000/v1\nhttp://c:8000/v1\n")
    os.utime(file, ns=(1, 1))
    assert addresses.refresh(2e12)
    assert addresses.current == ["http://b:8000/v1", "http://c:8000/v1"]


def test_a_file_that_breaks_during_the_run_changes_nothing(tmp_path, caplog):
    file = tmp_path / "fleet"
    file.write_text("http://a:8000/v1\n")
    addresses = Addresses([], file)
    file.write_text("")
    os.utime(file, ns=(1, 1))
    assert not addresses.refresh(1e12)
    assert addresses.current == ["http://a:8000/v1"]
    assert "has no address" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no address; write one a line, such as http://node7:8000/v1"),
        ("http://a/v1\nnode7:8000\n", "line 2: 'node7:8000' is no address such as http://node7:8000/v1"),
        ("http://me:secret@a/v1\n", r"line 1: 'http://\*\*\*@a/v1' is no address"),
        (None, r"cannot be read \(.*No such file"),
    ],
)
def test_a_bad_file_is_one_clear_line(text, message, tmp_path):
    file = tmp_path / "fleet"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=rf"^urls_file {file}.*{message}"):
        Addresses([], file)
