"""Requests to the page without a browser: limits, escaping, exported models, the server."""

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import foreign_models
import pytest
from option_tables import option_table
from user_errors import rejects


pytest.importorskip("gradio", reason="the extra demo is not installed")

from recnmt_hf.demo.limits import Limits
from recnmt_hf.demo.page import HTML, Page, begin, card_html, stop_request
from recnmt_hf.demo.serving import serving
from recnmt_hf.demo.translating import (
    Ended,
    Watch,
    decoding_options,
    load_models,
    split_into_segments,
    translate_text,
    unique_names,
)
from recnmt_hf.inference.model_settings import ModelTask
from recnmt_hf.inference.splitting import join_texts


LIMITS = Limits(max_characters=3_000, max_segment=20, batch_tokens=400)
OPTIONS = decoding_options(LIMITS, 2, 2, 0.6)


@pytest.fixture(scope="module")
def models(plain_model, gret_model):
    return load_models([plain_model, gret_model])


def last(states):
    return list(states)[-1]


def test_the_page_translates_as_the_translator(models):
    """The same text, scores and split as `translate`, by each of the models."""
    text = "The dog sleeps. The cat sees it.\n\nA child reads."
    for state in last(translate_text(models, text, OPTIONS, Watch(60), LIMITS)):
        expected = state.model.translator([text], beams=2, num_hypotheses=2, on_long="split", max_source_length=20)[0]
        assert state.is_complete and state.text == expected.text and state.text.count("\n") == 2
        assert sum(part.hypotheses[0].log_prob for part in state.segments) == pytest.approx(
            expected.hypotheses[0].log_prob
        )
        assert all(len(part.hypotheses) == 2 and part.alignment is not None for part in state.segments)


def test_translations_appear_one_by_one(models):
    text = "The dog sleeps. " * 12
    seen = [(states[0].done, states[1].done) for states in translate_text(models, text, OPTIONS, Watch(60), LIMITS)]
    assert seen == [(1, 0), (1, 1), (3, 1), (3, 3), (7, 3), (7, 7), (12, 7), (12, 12)]


def test_long_sentences_are_split(models):
    translator, text = models[0].translator, "the dog that the boy sees " * 40
    parts = split_into_segments(translator, text, OPTIONS, LIMITS)
    assert max(len(translator.encode_source(part.source)) for part in parts) <= LIMITS.max_segment
    assert join_texts([part.source for part in parts], [part.separator for part in parts]) == text.strip()


@pytest.mark.parametrize("opening", [">>deu<< ", ">>fra<<", ""])
def test_the_language_at_the_beginning_is_for_all_sentences(corpus, tmp_path, opening):
    texts = [pair.en for pair in corpus["train"][:200]]
    pieces = foreign_models.train_pieces(tmp_path / "pieces", texts)
    folder = foreign_models.marian(tmp_path / "model", {"pieces": pieces, "file": tmp_path / "pieces"})
    models = load_models([folder])
    text = f"{opening}The dog sleeps. The cat sees it."
    with mock.patch.object(models[0].translator, "translate", wraps=models[0].translator.translate) as translate:
        state = last(translate_text(models, text, OPTIONS, Watch(60), LIMITS))[0]
    assert [part.source for part in state.segments] == ["The dog sleeps.", "The cat sees it."]
    sentences = [sentence for call in translate.call_args_list for sentence in call.args[0]]
    assert sentences == [f"{opening}The dog sleeps.", f"{opening}The cat sees it."]


def test_a_text_for_a_summary_is_one_segment(models, monkeypatch):
    monkeypatch.setattr(models[0].translator, "task", ModelTask(summarizes=True))
    state = last(translate_text(models[:1], "The dog sleeps. " * 60, OPTIONS, Watch(60), LIMITS))[0]
    assert len(state.segments) == 1 and state.is_complete


@pytest.mark.parametrize("name", ["beams", "hypotheses"])
@pytest.mark.parametrize("value", [0, 9, 1e9, float("nan"), "4; rm", None, True])
def test_decoding_options_beyond_the_limits(name, value):
    values = {"beams": 4, "hypotheses": 1, "penalty": 0.6} | {name: value}
    with pytest.raises(ValueError) as caught:
        decoding_options(Limits(), **values)
    assert "is not allowed; it must be" in str(caught.value)


def test_a_text_beyond_the_limit(models):
    with rejects("characters, and the limit is", "3,001", "3,000"):
        next(translate_text(models, "a" * 3_001, OPTIONS, Watch(60), LIMITS))


@pytest.mark.parametrize("limit", ["time", "stop"])
def test_a_search_ends_in_the_middle(models, monkeypatch, limit):
    """At the next step, not at the end of the batch."""
    watch, steps = Watch(60), []
    original = Watch.__call__

    def step(self, input_ids, scores):
        steps.append(input_ids.shape[1])
        if len(steps) == 3:
            watch.end -= 100 * (limit == "time")
            watch.is_stopped = limit == "stop"
        return original(self, input_ids, scores)

    monkeypatch.setattr(Watch, "__call__", step)
    with pytest.raises(Ended, match="60 seconds" if limit == "time" else "Stopped"):
        list(translate_text(models, "The dog sleeps.", OPTIONS, watch, LIMITS))
    assert len(steps) == 3


