"""Joining the parts of a text, with or without a space."""

import pytest

from recnmt_hf.inference.splitting import join_texts, separator_at


@pytest.mark.parametrize(
    ("text", "cut", "separator"),
    [
        ("one two", 3, " "),  # before the space
        ("one two", 4, " "),  # after it
        ("one two", 5, ""),  # within a word, one letter after the space
        ("one two", 2, ""),
        ("onetwo", 3, ""),
        ("看见猫", 1, " "),  # in this script every cut is between words
        ("a看", 1, " "),
        ("看a", 1, " "),
        ("ab看", 1, ""),
        ("สวัสดี", 3, " "),
        ("한국어", 1, ""),
    ],
)
def test_white_space_at_a_cut(text, cut, separator):
    assert separator_at(text, cut) == separator


@pytest.mark.parametrize(
    ("parts", "separators", "joined"),
    [
        (["one", "two", "three"], ["", " ", ""], "one twothree"),
        (["one"], [" "], "one"),  # there is nothing before the first part
        (["", "one", "", "two"], [" ", " ", " ", " "], "one two"),
        ([], [], ""),
        (["", ""], [" ", " "], ""),
        (["我们", "看见"], ["", " "], "我们看见"),
        (["我们", "see"], ["", " "], "我们 see"),
        (["see", "我们"], ["", " "], "see 我们"),
        (["我们。", "see"], ["", " "], "我们。see"),
        (["see", "「我们"], ["", " "], "see「我们"),
        (
            ["我们 (1)", "2 看见"],
            ["", " "],
            "我们 (1)2 看见",
        ),  # the nearest letters decide
        (["see (1)", "2 看见"], ["", " "], "see (1) 2 看见"),
        (["12", "34"], ["", " "], "12 34"),  # no letters
        (["我们", "34"], ["", " "], "我们34"),
        (["12", "我们"], ["", " "], "12我们"),
        (["한국어", "문장"], ["", " "], "한국어 문장"),
        (["สวัสดี", "ครับ"], ["", " "], "สวัสดีครับ"),
        (["我们", "看见"], ["", "\n\n"], "我们\n\n看见"),  # line breaks are kept in every script
        (["one", "", "two"], ["", "\n", " "], "one\ntwo"),
        (["one", "", "two"], ["", " ", "\n"], "one\ntwo"),
        (["one", "", "two", "three"], ["", "  ", " ", " "], "one  two three"),
    ],
)
def test_parts_are_joined_by_the_script_of_their_nearest_letters(parts, separators, joined):
    assert join_texts(parts, separators) == joined
