"""The reading edition: nothing is lost, nothing is fetched, and figures compute what the lessons say."""

import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "reading"))
build = pytest.importorskip("build", reason="needs pygments, markdown-it-py and latex2mathml")
import wrong  # noqa: E402

VOID = {"meta", "link", "img", "br", "hr", "input"}
SCRIPTS = [path.stem for path in sorted(REPO.glob("*.py")) if "\n# ===== helpers" in build.read(path)]
TESTED = [name for name in SCRIPTS if build.read(f"tests/test_{name}.py")]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


class Page(HTMLParser):
    """What stands in a page. AssertionError unless its elements are closed in turn."""

    def __init__(self, path):
        super().__init__()
        self.raw, self.ids, self.links, self.loads, self.open = path.read_text(encoding="utf-8"), Counter(), [], [], []
        self.feed(self.raw)
        assert not self.open, f"{path.name}: {self.open} not closed"

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        assert tag != "a" or "a" not in self.open, f"a link inside a link: {given}"
        self.ids.update([given["id"]] if "id" in given else [])
        self.links += [given["href"]] if tag == "a" else []
        self.loads += [given[x] for x in ("src", "srcset", "poster", "data") if x in given]
        self.loads += [given["href"]] if tag == "link" else []
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag, (tag, self.getpos())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, with the numbers that the mistakes of one script give."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_URL", "source:")
        return build.build(tmp_path_factory.mktemp("site"), names=["qlearning"])


@pytest.fixture(scope="module")
def pages(site):
    return {path.stem: Page(path) for path in site.folder.glob("*.html")}


def run_chromium(folder, page, *flags):
    """The text of the element #out of a page, when its scripts have run, as data."""
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    options += f"--disable-component-update --disable-sync --user-data-dir={folder / 'profile'} --dump-dom"
    command = [CHROMIUM, *options.split(), *flags, (folder / page).as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, check=True).stdout
    out = re.search(r'<pre id="out">(.*?)</pre>', dom, re.S)
    return json.loads(html.unescape(out[1])) if out else dom


def test_links_lead_somewhere_and_nothing_comes_from_elsewhere(site, pages):
    assert {*SCRIPTS, "index"} <= {*pages}
    for name, page in pages.items():
        assert max(page.ids.values(), default=1) == 1, f"{name}: {page.ids.most_common(1)} occurs twice"
        for source in page.loads:
            assert (site.folder / source).is_file(), f"{name} loads {source}"
            assert Path(source).suffix in (".css", ".js", ".png", ".gif", ".svg"), f"{name} loads {source}"
        for href in page.links:
            path, _, part = html.unescape(href).partition("#")
            if not re.match("https?:", path):
                place = REPO / path.removeprefix("source:/") if path.startswith("source:") else site.folder / path
                assert place.exists(), f"{name}: {href} leads nowhere"
                other = pages.get(path.removesuffix(".html")) if path else page
                assert not part or other is None or part in other.ids, f"{name}: {href} leads nowhere"
    for name in ("style.css", "figures.js"):
        text = (site.folder / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"url\(|@import|fetch\(|XMLHttp|import\(|https?:", text), name


