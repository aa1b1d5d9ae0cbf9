"""Write the reading edition: a page for each script, cut from it, its tests, docs/ and exercises/.

    python reading/build.py           # site/index.html and the other pages, in half a minute
    python reading/build.py --help

Nothing is written for these pages, so nothing in them can drift: what a function is about is its docstring,
its worked example is the docstring of a test, the mistakes are those that this test must catch. page.html
has their form.
"""

import ast
import html
import io
import os
import re
import shutil
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import jinja2
import numpy as np
import torch
import tyro
from markdown_it import MarkdownIt

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
sys.path[:0] = [str(HERE), str(REPO / "exercises")]
import notation  # noqa: E402
from mechanism import EXERCISES, HUNTS, load_tables  # noqa: E402
from notation import LINKS, highlight, inline, tag  # noqa: E402
from wrong import by_hand, run_lessons  # noqa: E402

RULER = re.compile(r"\s*# -{20,} (.*)")
# What only a test would write, and no human: such a mistake is left out of the pages.
NO_HUMAN = re.compile(r"\b(True|False)\b|\b77\b|\b9+\b|1e9|\b0 \* |\blambda\b")


def read(path):
    """The text of a file of the repository; "" if there is none."""
    return Path(REPO, path).read_text(encoding="utf-8") if Path(REPO, path).exists() else ""


def slug(title):
    """The address of a heading, as GitHub makes it."""
    text = html.unescape(re.sub("<.*?>", "", title)).lower()
    return re.sub(r"[^\w -]", "", text).replace(" ", "-")


def doc_of(node):
    """A docstring without its margin; cleandoc would take that of a single equation as well."""
    margin = " " * node.body[0].col_offset
    return re.sub(f"(?m)^{margin}", "", ast.get_docstring(node, clean=False)).rstrip()


# ------------------------------------------------------------------------------------------ sources
def unit_of(name, first, last, source="", **given):
    """A function, a method with a docstring, or another statement of a script, up to the next one.

    Given are its docstring, and the title and comment of the section that begins with it. Added later:
    lessons: (test, other units that it exercises); notes: the "details that matter" of docs/;
    mistakes: (text in `catches`, where, what, old text, new text, line).
    """
    given |= {"lessons": [], "mistakes": [], "notes": []}
    return SimpleNamespace(name=name, first=first, last=last, source=source, **given)


