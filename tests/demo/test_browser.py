"""The served page in a real browser: headless Chromium, driven by Playwright."""

import shutil
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import pytest


gradio = pytest.importorskip("gradio", reason="the extra demo is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

from recnmt_hf.demo.serving import serving  # noqa: E402


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXT = "The dog sleeps. The old cat that the boy sees loves the bird.\nA child reads."
# Milliseconds within which something has to appear; other tests run at the same time.
PATIENCE = 60_000

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")]


@pytest.fixture(scope="module")
def page_url(plain_model, gret_model):
    with serving([plain_model, gret_model], max_characters=8_000) as blocks:
        yield blocks.local_url


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visitor(browser, url, allows_errors=False, **settings):
    """
    Open the page as a new visitor. It must request nothing from elsewhere, log no error (unless it `allows_errors`) and
    open no dialog.
    """
    context = browser.new_context(**settings)
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    problems = []
    page.on("request", lambda request: problems.append(request.url) if not is_local(request.url, url) else None)
    if not allows_errors:
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    page.goto(url)
    page.get_by_role("textbox", name="Text").wait_for()
    yield page
    context.close()
    assert problems == []


def is_local(address, url):
    return address.startswith((url, "data:", "blob:"))


@pytest.fixture
def page(browser, page_url):
    with visitor(browser, page_url) as page:
        yield page


def translate(page, text):
    page.get_by_role("textbox", name="Text").fill(text)
    page.get_by_role("button", name="Translate", exact=True).click()


def enter(page, name, number):
    """Enter a number in a field; while options just opened are still loading, gradio may put the first value back."""
    field = page.get_by_role("spinbutton", name=name)

    def stays():
        field.fill(number)
        field.press("Tab")
        page.wait_for_timeout(500)
        return field.input_value() == number

    wait_until(stays)


def card(page, name):
    return page.get_by_role("region", name=name, exact=True)


def wait_until(condition):
    end = time.monotonic() + PATIENCE / 1000
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_translations_side_by_side_with_attention(page):
    """The words linked to the one under the pointer are highlighted and named with their shares."""
    translate(page, TEXT)
    for name in ("plain", "gret"):
        card(page, name).get_by_text("3 sentences,").wait_for()
        assert card(page, name).locator(".rn-text").inner_text().count("\n") == 1
        assert card(page, name).locator(".rn-pair").count() == 3
    boxes = [card(page, name).bounding_box() for name in ("plain", "gret")]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    pair = card(page, "plain").locator(".rn-pair").first
    word = pair.locator(".rn-target .rn-word[data-links*=':']").first
    word.hover()
    assert "rn-on" in word.get_attribute("class")
    linked = pair.locator(".rn-source .rn-1, .rn-source .rn-2, .rn-source .rn-3")
    note = pair.locator(".rn-links").inner_text()
    assert linked.count() == note.count("%") > 0
    for other in linked.all():
        assert f"{other.inner_text()} " in note
    linked.first.hover()
    assert pair.locator(".rn-target .rn-1, .rn-target .rn-2, .rn-target .rn-3").count() > 0
    page.get_by_role("button", name="Translate", exact=True).hover()
    assert pair.locator(".rn-on, .rn-1, .rn-2, .rn-3").count() == 0


def test_switching_models_and_alternatives(page):
    page.get_by_role("checkbox", name="gret").uncheck()
    page.get_by_role("button", name="Decoding options").click()
    enter(page, "Alternatives", "3")
    translate(page, "The dog sleeps.")
    card(page, "plain").get_by_text("1 sentence,").wait_for()
    assert card(page, "gret").count() == 0
    # By cell: the text of a whole row has its tabs only once the row is laid out.
    cells = card(page, "plain").locator("tbody tr td:nth-last-child(2)")
    playwright.expect(cells).to_have_count(3, timeout=PATIENCE)
    scores = [float(cell) for cell in cells.all_text_contents()]
    assert scores == sorted(scores, reverse=True)
    page.get_by_role("checkbox", name="plain").uncheck()
    page.get_by_role("checkbox", name="gret").check()
    page.get_by_role("button", name="Translate", exact=True).click()
    card(page, "gret").get_by_text("1 sentence,").wait_for()
    assert card(page, "plain").count() == 0
    page.get_by_role("checkbox", name="gret").uncheck()
    page.get_by_role("button", name="Translate", exact=True).click()
    page.get_by_text("Choose at least one model.").wait_for()


@pytest.mark.parametrize(
    ("text", "message"),
    [(" \n\t", "Enter a text to translate."), ("word " * 10_000, "limit is 8,000")],
    ids=["blank", "10,000 words"],
)
def test_texts_that_cannot_be_translated_give_one_sentence(page, text, message):
    translate(page, text)
    page.locator("#message").get_by_text(message).wait_for()
    assert page.locator(".rn-card").count() == 0


def test_html_and_scripts_are_shown_as_text(page, hostile):
    hostile = f"{hostile} ${{alert(3)}} {{{{value}}}} <a href='javascript:alert(4)'>x</a>"
    translate(page, hostile)
    card(page, "plain").get_by_text("sentence", exact=False).first.wait_for()
    page.wait_for_function("document.querySelectorAll('.rn-card .rn-pair').length > 1")
    source = card(page, "plain").locator(".rn-source").first.inner_text()
    assert source.split() == hostile.split()[: len(source.split())] and "onerror" in source
    assert page.locator("#result :is(img, script, a)").count() == 0


def test_two_visitors_at_once(browser, page_url):
    """Each sees and stops the translation of the own text; what is there when it is stopped stays."""
    with visitor(browser, page_url) as first, visitor(browser, page_url) as second:
        translate(first, "The dog that the boy sees loves the old bird. " * 150)
        first.wait_for_selector(".rn-card")
        translate(second, "A child reads. The cat sleeps.")
        card(second, "gret").get_by_text("2 sentences,").wait_for()
        assert "of 150 sentences" in card(first, "gret").inner_text()
        second.get_by_role("button", name="Stop").click()
        second.wait_for_timeout(200)
        assert "Translating" in card(first, "gret").inner_text()
        first.get_by_role("button", name="Stop").click()
        first.locator("#message").get_by_text("Stopped.").wait_for()
        status = card(first, "plain").locator(":scope > .rn-note").inner_text()
        done, total = status.removeprefix("Stopped: ").removesuffix(" sentences").split(" of ")
        assert 0 < int(done) < int(total) == 150 and card(first, "plain").locator(".rn-text").inner_text()


def test_a_full_queue(browser, plain_model):
    """One request runs, one waits, and a third is told to try again later. The first two end as usual."""
    with serving([plain_model], queue_size=1, parallel=1) as blocks:
        visitors = [visitor(browser, blocks.local_url, allows_errors=number == 2) for number in range(3)]
        with visitors[0] as first, visitors[1] as second, visitors[2] as third:
            translate(first, "The dog that the boy sees loves the old bird. " * 150)
            first.wait_for_selector(".rn-card")
            translate(second, "A child reads.")
            second.locator("#message").get_by_text("Waiting").wait_for()
            second.wait_for_timeout(500)
            translate(third, "The cat sleeps.")
            third.locator("#message").get_by_text("Too many requests").wait_for()
            first.get_by_role("button", name="Stop").click()
            card(second, "plain").get_by_text("1 sentence,").wait_for()


def focus_is_on(page, name):
    return page.evaluate("document.activeElement.innerText") == name


def test_keyboard_only(page):
    text = page.get_by_role("textbox", name="Text")
    text.focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("The dog sleeps.")
    playwright.expect(text).to_have_value("The dog sleeps.")

    def reaches_the_button():
        text.focus()  # again, since a page that is still loading may drop the focus
        for _ in range(8):
            page.keyboard.press("Tab")
            if focus_is_on(page, "Translate"):
                return True
        return False

    wait_until(reaches_the_button)
    page.keyboard.press("Enter")
    card(page, "gret").get_by_text("1 sentence,").wait_for()
    page.keyboard.press("Tab")
    assert focus_is_on(page, "Stop")
    for _ in range(8):  # options, the region of a model, its parts
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('rn-word')"):
            break
    pair = card(page, "plain").locator(".rn-pair").first
    assert pair.locator(".rn-target .rn-word.rn-on").count() == 1
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert pair.locator(".rn-source .rn-word.rn-on").inner_text() == "dog"
    assert pair.locator(".rn-links").inner_text().startswith("dog →")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_window(browser, page_url, scheme):
    with visitor(browser, page_url, viewport={"width": 375, "height": 700}, color_scheme=scheme) as page:
        translate(page, f"{TEXT} {'x' * 300}")
        card(page, "gret").get_by_text("sentences,").wait_for()
        for tab in ("Text", "About"):
            page.get_by_role("tab", name=tab).click()
            page.get_by_role("tabpanel").filter(visible=True).wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_card_of_a_hostile_model(page, hostile):
    page.get_by_role("tab", name="About").click()
    page.get_by_text("A small model").wait_for()
    card = page.locator("#card")
    assert hostile in card.inner_text() and 'print("<b>code</b>")' in card.inner_text() and "a < b" in card.inner_text()
    assert "license: mit" not in card.inner_text()
    assert page.locator("#card :is(img, script)").count() == 0
    page.locator("#about-model input").click()
    page.get_by_role("option", name="gret").click()
    card.get_by_text("This model has no card").wait_for()


def test_nothing_else_is_served(page_url, plain_model):
    """No files of the server, and no functions for programs."""
    import httpx

    for path in (plain_model / "config.json", Path(__file__)):
        assert httpx.get(f"{page_url}gradio_api/file={path}").status_code in (403, 404)
    assert httpx.get(f"{page_url}gradio_api/info").json() == {"named_endpoints": {}, "unnamed_endpoints": {}}
    assert httpx.post(f"{page_url}gradio_api/upload", files={"files": b"text"}).status_code == 413
    with socket.socket() as other:
        port = int(page_url.rstrip("/").rpartition(":")[2])
        assert other.connect_ex(("127.0.0.2", port)) != 0  # bound to 127.0.0.1 only
