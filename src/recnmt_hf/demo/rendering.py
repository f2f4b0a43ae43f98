"""HTML of the page's results. Every text from visitors, models and files is escaped here."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .._extras import packages_of_extra
from ..hub.card import duration
from ..inference.results import TranslationWarnings
from ..inference.word_alignment import WordAlignment
from .live import Progress, Segment


# Attention below this share is not shown, and of a word no more than this number of links.
LEAST_SHARE = 0.1
MOST_LINKS = 3
# Sentences in the lists of alternatives and links; more would make the page slow.
MOST_SENTENCES = 30
# With more sentences, the list of links is folded.
MOST_OPEN = 8
# Resolution of the plots, and of a browser's pixels.
PICTURE_DPI, SCREEN_DPI = 150, 96
LINKS_HINT = "Point at a word, or move with the arrow keys, to see where the model attended when it wrote that word."


def title(text: str) -> str:
    """Return the title of the page."""
    return f"<h1>{escape(text)}</h1>"


def note(text: str, is_problem: bool = False) -> str:
    """Return one sentence for the visitor; a problem is announced by screen readers at once."""
    kind = 'rn-problem" role="alert' if is_problem else 'rn-note" role="status'
    return f'<p class="{kind}">{escape(text)}</p>' if text else ""


def warning(warnings: TranslationWarnings) -> str:
    """Return what the visitor should know about translations."""
    text = warnings.unknown_tokens()
    return f'<p class="rn-problem" role="status">{escape(text)}</p>' if text else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], label: str) -> str:
    """Return a table whose first column names the rows."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heads)
    body = ""
    for first, *others in rows:
        cells = "".join(f'<td dir="auto">{escape(str(cell))}</td>' for cell in others)
        body += f'<tr><th scope="row" dir="auto">{escape(str(first))}</th>{cells}</tr>'
    return scrolling(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>", label)


def scrolling(content: str, label: str) -> str:
    """Return content that scrolls by itself where the window is narrow, with a hint that page.js shows there."""
    start = f'<div class="rn-scroll" role="region" aria-label="{escape(label)}" tabindex="0">'
    return f'{start}<p class="rn-note rn-hint">Scroll sideways to see the rest.</p>{content}</div>'


def fold(title: str, content: str, key: str, is_open: bool) -> str:
    """Return a part that can be folded; the page remembers by its key whether the visitor did."""
    state = " open" if is_open else ""
    return f'<details data-key="{escape(key)}"{state}><summary>{escape(title)}</summary>{content}</details>'


def count(number: int, unit: str) -> str:
    """Return e.g. `1 sentence` or `2,000 lines`."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"


# -- translations ------------------------------------------------------------------------------------------------------


def translations(states: Sequence[Progress], ended: str = "") -> str:
    """Return the translations of all models side by side; `ended` says why they are incomplete."""
    return f'<div class="rn-grid">{"".join(translation(state, ended) for state in states)}</div>'


def translation(state: Progress, ended: str) -> str:
    """Return the translation by one model, with its alternatives and links."""
    name, total = state.model.name, count(len(state.segments), "sentence")
    if state.is_complete:
        status = f"{total}, {state.seconds:.1f} s"
    else:
        status = f"{ended or 'Translating'}: {state.done:,} of {total}"
    parts = [part for part in state.segments[: state.done] if part.hypotheses][:MOST_SENTENCES]
    several = max((len(part.hypotheses) for part in parts), default=1) > 1
    blocks = []
    if parts:
        content = note(state.no_attention) or links(parts)
        is_open = len(parts) <= MOST_OPEN and not state.no_attention
        blocks.append(fold("Attention", content, f"links {name}", is_open))
        title = "Alternatives and scores" if several else "Scores"
        blocks.append(fold(title, alternatives(parts), f"scores {name}", several))
    kind = str(state.model.translator.model.config.model_type)
    kind = "" if kind == name else f" <small>{escape(kind)}</small>"
    return (
        f'<section class="rn-card" aria-label="{escape(name)}"><h3>{escape(name)}{kind}</h3>'
        f'<div class="rn-text" dir="auto">{escape(state.text)}</div><p class="rn-note">{escape(status)}</p>'
        f"{warning(state.warnings)}{''.join(blocks)}</section>"
    )


def alternatives(parts: Sequence[Segment]) -> str:
    """Return a table of the hypotheses of each sentence."""
    rows = []
    for number, part in enumerate(parts, start=1):
        for rank, one in enumerate(part.hypotheses, start=1):
            text = one.text if one.finished else f"{one.text} … (maximum length)"
            place = f"{number}" if len(part.hypotheses) == 1 else f"{number}.{rank}"
            rows.append([place, text, f"{one.score:.3f}", f"{one.log_prob:.3f}"])
    return table(["sentence", "translation", "score", "log-probability"], rows, "Hypotheses with scores")


def links(parts: Sequence[Segment]) -> str:
    """Return the words of sentences and their best translations, with their links by attention."""
    pairs = [pair_of_words(part.alignment) for part in parts if part.alignment is not None]
    return f'<p class="rn-note">{LINKS_HINT}</p>{"".join(pairs)}' if pairs else note("There are no words to link.")


def pair_of_words(alignment: WordAlignment) -> str:
    """Return the words of a sentence pair. A target word has the numbers of its source words and their percentages."""
    source = "".join(f'<span class="rn-word" tabindex="-1">{escape(word)}</span> ' for word in alignment.source)
    target = ""
    for number, (word, row) in enumerate(zip(alignment.target, alignment.weights, strict=True)):
        best = sorted(range(len(alignment.source)), key=lambda i: -row[i])[:MOST_LINKS]
        shares = " ".join(f"{i}:{100 * row[i]:.0f}" for i in best if row[i] >= LEAST_SHARE)
        tab = "0" if number == 0 else "-1"
        target += f'<span class="rn-word" tabindex="{tab}" data-links="{shares}">{escape(word)}</span> '
    return (
        f'<div class="rn-pair" role="group" aria-label="Sentence pair"><div class="rn-source" dir="auto">{source}</div>'
        f'<div class="rn-target" dir="auto">{target}</div>'
        '<p class="rn-links rn-note" aria-live="polite">&nbsp;</p></div>'
    )


# -- files -------------------------------------------------------------------------------------------------------------


def file_progress(done: int, total: int, seconds: float, ended: str = "") -> str:
    """Return a progress bar with the number of lines and the remaining time."""
    rest = seconds / done * (total - done) if done else 0.0
    text = f"{done:,} of {count(total, 'line')}"
    if ended:
        text = f"{ended}: {text}"
    elif done == total:
        text = f"{count(total, 'line')} in {duration(seconds)}"
    elif done:
        text += f", about {duration(rest)} left"
    return f'<progress value="{done}" max="{total}" aria-label="Translated lines"></progress>{note(text)}'


def download(name: str, lines: Sequence[str]) -> str:
    """Return a link that saves lines as a file; the link holds the text, so the server keeps none."""
    content = base64.b64encode("".join(f"{line}\n" for line in lines).encode()).decode()
    return (
        f'<a class="rn-download" download="{escape(name)}" href="data:text/plain;charset=utf-8;base64,{content}">'
        f"Download {escape(name)} ({count(len(lines), 'line')})</a>"
    )


# -- models ------------------------------------------------------------------------------------------------------------


def picture(content: bytes, text: str) -> str:
    """Return a picture in PNG format, in its size in print, with its description."""
    width = int.from_bytes(content[16:20], "big") * SCREEN_DPI // PICTURE_DPI
    data = base64.b64encode(content).decode()
    image = f'<img alt="{escape(text)}" width="{width}" src="data:image/png;base64,{data}">'
    return scrolling(image, "Picture")


def values(text: str, is_open: bool) -> str:
    """Return the numbers of a picture as text."""
    return fold("Values", scrolling(f"<pre>{escape(text)}</pre>", "Values"), "values", is_open)


def card(text: str) -> str:
    """Convert Markdown to HTML. Raw HTML is escaped; pictures, which could be loaded from elsewhere, become links."""
    with packages_of_extra("demo", "The page"):
        from markdown_it import MarkdownIt
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
    return f'<div class="rn-document">{parser.render(text)}</div>'
