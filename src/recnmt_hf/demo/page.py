"""The page: its parts, what they do, and in which order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .._extras import packages_of_extra
from .._plain_text import is_blank
from ..analysis.subjects import load_function
from ..errors import UserError
from . import rendering
from .limits import Limits
from .live import Ended, Progress, Watch, check_length, decoding_options, read_upload, translate_lines, translate_text
from .models import DemoModel, load_models


with packages_of_extra("demo", "The page"):
    import gradio as gr


FOLDER = Path(__file__).parent
WAITING = "Waiting for a free place ..."
BUSY = "Too many requests are waiting. Try again in a moment."
NO_TEXT = "Enter a text to translate."
NO_CHOICE = "Choose at least one model."
NO_CARD = "This model has no card; `recnmt publish --card-only` writes one."
# Text and buttons with more contrast than the theme's own.
COLORS = {
    **dict.fromkeys(("body_text_color_subdued", "block_info_text_color", "block_label_text_color"), "*neutral_600"),
    **dict.fromkeys(
        ("body_text_color_subdued_dark", "block_info_text_color_dark", "block_label_text_color_dark"), "*neutral_300"
    ),
    "block_title_text_color": "*neutral_700",
    "block_title_text_color_dark": "*neutral_200",
    "input_placeholder_color": "*neutral_500",
    "input_placeholder_color_dark": "*neutral_400",
    "button_primary_background_fill": "*primary_700",
    "button_primary_background_fill_dark": "*primary_700",
    "button_primary_background_fill_hover": "*primary_800",
    "button_primary_background_fill_hover_dark": "*primary_600",
}
# Sessions whose latest request is remembered, so that it can be stopped.
MOST_SESSIONS = 1000


class Requests:
    """The latest request of each session, which the stop button ends."""

    def __init__(self) -> None:
        self.watches: dict[tuple[str, str], Watch] = {}

    def begin(self, session: str | None, tab: str, seconds: float) -> None:
        """Register a request, and stop the one before it."""
        self.stop(session, tab)
        self.watches.pop((session or "", tab), None)
        while len(self.watches) >= MOST_SESSIONS:
            self.watches.pop(next(iter(self.watches))).stop()
        self.watches[session or "", tab] = Watch(seconds)

    def start(self, session: str | None, tab: str, seconds: float) -> Watch:
        """Return the request of a session, perhaps stopped while it waited; its time starts now."""
        key = session or "", tab
        if key not in self.watches or self.watches[key].has_started:
            self.watches[key] = Watch(seconds)
        self.watches[key].start()
        return self.watches[key]

    def stop(self, session: str | None, tab: str) -> None:
        """Stop the request of a session."""
        if watch := self.watches.get((session or "", tab)):
            watch.stop()


class Page:
    """Models and limits of a page, and the functions behind its buttons."""

    def __init__(self, models: Sequence[DemoModel], limits: Limits):
        self.models = {model.name: model for model in models}
        self.limits = limits
        self.requests = Requests()

    def chosen(self, names: Any) -> list[DemoModel]:
        """Return the models of names that a browser sent."""
        names = names if isinstance(names, list) else [names]
        return [model for name, model in self.models.items() if name in names]

    def example(self) -> str:
        """Return a sentence to begin with: the example of a model's evidence."""
        return self.models[self.first(lambda model: model.example)].example

    def first(self, shows: Callable[[DemoModel], Any]) -> str:
        """Return the name of the first model that shows something, or else of the first one."""
        for model in self.models.values():
            with suppress(UserError):
                if shows(model):
                    return model.name
        return next(iter(self.models))

    # -- text ----------------------------------------------------------------------------------------------------------

    def begin_text(self, request: gr.Request) -> str:
        self.requests.begin(request.session_hash, "text", self.limits.time_limit)
        return rendering.note(WAITING)

    def stop_text(self, request: gr.Request) -> None:
        self.requests.stop(request.session_hash, "text")

    def translate(
        self, text: Any, names: Any, beams: Any, hypotheses: Any, penalty: Any, request: gr.Request
    ) -> Iterator[tuple[str, str]]:
        """Yield the message and the translations, as they grow."""
        watch = self.requests.start(request.session_hash, "text", self.limits.time_limit)
        text, models, states = str(text or ""), self.chosen(names), []
        if is_blank(text) or not models:
            yield rendering.note(NO_TEXT if is_blank(text) else NO_CHOICE), ""
            return
        try:
            options = decoding_options(self.limits, beams, hypotheses, penalty)
            for states in translate_text(models, text, options, watch, self.limits):
                yield "", rendering.translations(states)
        except UserError as error:
            yield rendering.note(str(error), True), rendering.translations(states, "Not finished") if states else ""
        except Ended as ended:
            yield rendering.note(f"{ended}."), rendering.translations(states, "Stopped") if states else ""

    def reject(self, message: str) -> str:
        """Replace the message of a request that never started: the queue was full."""
        return rendering.note(BUSY, True) if WAITING in message else message

    # -- files ---------------------------------------------------------------------------------------------------------

    def begin_file(self, request: gr.Request) -> tuple[str, str]:
        self.requests.begin(request.session_hash, "file", self.limits.file_time_limit)
        return rendering.note(WAITING), ""

    def stop_file(self, request: gr.Request) -> None:
        self.requests.stop(request.session_hash, "file")

    def translate_file(
        self, path: Any, name: Any, beams: Any, penalty: Any, request: gr.Request
    ) -> Iterator[tuple[str, str]]:
        """Yield the progress and, at the end, the link to the result. The uploaded file is deleted once it is read."""
        watch = self.requests.start(request.session_hash, "file", self.limits.file_time_limit)
        models = self.chosen(name)
        if not path or not models:
            yield rendering.note("Choose a text file." if not path else NO_CHOICE), ""
            return
        upload, start = Path(path), time.monotonic()
        output = f"{upload.name.removesuffix('.gz').removesuffix('.txt')}.{models[0].name.replace('/', '_')}.txt"
        translated: list[str] = []
        ended, lines, problem, progress = "", [], "", Progress(models[0], [])
        try:
            try:
                lines = read_upload(upload, upload.name, self.limits)
            except FileNotFoundError as error:  # another visitor uploaded the same file, which was deleted
                raise UserError(f"The upload of {upload.name} was deleted.", field=upload.name) from error
            finally:
                upload.unlink(missing_ok=True)
                with suppress(OSError):
                    upload.parent.rmdir()  # if it is empty
            yield rendering.file_progress(0, len(lines), 0.0), ""
            options = decoding_options(self.limits, beams, 1, penalty)
            for batch in translate_lines(progress, lines, options, watch, self.limits):
                translated += batch
                seconds = time.monotonic() - start
                yield rendering.file_progress(len(translated), len(lines), seconds), ""
        except Ended as reason:
            ended = str(reason)
        except UserError as error:
            ended, problem = "Not finished", rendering.note(str(error), True)
        state = rendering.file_progress(len(translated), len(lines), time.monotonic() - start, ended) if lines else ""
        state = problem + state + rendering.warning(progress.warnings)
        yield state, rendering.download(output, translated) if translated else ""

    # -- models --------------------------------------------------------------------------------------------------------

    def inside(self, name: Any, sentence: Any, layer: Any, head: Any, direction: Any) -> str:
        """Return the picture and the values of what a model's family can show for a sentence."""
        models, sentence = self.chosen(name), str(sentence or "")
        if not models:
            return rendering.note(NO_CHOICE)
        try:
            check_length(sentence, Limits(max_characters=min(self.limits.max_characters, 2000)), "The sentence")
            subject = models[0].subject
            chosen = {"layer": layer, "head": head, "direction": direction or None}
            options = {key: value for key, value in chosen.items() if value is not None and key in subject.options}
            function = load_function(subject)
            text = function(models[0].translator, sentence, None, **options)
            try:
                with TemporaryDirectory() as folder:
                    file = Path(folder) / "picture.png"
                    function(models[0].translator, sentence, str(file), **options)
                    image = rendering.picture(file.read_bytes(), f"{subject.summary} for: {sentence}")
            except UserError as error:  # no matplotlib
                image = rendering.note(str(error))
        except UserError as error:
            return rendering.note(str(error), True)
        return f'<div class="rn-inside">{image}{rendering.values(text, False)}</div>'

    def inside_controls(self, name: Any) -> tuple[Any, ...]:
        """Return the explanation of what a model can show, and which of the controls it has."""
        model = self.chosen(name)[0]
        try:
            subject = model.subject
            text, options = f"{subject.summary[:1].upper()}{subject.summary[1:]}.", subject.options
        except UserError as error:
            text, options = str(error), ()
        names = ("layer", "head", "direction")
        return rendering.note(text), *(gr.update(visible=option in options, value=None) for option in names)

    def about(self, name: Any) -> str:
        """Return the card of a model."""
        return rendering.card(self.chosen(name)[0].card() or NO_CARD)


