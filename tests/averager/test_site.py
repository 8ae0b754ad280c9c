"""How the pages of the documentation become pages of the site."""

from __future__ import annotations

from tools.site import counts, with_separate_lists


def test_a_list_that_follows_text_gets_a_blank_line() -> None:
    page = "Two kinds:\n- first\n  goes on\n- second\n\nSteps:\n1. one\n2. two\n"
    assert with_separate_lists(page) == "Two kinds:\n\n- first\n  goes on\n- second\n\nSteps:\n\n1. one\n2. two\n"


def test_code_and_lists_that_stand_apart_stay_as_they_are() -> None:
    page = "Text\n\n- first\n- second\n\n```sh\nrun this:\n- not a list\n```\n"
    assert with_separate_lists(page) == page


def test_elements_are_counted_with_and_without_attributes() -> None:
    assert counts('<li>a</li><li class="x">b</li><link>')["li"] == 2
