"""Codes of languages in one form."""

import langcodes
import pytest
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as OF_M2M_100
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES as OF_MBART_50
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as OF_NLLB

from recnmt_hf._languages import main_language
from recnmt_hf.inference.splitting import RULES


@pytest.mark.parametrize("language", RULES.split())
def test_all_forms_of_a_code_name_one_language(language):
    codes = {langcodes.get(language).to_alpha3(variant) for variant in "TB"} | {language}
    forms = ("{}", "{}_Zyyy", "{}-XX", "__{}__", ">>{}<<", "<2{}>")
    assert {main_language(form.format(code)) for code in codes for form in forms} == {language}
    assert {main_language(code.upper()) for code in codes} == {language}


def test_the_languages_of_multilingual_models():
    """Their codes name known languages, in the same form for all models."""
    codes = (*OF_M2M_100["m2m100"], *OF_MBART_50, *OF_NLLB)
    assert [code for code in codes if not langcodes.tag_is_valid(main_language(code))] == ["ns"]  # M2M-100 means nso
    named = [set(map(main_language, codes)) for codes in (OF_M2M_100["m2m100"], OF_MBART_50, OF_NLLB)]
    assert named[1] - named[2] == {"ps"}  # NLLB has Southern Pashto
    assert named[0] - named[2] == {"br", "ff", "fy", "ns", "ps"}


@pytest.mark.parametrize(
    ("code", "language"),
    [
        *[("cmn_Hans", "zh"), ("arb_Arab", "ar"), ("nb", "no"), ("iw", "he"), ("mul", "mul"), ("ROMANCE", "romance")],
        *[("", ""), ("Día", "día"), ("x", "x"), ("run2", "run2")],
    ],
)
def test_varieties_groups_and_other_names(code, language):
    assert main_language(code) == language