# -- layout ------------------------------------------------------------------------------------------------------------


def build_page(models: Sequence[str | Path], loading: dict[str, Any] | None = None, **limits: Any) -> gr.Blocks:
    """
    Build the page for some models without serving it.

    Args:
        models (sequence of `str` or `Path`): Folders of trained or exported models, or model ids of the Hub.
        loading (`dict`, *optional*): Arguments of [`~recnmt_hf.Translator.from_pretrained`]: `device`, `dtype`,
            `quantization`, `trust_remote_code`.
        **limits: Fields of [`Limits`].

    Returns:
        `gradio.Blocks`: Launch it with [`launch_settings`].

    Raises:
        UserError: gradio is not installed, a model cannot be loaded, or a limit is not allowed.
    """
    allowed = Limits(**limits)
    page = Page(load_models(models, **(loading or {})), allowed)
    private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
    at_once = private | {"queue": False}
    with gr.Blocks(title="recnmt demo", analytics_enabled=False, delete_cache=(60, 600)) as blocks:
        names = list(page.models)
        html(rendering.title("Try translation models" if len(names) > 1 else f"Try {names[0]}"))
        with gr.Tabs():
            with gr.Tab("Text"):
                decoding = add_text_tab(page, names, private, at_once)
            with gr.Tab("File"):
                add_file_tab(page, names, decoding, private, at_once)
            with gr.Tab("Inside") as tab:
                add_inside_tab(page, names, tab, private, at_once)
            with gr.Tab("About") as tab:
                add_about_tab(page, names, tab, at_once)
    blocks.queue(max_size=allowed.queue_size, default_concurrency_limit=allowed.parallel, api_open=False)
    return blocks


