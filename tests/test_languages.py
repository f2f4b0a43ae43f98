"""Codes of languages in one form."""

import langcodes
import pytest

from recnmt_hf.data.languages import main_language


# Languages for which sentencex has rules.
RULES = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk yue zh"


@pytest.mark.parametrize("language", RULES.split())
def test_all_forms_of_a_code_name_one_language(language):
    codes = {langcodes.get(language).to_alpha3(variant) for variant in "TB"} | {language}
    forms = ("{}", "{}_Zyyy", "{}-XX", "__{}__", ">>{}<<", "<2{}>")
    assert {main_language(form.format(code)) for code in codes for form in forms} == {language}
    assert {main_language(code.upper()) for code in codes} == {language}


@pytest.mark.parametrize(
    ("code", "language"),
    [
        *[("cmn_Hans", "zh"), ("arb_Arab", "ar"), ("nb", "no"), ("iw", "he"), ("mul", "mul"), ("ROMANCE", "romance")],
        *[("", ""), ("Día", "día"), ("x", "x"), ("run2", "run2")],
    ],
)
def test_varieties_groups_and_other_names(code, language):
    assert main_language(code) == language