def test_visitors_see_the_warnings_of_their_translations(models, capfd):
    """On the page, not in the terminal of the server."""
    page, watch, text = Page(models, LIMITS), Watch(60), "你好 你好 .\nA dog ."
    *_, (message, result) = page.translate(watch, text, [model.name for model in models], 1, 1, 0.6)
    assert not message and result.count("unknown to the tokenizer") == len(models)
    *_, (_, result) = page.translate(watch, "A dog sleeps.", [models[0].name], 1, 1, 0.6)
    assert "unknown" not in result and "unknown" not in "".join(capfd.readouterr())


def test_results_are_escaped(models, hostile):
    state = last(translate_text(models[:1], hostile, OPTIONS, Watch(60), LIMITS))[0]
    for part in state.segments:
        part.hypotheses[0] = replace(part.hypotheses[0], text=hostile)
    state.model = SimpleNamespace(name=hostile, translator=state.model.translator)
    state.no_attention = hostile
    alignment = state.segments[0].alignment
    state.segments[0].alignment = replace(alignment, source=[hostile] * len(alignment.source), target=[hostile])
    pieces = [
        HTML.translations([state], hostile),
        HTML.links(state.segments),
        HTML.note(hostile),
        HTML.title(hostile),
        card_html(hostile),
    ]
    for piece in pieces:
        assert "<img src=x" not in piece and "<script" not in piece
    assert all(piece.count(str(HTML.title(hostile))[4:-5]) for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a <b>c</b> & ![d](e)", '<p>a &lt;b&gt;c&lt;/b&gt; &amp; !<a href="e">d</a></p>'),
        ("`a < b` \\`<i>\\`", "<p><code>a &lt; b</code> `&lt;i&gt;`</p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
    ],
)
def test_cards_have_no_html_of_their_own(text, shown):
    assert card_html(text) == f'<div class="rn-document">{shown}\n</div>'
    assert "<td>b</td>" in card_html("| a |\n| - |\n| b |")


def test_names_of_models():
    assert unique_names(["runs/a/model", "b", "user/c", "/"]) == ["a", "b", "c", "/"]
    assert unique_names(["x/a/model", "y/a"]) == ["x/a/model", "y/a"]


def test_an_export_has_no_attention(plain_model, tmp_path):
    pytest.importorskip("ctranslate2")
    from recnmt_hf.hub.engines import export_ctranslate2

    export_ctranslate2(plain_model, tmp_path / "engine")
    exported = load_models([tmp_path / "engine"])[0]
    state = last(translate_text([exported], "The dog sleeps.", OPTIONS, Watch(60), LIMITS))[0]
    assert state.is_complete and state.no_attention and HTML.note(state.no_attention) in HTML.translations([state])


def test_the_readme_lists_the_limits(repository):
    assert option_table(Limits) in (repository / "src/recnmt_hf/demo/README.md").read_text()


def test_the_server_leaves_nothing(plain_model, monkeypatch):
    """No temporary folder, no setting of the environment, no thread; no look-up of other hosts."""
    import httpx

    hosts, look_up = set(), socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **named: hosts.add(host) or look_up(host, *rest, **named)
    )
    monkeypatch.setenv("GRADIO_SHARE", "true")
    monkeypatch.delenv("GRADIO_TEMP_DIR", raising=False)
    before = threading.active_count()
    with serving([plain_model], queue_size=3, parallel=1) as blocks:
        folder = Path(os.environ["GRADIO_TEMP_DIR"])
        config = httpx.get(f"{blocks.local_url}config").json()
        assert folder.is_dir() and blocks.share_url is None
        assert not config["analytics_enabled"] and not config["is_colab"]
        assert {entry["api_visibility"] for entry in config["dependencies"]} == {"private"}
    assert not folder.exists() and "GRADIO_TEMP_DIR" not in os.environ
    assert {str(host) for host in hosts} <= {"127.0.0.1", "localhost"}
    assert not [thread for thread in threading.enumerate() if not thread.daemon][before:]


@pytest.mark.parametrize(
    ("host", "own", "foreign"),
    [
        ("127.0.0.1", ["127.0.0.1", "localhost", "Own.example"], ["127.0.0.1.evil.example", "192.0.2.7"]),
        ("0.0.0.0", ["127.0.0.1", "192.0.2.7", "own.example"], ["evil.example", "7.example", ""]),
    ],
)
def test_only_requests_for_the_name_of_the_page_are_answered(plain_model, host, own, foreign):
    """A web page whose own name leads to this address cannot read the page, and neither can it send a request."""
    import httpx

    with serving([plain_model], host, allowed_hosts=["own.example"]) as blocks:
        address = f"http://127.0.0.1:{blocks.server_port}/"

        def refused(names):
            requests = [("GET", ""), ("GET", "config")]
            requests += [("POST", "gradio_api/queue/join"), ("POST", "gradio_api/upload")]
            return {
                httpx.request(method, address + path, headers={"Host": f"{name}:{blocks.server_port}"}).text
                == "Invalid host header"
                for name in names
                for method, path in requests
            }

        assert refused(foreign) == {True} and refused(own) == {False}


def test_requests_of_a_visitor():
    """A new request stops the one before it; a stop while it waits for a place counts."""
    first, waiting, result = begin(60, None)
    assert "Waiting" in waiting and result == "" and not first.is_stopped
    second, *_ = begin(60, first)
    assert first.is_stopped and not second.is_stopped
    stop_request(second)
    second.start()
    with pytest.raises(Ended, match="Stopped"):
        second.check()
    stop_request(None)