def html(value: str = "", elem_id: str | None = None) -> gr.HTML:
    """Add a place for our own HTML."""
    return gr.HTML(value, elem_id=elem_id, elem_classes="rn-html", apply_default_css=False, js_on_load=None)


def buttons(start: str, name: str) -> tuple[gr.Button, gr.Button]:
    """Add a button to start a request and one to stop it."""
    with gr.Row():
        return (
            gr.Button(start, variant="primary", elem_id=name, scale=0, min_width=180),
            gr.Button("Stop", elem_id=f"stop-{name}", scale=0, min_width=120),
        )


def add_text_tab(page: Page, names: list[str], private: dict[str, Any], at_once: dict[str, Any]) -> list[Any]:
    """Add the tab for a text; return the decoding options beams and length penalty."""
    text = gr.Textbox(page.example(), label="Text", placeholder="Enter a text", lines=4, max_lines=12, elem_id="text")
    chosen = gr.CheckboxGroup(names, value=names[:4], label="Models", visible=len(names) > 1, elem_id="models")
    start, stop = buttons("Translate", "translate")
    with gr.Accordion("Decoding options", open=False, elem_id="options"), gr.Row():
        most = page.limits.max_beams
        beams = gr.Slider(1, max(most, 2), value=min(4, most), step=1, label="Beams", info="1: greedy search")
        hypotheses = gr.Slider(1, max(most, 2), value=1, step=1, label="Alternatives", info="At most the beams")
        penalty = gr.Slider(
            0, 2, value=0.6, step=0.1, label="Length penalty", info="Larger values prefer longer translations"
        )
    message = html(elem_id="message")
    result = html(elem_id="result")
    inputs = [text, chosen, beams, hypotheses, penalty]
    running = gr.on([start.click, text.submit], page.begin_text, None, message, **at_once).then(
        page.translate, inputs, [message, result], concurrency_id="translate", **private
    )
    running.failure(page.reject, message, message, **at_once)
    stop.click(page.stop_text, None, None, **at_once)
    return [beams, penalty]


