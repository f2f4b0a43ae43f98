"""The page: its parts, what they do, and in which order."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .._plain_text import is_blank
from ..errors import UserError, packages_of_extra
from ..inference.results import WordAlignment
from .limits import Limits
from .translating import DemoModel, Ended, Watch, decoding_options, load_models, translate_text


with packages_of_extra("demo", "The page"):
    import gradio as gr
    import jinja2
    from markdown_it import MarkdownIt


WAITING = "Waiting in the queue ..."
NO_CHOICE = "Choose at least one model."
NO_CARD = "This model has no card; `recnmt publish --card-only` writes one."
# Attention below this share is not shown, and of a word no more than this number of links.
LEAST_SHARE, MOST_LINKS = 0.1, 3
# Calls of the page itself, not of programs; those at once do not wait in the queue.
PRIVATE: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
AT_ONCE = PRIVATE | {"queue": False}


def count(number: int, unit: str) -> str:
    """Return e.g. `1 sentence` or `2,000 sentences`."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


def shares(alignment: WordAlignment, target: int) -> str:
    """Return the numbers of the source words of a target word, with their percentages, as page.js reads them."""
    row = alignment.weights[target]
    best = sorted(range(len(alignment.source)), key=lambda i: -row[i])[:MOST_LINKS]
    return " ".join(f"{i}:{100 * row[i]:.0f}" for i in best if row[i] >= LEAST_SHARE)


FOLDER = Path(__file__).parent
LOADER = jinja2.FileSystemLoader(FOLDER, encoding="utf-8")
TEMPLATES = jinja2.Environment(loader=LOADER, autoescape=True, trim_blocks=True, lstrip_blocks=True)
TEMPLATES.globals |= {"count": count, "shares": shares}
# The macros of page.html, which escape all texts.
HTML: Any = TEMPLATES.get_template("page.html").module


def card_html(text: str) -> str:
    """Convert Markdown to HTML. Raw HTML is escaped; pictures, which could be loaded from elsewhere, become links."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return f'<div class="rn-document">{parser.render(text)}</div>'


def begin(seconds: float, former: Watch | None) -> tuple[Watch, str, str]:
    """Stop the former request of a visitor; return the watch of a new one, a message, and an empty result."""
    stop_request(former)
    return Watch(seconds), HTML.note(WAITING), ""


def stop_request(watch: Watch | None) -> None:
    """Stop a request at its next step."""
    if watch is not None:
        watch.is_stopped = True


def reject(message: str) -> str:
    """Replace the message of a request that never started: the queue was full."""
    return HTML.note("Too many requests are waiting. Try again in a moment.", True) if WAITING in message else message


class Page:
    """Models and limits of a page, and the functions behind its buttons."""

    def __init__(self, models: Sequence[DemoModel], limits: Limits):
        self.models = {model.name: model for model in models}
        self.limits = limits

    def chosen(self, names: Any) -> list[DemoModel]:
        """Return the models of names that a browser sent."""
        names = names if isinstance(names, list) else [names]
        return [model for name, model in self.models.items() if name in names]

    def example(self) -> str:
        """Return a sentence to begin with: the example of a model's evidence."""
        return next((model.example for model in self.models.values() if model.example), "")

    def translate(
        self, watch: Watch, text: Any, names: Any, beams: Any, hypotheses: Any, penalty: Any
    ) -> Iterator[tuple[str, str]]:
        """Yield the message and the translations, as they grow."""
        text, models, states = str(text or ""), self.chosen(names), []
        if is_blank(text) or not models:
            yield HTML.note("Enter a text to translate." if is_blank(text) else NO_CHOICE), ""
            return
        watch.start()
        try:
            options = decoding_options(self.limits, beams, hypotheses, penalty)
            for states in translate_text(models, text, options, watch, self.limits):
                yield "", HTML.translations(states)
        except UserError as error:
            yield HTML.note(str(error), True), HTML.translations(states, "Not finished") if states else ""
        except Ended as ended:
            yield HTML.note(f"{ended}."), HTML.translations(states, "Stopped") if states else ""

    def about(self, name: Any) -> str:
        """Return the card of a model."""
        return card_html(self.chosen(name)[0].card or NO_CARD)


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
    with gr.Blocks(title="recnmt demo", analytics_enabled=False, delete_cache=(60, 600)) as blocks:
        names = list(page.models)
        title = "Try translation models" if len(names) > 1 else f"Try {names[0]}"
        add_html(HTML.title(title))
        with gr.Tabs():
            with gr.Tab("Text"):
                add_text_tab(page)
            with gr.Tab("About") as tab:
                value = next((model.name for model in page.models.values() if model.card), names[0])
                model = gr.Dropdown(names, value=value, label="Model", visible=len(names) > 1, elem_id="about-model")
                gr.on([tab.select, model.change], page.about, model, add_html(elem_id="card"), **AT_ONCE)
    blocks.queue(max_size=allowed.queue_size, default_concurrency_limit=allowed.parallel, api_open=False)
    return blocks


def launch_settings() -> dict[str, Any]:
    """Return the arguments of `gradio.Blocks.launch` for the look of the page."""
    fonts: dict[str, Any] = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
    # The history of runs would be stored in the browser or on the Hub; newer versions of gradio offer it.
    off = ("ssr_mode", "pwa", "mcp_server", "enable_monitoring", "show_error", "run_history")
    return {
        "theme": gr.themes.Default(primary_hue="blue", **fonts),
        "css": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "head": f"<script>{(FOLDER / 'page.js').read_text(encoding='utf-8')}</script>",
        "footer_links": [],
        "max_file_size": 0,  # there is nothing to upload
        "allowed_paths": [],
        "strict_cors": True,
        **dict.fromkeys(off, False),
    }


def add_html(value: str = "", elem_id: str | None = None) -> gr.HTML:
    """Add a place for our own HTML."""
    return gr.HTML(value, elem_id=elem_id, elem_classes="rn-html", apply_default_css=False, js_on_load=None)


def add_text_tab(page: Page) -> None:
    """Add the tab for a text."""
    names, most = list(page.models), max(page.limits.max_beams, 2)
    text = gr.Textbox(page.example(), label="Text", placeholder="Enter a text", lines=4, max_lines=12, elem_id="text")
    chosen = gr.CheckboxGroup(names, value=names[:4], label="Models", visible=len(names) > 1, elem_id="models")
    with gr.Row():
        start = gr.Button("Translate", variant="primary", elem_id="translate", scale=0, min_width=180)
        stop = gr.Button("Stop", elem_id="stop", scale=0, min_width=120)
    with gr.Accordion("Decoding options", open=False, elem_id="options"), gr.Row():
        value = min(4, page.limits.max_beams)
        beams = gr.Slider(1, most, value=value, step=1, label="Beams", info="1: greedy search")
        hypotheses = gr.Slider(1, most, value=1, step=1, label="Alternatives", info="At most Beams")
        longer = "Larger values prefer longer translations"
        penalty = gr.Slider(0, 2, value=0.6, step=0.1, label="Length penalty", info=longer)
    watch, message, result = gr.State(), add_html(elem_id="message"), add_html(elem_id="result")
    start_watch, outputs = partial(begin, page.limits.time_limit), [watch, message, result]
    begun = gr.on([start.click, text.submit], start_watch, watch, outputs, **AT_ONCE)
    inputs = [watch, text, chosen, beams, hypotheses, penalty]
    running = begun.then(page.translate, inputs, [message, result], concurrency_id="translate", **PRIVATE)
    running.failure(reject, message, message, **AT_ONCE)
    stop.click(stop_request, watch, None, **AT_ONCE)