@pytest.mark.parametrize("name", TESTED)
def test_nothing_is_lost(site, pages, name):
    """Every function of the story, every line, lesson and mistake is shown exactly once."""
    script, page = site.scripts[name], pages[name]
    units = Counter(re.findall(r'<section class="unit[^"]*" id="([^"]+)"', page.raw))
    left = set()  # lines that stand on the left, or nowhere: docstrings and comments
    for node in ast.walk(ast.parse(script.text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            first = node.body[0]
            left |= {*range(first.lineno, first.end_lineno + 1)} if first.lineno <= script.story else set()
    for node in ast.parse(script.text).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.lineno <= script.story:
            explained = [x.name for x in node.body if hasattr(x, "name") and ast.get_docstring(x)]
            parts = [node.name, *(f"{node.name}.{x}" for x in explained if isinstance(node, ast.ClassDef))]
            assert all(units[x] == 1 for x in parts), {x: units[x] for x in parts if units[x] != 1}
    for i, line in enumerate(script.lines, 1):
        if line.strip() and i not in left and not (i <= script.story and re.match(r"\s*#", line)):
            assert page.ids[f"L{i}"] == 1, f"line {i} is missing: {line}"
    rulers = [match.start() for match in re.finditer("^# -{20,}", script.tests, re.M)]
    lessons = re.findall(r"^def (test_\w+)", script.tests[rulers[0] : rulers[1]], re.M)
    assert lessons and all(page.ids[x] == 1 for x in lessons)
    decorators = [x for test in ast.parse(script.tests).body for x in getattr(test, "decorator_list", [])]
    texts = {ast.literal_eval(y) for x in decorators if ast.unparse(x).startswith("catches(") for y in x.args}
    known = [text for text in texts if not build.NO_HUMAN.search(text.split(" -> ")[1])]
    assert page.raw.count("<ins>") == len(known) > len(texts) / 2


def test_equations_and_mistakes_are_set(pages):
    """A sample of what a reader sees, without the markup."""
    text = lambda page: re.sub(r"\s+", " ", html.unescape(re.sub("<.*?>", "", pages[page].raw)))
    for equation in ("L(θ)=E[min(rA,clip(r,1−ε,1+ε)A)]", "At=δt+γλAt+1", "δt=rt+γV(st+1)−V(st)"):
        assert equation in text("ppo").replace(" ", "")
    assert re.search(r"The example then gives [\d., −]+\. Right is [\d., −]+\.", text("qlearning"))
    for name in SCRIPTS:  # nothing is left of the plain notation
        prose = re.sub(r"<(pre|code|ins|del|script)\b.*?</\1>", "", pages[name].raw, flags=re.S)
        assert not re.search(r"\b(gamma|lambda|theta) [A-Z]_|[A-Za-z]_\{|&lt;-|\bargmax_", prose), name


def test_words_and_numbers_stand_before_they_are_used(pages):
    """Hard words are explained above the first function; the example of GAE has all its numbers in one table."""
    text = lambda markup: re.sub(r"\s+", " ", html.unescape(re.sub("<.*?>", " ", markup)))
    head, story = pages["ppo"].raw.split('<div class="story"')
    for word in ("Bootstrap : to let", "Trace : how", "Ratio : π", "Reset row : the step"):
        assert word in text(head)
    table, lesson = text(story).split("The example below in one table")[1].split("Worked example:")[:2]
    head = "step rewards values next_values terminated truncated advantages advantages + values"
    assert head in table and lesson.startswith(" returns and gae")
    for row in ("1 2 1 99 yes 1 2", "3 4 2 8 yes 6 8", "4 5 2.5 3 5.5 8", "6 5 4 6 4 8"):
        assert row in table


def test_help():
    command = [sys.executable, REPO / "reading/build.py", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    assert "--folder" in out and "where to write" in out


def test_what_people_ask_names_tests_that_exist():
    page = (REPO / "docs/what-people-ask.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)`(?:[^`]*?)\[(test_\w+\.py)\]", page)
    assert len(named) > 12
    for test, path in named:
        assert f"def {test}(" in (REPO / "tests" / path).read_text(encoding="utf-8"), f"{path} has no {test}"


HARNESS = r"""
<pre id="out"></pre><script>
const results = [], texts = [];
for (const [figure, calls] of Object.entries(CALLS)) {
  let object;
  for (const [name, given, expected] of calls) {
    const [owner, method] = name.split("."), args = owner.startsWith("compute_") ? flat(given) : given;
    if (method === "__init__") object = new compute[owner](args);
    else results.push([name, (method ? object[method]?.(args) : compute[owner](args)) ?? null, expected]);
  }
}
for (const place of document.querySelectorAll(".play")) {
  const texts_of = () => [...place.querySelectorAll("p, svg text")].map((x) => x.textContent);
  const read = () => texts_of().join(" ").replace(/\s+/g, " "), first = read();
  const move = (input, value) => {
    input.value = value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    return read();
  };
  const still = [...place.querySelectorAll("input")].filter((input) => {
    const { value, min, max } = input, text = move(input, value === min ? max : min);
    move(input, value);
    return text === first;
  });
  for (const button of place.querySelectorAll("button")) {
    const before = read();
    button.click();
    if (read() === before) still.push(button);
  }
  texts.push([place.dataset.figure, first, still.map((x) => x.parentElement.textContent)]);
}
document.getElementById("out").textContent = JSON.stringify({ results, texts });
</script>"""


@pytest.fixture(scope="module")
def figures(site):
    """(what JavaScript computes in each call of the lessons, what the figures say as they are moved)."""
    calls = {at: found for script in site.scripts.values() for at, found in script.calls.items()}
    for at, found in calls.items():
        assert found, f"no lesson calls {at}: its figure in reading/figures.js has no numbers to start with"
    page = "<meta charset=utf-8>"
    for at, found in calls.items():
        data = f'<script type="application/json">{json.dumps(found)}</script>'
        page += f'<div class="play" data-figure="{at}">{data}</div>'
    page += "<script src=figures.js></script>" + HARNESS.replace("CALLS", json.dumps(calls))
    (site.folder / "figures.html").write_text(page, encoding="utf-8")
    return run_chromium(site.folder, "figures.html")


@in_chromium
def test_figures_compute_what_the_lessons_say(figures):
    """Each function of `compute` in figures.js gives what the script gave, in all calls of the lessons."""
    compared = Counter()
    for name, got, expected in figures["results"]:
        if got is not None:
            np.testing.assert_allclose(numbers(got), numbers(expected), atol=1e-5, err_msg=name)
            compared[name.partition(".")[0]] += 1
    names = {x for group in wrong.FIGURES.values() for at, others in group.items() for x in [at, *others]}
    assert {*compared} == names, f"nothing was compared of {names - {*compared}}"


def numbers(x):
    """All numbers in nested lists, one after the other."""
    return [y for part in x for y in numbers(part)] if isinstance(x, list) else [float(x)]


@in_chromium
def test_figures_begin_with_the_lesson_and_can_be_moved(figures):
    """What stands there at first has numbers of the lessons; each slider and each button changes something."""
    first = {name: text for name, text, _ in figures["texts"]}
    assert "A4 = 4 + 0.25 · 5 + 0.063 · 4 = 5.5" in first["compute_gae"]
    assert "= 2.4. It is clipped" in first["policy_loss"] and "v = 3, 3, 6; A = 1.5, 2, 2." in first["compute_vtrace"]
    assert "= 2.5. Double DQN" in first["td_targets"] and "= 1.5." in first["td_targets"]
    assert "27.5 + 0.125 Q′(s′, a*)" in first["NStepBuffer"] and "slots 0, 1, 2, 2." in first["SumTree"]
    for name, _, still in figures["texts"]:  # the cliff's sliders count from the next step on
        assert name == "q_learning_target" and len(still) == 4 or not still, f"{name}: {still} changes nothing"


@in_chromium
def test_a_browser_asks_nobody(site, tmp_path):
    """What Chromium writes down of a page's requests: none. That it would is seen with a picture from elsewhere."""
    page = (site.folder / "ppo.html").read_text(encoding="utf-8")
    (site.folder / "asks.html").write_text(page + "<img src=https://example.org/x.png>", encoding="utf-8")
    for name, expected in (("ppo", []), ("asks", ["https://example.org/x.png"])):
        log = tmp_path / f"{name}.json"
        run_chromium(site.folder, f"{name}.html", f"--log-net-log={log}")
        # The number stands for what pages ask for; with other numbers Chromium asks for itself.
        assert (
            re.findall(r'"traffic_annotation":101845102,"url":"([^"]+)"', log.read_text(encoding="utf-8")) == expected
        )


@in_chromium
@pytest.mark.skipif("AXE" not in os.environ, reason="needs AXE=PATH, the file axe.min.js of npm's axe-core")
@pytest.mark.parametrize("name", ["index", "qlearning", "ppo"])
def test_wcag(site, name):
    """Contrast, headings, labels and keyboard, as WCAG AA asks; everything that is folded is open."""
    script = """<pre id="out"></pre><script>
    document.querySelectorAll("details").forEach((x) => { x.open = true; });
    axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"] }).then((found) => {
      const nodes = (x) => x.nodes.slice(0, 3).map((node) => node.html.slice(0, 200));
      document.getElementById("out").textContent = JSON.stringify(found.violations.map((x) => [x.id, ...nodes(x)]));
    });</script></main>"""
    shutil.copy(os.environ["AXE"], site.folder / "axe.js")
    page = (site.folder / f"{name}.html").read_text(encoding="utf-8")
    page = page.replace("</main>", "<script src=axe.js></script>" + script)
    (site.folder / f"axe_{name}.html").write_text(page, encoding="utf-8")
    assert run_chromium(site.folder, f"axe_{name}.html", "--window-size=1400,1000", "--virtual-time-budget=60000") == []