class Script:
    """A script as the Units of its story, and what tests, docs and exercises say about them."""

    def __init__(self, name):
        self.name, self.text, self.tests = name, read(f"{name}.py"), read(f"tests/test_{name}.py")
        self.lines, tree = self.text.split("\n"), ast.parse(self.text)
        self.story = self.text[: self.text.index("\n# =====")].count("\n") + 1  # its last line
        self.title, _, self.doc = ast.get_docstring(tree).partition("\n\n")
        self.units = list(self.cut(tree.body[1:]))
        self.rest = unit_of("helpers", self.story + 1, len(self.lines) - 1, "\n".join(self.lines[self.story :]))
        self.find = {unit.name: unit for unit in [self.rest, *self.units]}
        for test in ast.parse(self.tests).body:
            if getattr(test, "name", "").startswith("test_"):
                self.attach(test)
        self.page = read(f"docs/{name}.md")
        said = self.page + "\n".join(self.lines[: self.story])
        words = re.findall(r"(?ms)^\* \*\*(.*?)\*\*: (.*?)\n(?=\*|\Z)", read("docs/words.md"))
        occurs = lambda word: re.search(rf"\b{word}(s|ped|ping)?\b", said, re.I)
        self.words = [(word, text) for word, text in words if occurs(word)]
        self.docs = dict(re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", self.page))
        self.details = next((title for title in self.docs if title.startswith("Details that")), "")
        for item in re.split(r"(?m)^\d+\. ", self.docs.pop(self.details, ""))[1:]:
            named = (self.find[x] for x in re.findall(r"`([\w.]+)`", item) if x in self.find)
            next(named, self.rest).notes.append(re.sub(r"\n {2,4}", "\n", item))
        self.tasks = [x for x in [*EXERCISES.values(), *HUNTS.values()] if x.script == f"{name}.py"]
        self.week = min((task.week for task in self.tasks), default=99)

    def cut(self, nodes):
        """Yield the Units of the story."""
        found = {}  # name: (node, first line, comments above it)
        for node in (x for x in nodes if x.lineno <= self.story):
            parts = node.body if isinstance(node, ast.ClassDef) else []
            methods = [x for x in parts if hasattr(x, "name") and ast.get_docstring(x)]
            for part in [node, *methods]:
                name = ast.unparse(part.targets[0]) if isinstance(part, ast.Assign) else "imports"
                name = getattr(part, "name", name) if part is node else f"{node.name}.{part.name}"
                first = min(x.lineno for x in [part, *getattr(part, "decorator_list", [])])
                above = [*takewhile(re.compile(r"\s*(#|$)").match, self.lines[first - 2 :: -1])][::-1]
                again = "-2" * (name in found and name != "imports")
                found.setdefault(name + again, (part, first, above))
        ends = [first - len(above) - 1 for _, first, above in found.values()][1:] + [self.story]
        for (name, (node, first, above)), last in zip(found.items(), ends):
            source = "\n".join(self.lines[first - 1 : last]).rstrip()
            section = "".join(match[1] for match in map(RULER.match, above) if match)
            comment = [re.sub(r"^\s*# ?", "", line) for line in above if not RULER.match(line)]
            doc, hidden = "\n".join(comment).strip(), range(0)
            intro, doc = (doc, "") if section else ("", doc)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
                doc += "\n\n" + doc_of(node)
                hidden = range(node.body[0].lineno, node.body[0].end_lineno + 1)  # lines
            texts = {"section": section, "intro": intro, "doc": doc, "hidden": hidden}
            yield unit_of(name, first, first + source.count("\n"), source, **texts)

    def methods(self):
        """{.name: address} of the methods whose name tells the class: others have no such method or attribute."""
        count = Counter(name.rpartition(".")[2] for name in self.find if "." in name)
        others = dict, str, set, np.ndarray, io.TextIOBase, torch.nn.Module
        is_clear = lambda name: (
            not (any(hasattr(x, name) for x in others) or re.search(rf"self\.{name}\b =", self.text))
        )
        names = {name.rpartition(".")[2]: name for name in self.find if "." in name}
        return {f".{name}": f"#{full}" for name, full in names.items() if count[name] == 1 and is_clear(name)}

    def numbers(self, name):
        """({argument or result: its numbers}, {other arguments}) of a function's first call in a lesson."""
        returned = re.findall(r"(?m)^    return (.*)", self.find[name].source)[-1].split(", ")
        _, given, result = self.calls[name][0]
        given = given | dict(zip(returned, result))
        columns = {key: np.ravel(x) for key, x in given.items() if isinstance(x, list)}
        return columns, {key: x for key, x in given.items() if key not in columns}

    def attach(self, test):
        """Give a test's mistakes to the functions where they are, a lesson to the one with most of them."""
        calls = [call for call in test.decorator_list if "catches(" in ast.unparse(call)]
        places = Counter()
        for text in (ast.literal_eval(x) for call in calls for x in call.args):
            where, what, old, new = re.match(r"([\w.]+), (.*?): (.*) -> (.*)", text, re.S).groups()
            unit = self.find.get(where) or self.find.get(where.rpartition(".")[0]) or self.rest
            places[unit.name] += 1
            begin = unit.source.find(f" {where.rpartition('.')[2]}(") if unit is self.rest else 0
            begin = unit.source.find(old, max(begin, 0)) + len(old) - len(old.lstrip())
            line = unit.first + unit.source[: max(begin, 0)].count("\n")
            if not NO_HUMAN.search(new) and text not in (mistake[0] for mistake in unit.mistakes):
                unit.mistakes.append((text, where, what, old.strip(), new.strip(), line))
        if by_hand(self.tests.split("\n"), test.lineno):
            used = {x.attr for x in ast.walk(test) if isinstance(x, ast.Attribute)}
            places.update({name: 0.1 for name in self.find if name.rpartition(".")[2] in used})
            best, *others = sorted(places, key=places.get, reverse=True) or ["helpers"]
            self.find[best].lessons.append((test, [x for x in others if places[x] >= 1 and x != "helpers"]))


# -------------------------------------------------------------------------------------------- parts
class Site:
    """The folder of the pages, and what page.html calls."""

    def __init__(self, folder, scripts):
        self.folder, self.scripts = Path(folder), {script.name: script for script in scripts}
        (self.folder / "img").mkdir(parents=True, exist_ok=True)
        form = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        form.tests["wide"] = re.compile(r"[─│]|(?m:^) {4}(?!.*(?:=|←|<-)).{62}").search  # a drawing or a wide table
        form.globals |= {"site": self, "slug": slug, "doc_of": doc_of, **vars(notation)}
        self.template = form.from_string(read("reading/page.html"))

    def target(self, href, base):
        """A link in a file of the folder `base`, as seen from the site; pictures are copied."""
        path, sign, part = html.unescape(href).partition("#")
        full = Path(REPO, base, path).resolve()
        if re.match("https?:", href) or not path:
            return href
        if full.suffix in (".png", ".gif", ".svg"):
            if full.exists():
                shutil.copy(full, self.folder / "img")
            return f"img/{full.name}"
        if full.parent == REPO / "docs" or full.stem in self.scripts and full.parent == REPO:
            return f"{full.stem}.html{sign}{part}"
        top = os.environ.get("SOURCE_URL", "..")  # where the repository is, seen from site/
        return f"{top}/{full.relative_to(REPO).as_posix()}{sign}{part}"

    def markdown(self, text, base="docs"):
        """Markdown as HTML; formulas, variables and code look as in docstrings."""
        page = MarkdownIt("commonmark", {"html": True}).enable("table")
        rules = {
            "text": lambda text, _: inline(text),
            "code_inline": lambda text, _: notation.code_word(text),
            "code_block": lambda text, _: notation.indented(text.rstrip().split("\n")),
            "fence": lambda text, kind: tag("pre", "\n".join(highlight(text, kind or "text")), tabindex="0"),
        }
        for name, rule in rules.items():
            by_token = lambda self, tokens, i, *_, rule=rule: rule(tokens[i].content, tokens[i].info)
            page.add_render_rule(name, by_token)
        link = lambda match: f'{match[1]}="{self.target(match[2], base)}"'
        out = re.sub(r'(href|src)="([^"]*)"', link, page.render(re.sub("(?s)<!--.*?-->", "", text)))
        out = re.sub(r"(<a [^>]*>(?:(?!</a>).)*?)<a [^>]*>(.*?)</a>", r"\1\2", out)  # an arXiv number in a link
        out = re.sub(r"<h([23])>(.*?)</h.>", lambda m: tag(f"h{m[1]}", m[2], id=slug(m[2])), out)
        return re.sub(r"(<table>.*?</table>)", r'<div class="scroll" tabindex="0">\1</div>', out, flags=re.S)

    def pictures(self, text, base, kind):
        """(address, description) of the pictures in a text whose description or path matches `kind`."""
        found = re.findall(r"!\[([^]]*)\]\(([^)]*)\)", text)
        return [(self.target(path, base), inline(words)) for words, path in found if re.search(kind, words + path)]

    def write(self, name, **given):
        """Write a page."""
        Path(self.folder, f"{name}.html").write_text(self.template.render(name=name, **given), encoding="utf-8")


def build(folder: Path = REPO / "site", names: tuple[str, ...] | None = None):
    """Write the reading edition: a page for each script, and those of docs/.

    Args:
        folder: where to write
        names: scripts whose lessons run with all their mistakes, to show what these give; None: all scripts
    """
    load_tables()
    stems = [path.stem for path in REPO.glob("*.py") if "\n# ===== helpers" in read(path)]
    site = Site(folder, sorted(map(Script, stems), key=lambda script: (script.week, script.story)))
    for script in site.scripts.values():
        mistakes = names is None or script.name in names
        script.wrong, script.calls = run_lessons(script.name, mistakes) if script.tests else ({}, {})
    for script in site.scripts.values():
        LINKS.clear()
        LINKS.update({name.rpartition(".")[2]: f"#{name}" for name in [*script.find][::-1]})
        LINKS.update({name: f"#{name}" for name in script.find})
        links = {name: f"#{name}" for name in script.find if "." not in name} | script.methods()
        site.write(script.name, script=script, markup=highlight(script.text, links=links))
    LINKS.clear()
    LINKS.update({f"{name}.py": f"{name}.html" for name in site.scripts})
    pages = [path.stem for path in sorted(Path(REPO, "docs").glob("*.md")) if path.stem not in site.scripts]
    for name in pages:
        site.write(name, text=read(f"docs/{name}.md"))
    blocks = [x for x in read("README.md").split("\n\n") if not re.search("reading/build|reading.png", x)]
    site.write("index", readme="\n\n".join(blocks), pages=pages)
    for name in ("style.css", "figures.js"):
        shutil.copy(HERE / name, site.folder)
    return site


if __name__ == "__main__":
    print(tyro.cli(build).folder / "index.html")
