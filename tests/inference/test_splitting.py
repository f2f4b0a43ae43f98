"""Splitting texts and long sentences, and joining the translations of their parts."""

import copy

from recnmt_hf.data.tokenization import add_tags
from recnmt_hf.inference import DecodingOptions, Hypothesis, Translator
from recnmt_hf.inference.splitting import join_pieces, join_texts, split_sentences, split_text


def test_sentences_are_cut_near_the_middle():
    """After punctuation if possible, else between words, else between characters."""
    for text, limit, parts in (
        ("ab cd", 5, [("", "ab cd")]),
        ("a, b c d e.f", 9, [("", "a,"), (" ", "b c d e.f")]),
        ("aa bb. cc. dd ee", 9, [("", "aa bb."), (" ", "cc. dd ee")]),
        ("aa bb cc dd", 5, [("", "aa bb"), (" ", "cc dd")]),
        ("abcdef", 3, [("", "abc"), ("", "def")]),
        ("今天好明天好。", 4, [("", "今天好"), (" ", "明天好。")]),
    ):
        assert split_text(text, limit, len) == parts
        assert split_text(text, limit, len, "-")[0] == ("-", parts[0][1])


def test_sentences_of_a_text():
    for language, text, parts in (
        ("en", "Dr. Smith paid 3.50 dollars. He left.", [("", "Dr. Smith paid 3.50 dollars."), (" ", "He left.")]),
        ("deu_Latn", "Am 3. Mai kam z. B. er. Was nun?", [("", "Am 3. Mai kam z. B. er."), (" ", "Was nun?")]),
        ("fi-FI", "Hän syntyi 3. toukokuuta. Hän lähti.", [("", "Hän syntyi 3. toukokuuta."), (" ", "Hän lähti.")]),
        ("zh-CN", "今天好。明天好！后天？", [("", "今天好。"), (" ", "明天好！"), (" ", "后天？")]),
        ("ja", "今日は。\u3000明日は。", [("", "今日は。"), (" ", "明日は。")]),
        (None, "One. Deux! ¿Tres? 四。", [("", "One."), (" ", "Deux!"), (" ", "¿Tres?"), (" ", "四。")]),
        ("en", " One.  Two.\tThree. ", [("", "One."), ("  ", "Two."), ("\t", "Three.")]),
        ("en", "A title\n\n  One.\r\nTwo.\n", [("", "A title"), ("\n\n  ", "One."), ("\r\n", "Two.")]),
        ("ja", "題。\n\u3000一。", [("", "題。"), ("\n\u3000", "一。")]),
        ("en", "Z\xa0. One.", [("", "Z\xa0."), (" ", "One.")]),  # white space of two bytes
        ("en", " \n ", []),
    ):
        assert split_sentences(text, language) == parts
        separators, sentences = zip(*parts, strict=True) if parts else ([], [])
        assert join_texts(sentences, separators).split() == text.split() or "。" in text


def test_hypotheses_of_parts_are_joined_rank_by_rank():
    parts = [
        [Hypothesis("a b", -1.0, -2.0, [5, 6, 2]), Hypothesis("a", -3.0, -4.0, [5])],
        [Hypothesis("c", -1.0, -0.5, [7], finished=False), Hypothesis("", 0.0, 0.0, [])],
    ]
    first, second = join_pieces(parts, 0.5, ["", " "])
    assert first == Hypothesis("a b c", -2.5 / 2.0, -2.5, [5, 6, 2, 7], False, parts=2)
    assert second == Hypothesis("a", -4.0, -4.0, [5], True, parts=2)
    assert join_pieces([[Hypothesis("", 0.0, -1.0)]], 0.5, [""])[0].score == -1.0


def test_tags_of_any_form_stand_before_every_sentence(random_translator):
    """A text is translated sentence by sentence, and its tags apply to each."""
    translator = random_translator("nmt_transformer")
    tokenizer = copy.deepcopy(translator.tokenizer)
    add_tags(tokenizer, ["<d", "<de>", ">>x<<", "<bt>"])
    tokenizer.add_tokens(["<num>"])  # not a tag: it stays in its place
    translator.model.resize_token_embeddings(len(tokenizer))
    translator = Translator(translator.model, tokenizer)
    de, x, bt = (tokenizer.convert_tokens_to_ids(tag) for tag in ("<de>", ">>x<<", "<bt>"))
    assert len(translator.codec.encode("<de> The dog.\n\u200b\nThe cat.", DecodingOptions()).pieces) == 2
    first, second = translator.codec.encode("<num> dogs sleep. The cat sees a bird.", DecodingOptions()).pieces
    assert first == translator.encode_source("<num> dogs sleep.") and second.ids[0] not in (first.ids[0], de)
    for text, expected in (
        ("<de> The dog sleeps. The cat sees <bt> a bird.", [de]),
        (" <bt><de>The dog sleeps. The cat sees a bird.", [bt, de]),
        (">>x<< <bt> The dog sleeps. The cat sees a bird.", [x, bt]),
        ("The dog sleeps. The cat sees a bird.", []),
    ):
        pieces = translator.codec.encode(text, DecodingOptions()).pieces
        assert len(pieces) == 2
        for piece in pieces:
            assert piece.ids[: len(expected)] == expected and piece.ids[len(expected)] not in (de, x, bt)


def test_parts_are_joined_by_the_script_of_their_nearest_letters():
    for parts, separators, joined in (
        (["one", "two", "three"], ["", " ", ""], "one twothree"),
        (["one"], [" "], "one"),  # there is nothing before the first part
        (["", "one", "", "two"], [" ", " ", " ", " "], "one two"),
        (["", ""], [" ", " "], ""),
        (["我们", "看见"], ["", " "], "我们看见"),
        (["我们", "see"], ["", " "], "我们 see"),
        (["see", "「我们"], ["", " "], "see「我们"),
        (["我们 (1)", "2 看见"], ["", " "], "我们 (1)2 看见"),  # the nearest letters decide
        (["see (1)", "2 看见"], ["", " "], "see (1) 2 看见"),
        (["12", "34"], ["", " "], "12 34"),  # no letters
        (["我们", "34"], ["", " "], "我们34"),
        (["한국어", "문장"], ["", " "], "한국어 문장"),
        (["สวัสดี", "ครับ"], ["", " "], "สวัสดีครับ"),
        (["我们", "看见"], ["", "\n\n"], "我们\n\n看见"),  # line breaks are kept in every script
        (["one", "", "two"], ["", "\n", " "], "one\ntwo"),
        (["one", "", "two", "three"], ["", "  ", " ", " "], "one  two three"),
    ):
        assert join_texts(parts, separators) == joined


def test_joining_takes_time_in_proportion_to_the_length():
    """A hundred thousand parts; each join looks at the last letter alone."""
    parts = ["word"] * 100_000
    assert len(join_texts(parts, [" "] * len(parts))) == 5 * len(parts) - 1