def add_file_tab(
    page: Page, names: list[str], decoding: list[Any], private: dict[str, Any], at_once: dict[str, Any]
) -> None:
    """Add the tab for a file."""
    size = f"{page.limits.max_lines:,} lines and {page.limits.max_file_size / 1e6:g} MB"
    explanation = "A UTF-8 text file with one sentence or paragraph per line, plain, gzip or Zstandard"
    html(rendering.note(f"{explanation}; at most {size}. Beams and length penalty are set on the tab Text."))
    upload = gr.File(label="Text file", elem_id="upload", height=140)
    # The component's own method leaves an empty temporary file behind.
    upload.preprocess = lambda payload: getattr(payload, "path", None)  # type: ignore[method-assign]
    model = gr.Dropdown(names, value=names[0], label="Model", visible=len(names) > 1, elem_id="file-model")
    start, stop = buttons("Translate file", "translate-file")
    message = html(elem_id="file-message")
    result = html(elem_id="file-result")
    running = start.click(page.begin_file, None, [message, result], **at_once).then(
        page.translate_file, [upload, model, *decoding], [message, result], concurrency_id="translate", **private
    )
    running.failure(page.reject, message, message, **at_once)
    running.then(lambda: None, None, upload, **at_once)
    stop.click(page.stop_file, None, None, **at_once)


def add_inside_tab(page: Page, names: list[str], tab: Any, private: dict[str, Any], at_once: dict[str, Any]) -> None:
    """Add the tab for what the family of a model can show."""
    value = page.first(lambda model: model.subject)
    model = gr.Dropdown(names, value=value, label="Model", visible=len(names) > 1, elem_id="inside-model")
    explanation = html(elem_id="inside-explanation")
    sentence = gr.Textbox(
        page.example(), label="Sentence", placeholder="Enter one sentence", lines=1, elem_id="sentence"
    )
    with gr.Row(elem_id="inside-controls"):
        small: dict[str, Any] = {"visible": False, "value": None, "scale": 0, "min_width": 240}
        number = small | {"precision": 0, "minimum": 0}
        layer = gr.Number(label="Layer", info="From 0; empty: the default", **number)
        head = gr.Number(label="Head", info="From 0; empty: mean of all", **number)
        direction = gr.Dropdown(["forward", "backward"], label="Direction", **small)
    start = gr.Button("Show", variant="primary", elem_id="show", scale=0, min_width=180)
    result = html(elem_id="inside-result")
    controls = [explanation, layer, head, direction]
    gr.on([tab.select, model.change], page.inside_controls, model, controls, **at_once)
    model.change(lambda: "", None, result, **at_once)
    gr.on(
        [start.click, sentence.submit],
        page.inside,
        [model, sentence, layer, head, direction],
        result,
        concurrency_id="translate",
        **private | {"show_progress": "minimal"},
    )


def add_about_tab(page: Page, names: list[str], tab: Any, at_once: dict[str, Any]) -> None:
    """Add the tab with the card."""
    value = page.first(lambda model: model.card())
    model = gr.Dropdown(names, value=value, label="Model", visible=len(names) > 1, elem_id="about-model")
    card = html(elem_id="card")
    gr.on([tab.select, model.change], page.about, model, card, **at_once)


def launch_settings(**limits: Any) -> dict[str, Any]:
    """Return the arguments of `gradio.Blocks.launch` for the look of the page and its limits (fields of [`Limits`])."""
    theme = gr.themes.Default(
        primary_hue="blue", font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")
    ).set(**COLORS)
    return {  # newer versions of gradio also offer a history of runs
        "theme": theme,
        "css": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "head": f"<script>{(FOLDER / 'page.js').read_text(encoding='utf-8')}</script>",
        "footer_links": [],
        "max_file_size": Limits(**limits).max_file_size,
        "allowed_paths": [],
        "ssr_mode": False,
        "pwa": False,
        "mcp_server": False,
        "enable_monitoring": False,
        "show_error": False,
        "run_history": False,  # neither in the browser nor on the Hub
        "strict_cors": True,
    }
