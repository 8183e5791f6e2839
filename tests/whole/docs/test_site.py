"""The site of `make docs` in a browser: every page on a desktop, a phone and in dark mode, and the search.

Needs Debian's chromium (`apt-get install chromium`).
"""

import http.server
import os
import subprocess
import sys
import threading
from functools import partial

import pytest
from tests.places import ROOT
from tests.ui.browsing import CHROMIUM, browsing
from tests.waiting import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser: apt-get install chromium"),
]
SCREENS = {"desktop": (1440, 900, "light"), "phone": (390, 844, "light"), "dark": (1440, 900, "dark")}
FAULTS = """() => {
  const scrolls = element => {
    for (let outer = element.parentElement; outer; outer = outer.parentElement)
      if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(outer).overflowX)) return true
    return false
  }
  const cut = [...document.querySelectorAll('article *')].filter(element => {
    const box = element.getBoundingClientRect()
    return box.width && box.right > innerWidth + 1 && !scrolls(element)
  })
  return {
    cut: cut.map(element => element.textContent.slice(0, 60)),
    'page is too wide by': Math.max(0, document.documentElement.scrollWidth - innerWidth),
    'headings but one': document.querySelectorAll('h1').length - 1,
    pictures: [...document.images].filter(image => !image.naturalWidth).map(image => image.src),
    lists: [...document.querySelectorAll('article p')].filter(p => /\\n- |^\\|/.test(p.innerHTML)).length,
  }
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    environment = {**os.environ, "LLMS_TXT": "false", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    handler = partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pages = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("index.html"))
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@pytest.mark.parametrize("screen", SCREENS)
def test_every_page_is_complete_and_fits(site, screen):
    base, pages = site
    width, height, scheme = SCREENS[screen]
    with browsing() as browser:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        problems = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith(base) else problems.append(request.url)
        )
        for name in pages:
            page.goto(f"{base}/{name}/")
            found = {fault: value for fault, value in page.evaluate(FAULTS).items() if value}
            assert (name, found, problems) == (name, {}, [])
            assert page.evaluate("document.body.dataset.mdColorScheme") == {"dark": "slate"}.get(
                scheme, "default"
            )
    assert len(pages) > 45


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("reward does not rise", "Questions"),
        ("out of memory", "Questions"),
        ("--max-price", "Train on a rented machine or your own host"),
        ("optim.lr", "Settings"),
        ("rollouts_per_example", "Settings"),
        ("BK-DISK-FULL", "Errors and findings"),
        ("wrong_tokenizer", "Diagnose a run that does not learn"),
    ],
)
def test_search_finds_a_page(site, words, page):
    with browsing() as browser:
        view = browser.new_page(viewport={"width": 1440, "height": 900})
        view.goto(site[0])
        box = view.locator(".md-search__input")
        box.click()
        box.press_sequentially(words)
        view.locator(".md-search-result__item h1").filter(has_text=page).first.wait_for(timeout=HANG * 1_000)
