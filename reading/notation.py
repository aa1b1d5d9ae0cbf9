"""Docstrings as HTML: what is plain text in the scripts, A_t = delta_t + gamma lambda A_{t+1}, looks as in a book.

Variables in sentences become MathML, and so do equations that stand on lines of their own, their source in brackets
after three spaces. Lines whose columns are parted by two spaces or more become tables. A slash is a fraction between
two single operands: a / (b c). Names of Python stand in backticks.
"""

import re
from html import escape
from itertools import groupby

import pygments
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

LATIN = "alpha|beta|gamma|delta|epsilon|eps|theta|lambda|mu|pi|rho|sigma|tau|phi|Phi"
GREEK = dict(zip(LATIN.split("|"), "αβγδεεθλμπρστφΦ"))
LIMITS = {"sum": "∑", "Σ": "∑", "min": "min", "max": "max", "argmax": "arg max"}  # their index stands below
SIGNS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "||": "∥", "-": "−", "*": "·", "x": "×", "sqrt": "√"}
FUNCTIONS = {"log", "exp", "clip", "mean", "std", "tanh", "softmax", "sign", "Var", "KL", "Huber", "sqrt"}
BRACKETS = {"(": ")", "[": "]", "{": "}"}
TOKEN = re.compile(r"(\s*)(<-|->|<=|>=|\|\||\d+(?:[.,]\d+)*|[^\W\d_]+|\S)")
ARXIV = "https://arxiv.org/abs/"
LINKS = {}  # {name of a function: address in the page}: code in a sentence that names it is a link


def tag(name, *inner, **attributes):
    """An HTML element."""
    given = "".join(f' {key.strip("_")}="{value}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(inner)}</{name}>"


# ------------------------------------------------------------------------------------------------------------ formulas
class Formula:
    """A formula in plain text, read from left to right into MathML."""

    def __init__(self, text):
        self.tokens = TOKEN.findall(text.replace("′", "'"))[::-1]  # (space before it, token); the next one is last

    def joined(self, signs):
        """Whether the next token is one of these signs, without a space before it."""
        return bool(self.tokens) and self.tokens[-1][0] == "" and self.tokens[-1][1] in signs

    def row(self, closing=""):
        """[(kind, MathML)] up to a closing bracket. A slash between two single operands becomes a fraction."""
        row = [("", ""), ("", "")]
        while self.tokens and self.tokens[-1][1] != closing:
            space = tag("mspace", width=".2em") if self.tokens[-1][0] else ""
            kind, markup = self.item(row[-1][0])
            if row[-1][0] == "/" and kind == row[-2][0] == "operand" != row[-3][0]:
                bare = (re.sub(r"^<mrow><mo>\(</mo>(.*)<mo>\)</mo></mrow>$", r"\1", x) for x in (row[-2][1], markup))
                row[-2:] = [("operand", tag("mfrac", *(tag("mrow", x) for x in bare)))]
            else:
                words = "word" in (kind, row[-1][0]) and {kind, row[-1][0]} <= {"word", "operand"}
                row.append((kind, space * words + markup))
        self.tokens = self.tokens[:-1]
        return row[2:]

    def item(self, before, is_index=False):
        """(kind, MathML) of a sign, or of an operand with its indices and arguments; `before` is the last kind."""
        token = self.tokens.pop()[1]
        name, kind, below, above = GREEK.get(token, token), "operand", "", ""
        if token in BRACKETS:
            inner = "".join(markup for _, markup in self.row(BRACKETS[token]))
            base = tag("mrow", tag("mo", token), inner, tag("mo", BRACKETS[token]))
        elif token in LIMITS and self.joined("_"):
            self.tokens.pop()
            return "word", tag("munder", tag("mo", LIMITS[token], movablelimits="true"), self.item("", True)[1])
        elif name == "sqrt" or not name[0].isalnum():
            form = "infix" if before in ("operand", "word") else "prefix"
            return token, tag("mo", escape(SIGNS.get(name, name)), form=form)
        else:
            kind = "word" if name.isalpha() and len(name) > 1 else "operand"
            base = tag("mi" if name.isalpha() else "mn", name, **{"class": "word"} if kind == "word" else {})
        if kind == "operand" and token.isalpha() and self.joined("0123456789"):
            below = self.item("", True)[1]  # s0
        while self.joined("'" if is_index else "'_^*"):
            sign = self.tokens.pop()[1]
            if sign == "'":
                base = tag("mrow", base, tag("mo", "′", lspace="0", rspace="0"))
                continue
            index = tag("mo", "∗") if sign == "*" else self.item("", True)[1]
            index = re.sub(r"^<mrow><mo>[({]</mo>(.*)<mo>[)}]</mo></mrow>$", r"\1", index)
            below, above = (below + index, above) if sign == "_" else (below, above + index)
        if below or above:
            parts = (tag("mrow", part) for part in (below, above) if part)
            base = tag("m" + "sub" * bool(below) + "sup" * bool(above), base, *parts)
        if kind == "operand" and token.isalpha() and not is_index and self.joined("(["):
            base = tag("mrow", base, self.item("")[1])  # arguments
        return kind, base


def formula(text, display="true"):
    """A formula as MathML; a long one may be broken before each relation, and before each term of a sum."""
    pieces = [""]
    for kind, markup in Formula(text).row():
        if display == "true" and pieces[-1] and kind in "=<-+−←" and 'form="infix"' in markup:
            pieces.append("")
            markup = markup.replace("<mo ", '<mo lspace="0" ', 1)
        pieces[-1] += markup
        pieces += [""] if kind in ",;" else []
    return " ".join(tag("math", tag("mrow", piece), displaystyle=display) for piece in pieces if piece)


# -------------------------------------------------------------------------------------------------------- in sentences
LETTER = rf"(?:{LATIN}|[A-Za-z])(?![A-Za-z])|[α-ωΑ-Ω]|(?:sum|min|max|argmax)(?=_)"
INDEX = r"['′](?!\w)|\d(?!\d)|\*(?![\w(]| [\d(])|[_^](?:\{[^}]*\}|\([^()]*\)|[^\W\d_]+(?:,\w)?|\d+|[-+*])"
KINDS = {
    "code": r"`[^`]+`|(?<![\w-])--[a-z][\w-]*|\b\w+\.(?:py|md|csv|json|pt)\b",
    "name": rf"(?!(?:{LATIN}|sum|min|max|argmax)_)[A-Za-z]{{2,}}(?:_\w+)+(?:\.\w+)*",  # gae_lambda
    "arxiv": r"(?<![\w.])\d{4}\.\d{4,5}",
    "doi": r"doi 10\.\S+\w",
    "hyphen": r"[A-Za-z]+(?:-[A-Za-z]{2,})+|\b[A-Za-z]\.[A-Za-z]\b|(?<=\d )M\b",  # Q-learning, e.g, 1 M
    "genitive": rf"(?:\b(?!(?:{LATIN})\b)\w+|(?<=\w))['’]s\b",
    "sign": r"<-|->|<=|>=|\|\||(?<=[\d)] )x(?= [\w(-])|(?:^|(?<=[\s([]))-(?=[\s\w(])|(?<= )\*(?= )|\bsqrt\b",
    "power": r"(?<=[)\]\w])\^[\w*]+",  # (r - 1)^2
    "formula": rf"(?<![\w^'’])(?<!\w[-+])(?:{LETTER})(?!\d[A-Za-z\d])(?:{INDEX})*",  # r, A_t, theta^-
}
INLINE = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in KINDS.items()))
VARIABLE = r"[,.;:)\]|=(*/]| ([-+=*/<>|]|(of|in|is|are|to|and|or|for|from|by|that|with|as|over|has|at)\b)"


def is_article(match):
    """Whether a match of INLINE is the word "a", or "I", and no variable."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    if match[0] in ("a", "A"):
        return bool(before + after) and not re.match(VARIABLE, after) and not re.search(r"([-+=|]|action) ?$", before)
    return match[0] == "I"


def code_word(name):
    """Code in a sentence."""
    markup = tag("code", escape(name, quote=False))
    return tag("a", markup, href=LINKS[name]) if name in LINKS else markup


def prose(text):
    """Plain words, with the quotation marks and apostrophes of a book."""
    return escape(re.sub(r"(?<=\w)'|^'(?=s\b)", "’", re.sub(r'"([^"]+)"', r"“\1”", text)), quote=False)


def marked(match):
    """The HTML of one match of INLINE."""
    kind, word = match.lastgroup, match[0]
    if kind in ("code", "name"):
        return code_word(word.strip("`"))
    if kind in ("arxiv", "doi"):
        return tag("a", word, href=word.replace("doi ", "https://doi.org/") if kind == "doi" else ARXIV + word)
    if kind in ("hyphen", "genitive") or is_article(match):
        return prose(word)
    if kind == "power":
        return tag("sup", inline(word[1:]))
    return SIGNS[word] if kind == "sign" else formula(word, "false")


def inline(text):
    """A sentence as HTML: code, links to papers, and variables, which are recognised by what they look like."""
    parts, at = "", 0
    for match in INLINE.finditer(text):
        parts += prose(text[at : match.start()]) + marked(match)
        at = match.end()
    kept = r"[([|]*<math(?:(?!</math>).)*</math>[])|,.;:]*"  # no line ends inside
    return re.sub(kept, r'<span class="kept">\g<0></span>', parts + prose(text[at:]))


# ---------------------------------------------------------------------------------------------------------- docstrings
SOURCE = re.compile(r"\([^()]*[A-Za-z]{3}[^()]*\)[.,]?")  # behind an equation: where it is from


def is_equation(text):
    """Whether a text has a sign of relation, and at most three words that are no names of functions."""
    words = set(re.findall(r"(?<![\w^])[^\W\d_]{2,}", text)) - FUNCTIONS - {*GREEK, *LIMITS, "terminated"}
    return len(words) <= 3 and bool(re.search(r"\S (=|<-|←|~|<=) \S", text))


def table(lines):
    """Aligned lines as a table: its columns are where all of them have two spaces. Else they stay as they are."""
    width = max(map(len, lines))
    blank = "".join(" x"[all(line[c : c + 1].strip() == "" for line in lines)] for c in range(width))
    starts = [match.end() for match in re.finditer(r"^x*|xx+", blank)]
    rows = [[line[a:b].rstrip() for a, b in zip(starts, [*starts[1:], None])] for line in lines]
    staggered = any(re.match(r" {4,}\S", text) for row in rows for text in row[1:])
    if len(starts) < 2 or staggered or re.search("[─│┌└]", "".join(lines)):
        return tag("pre", escape("\n".join(lines), quote=False), class_="drawing", tabindex="0")
    head = "td" if re.search(r"\d", lines[0]) or not all(re.search(r"\d", line) for line in lines[1:]) else "th"
    cells = [[re.sub(" {2,}", " &emsp; ", inline(text.strip())) for text in row] for row in rows]
    body = (tag("tr", *(tag("td" if i else head, x) for x in row)) for i, row in enumerate(cells))
    return tag("div", tag("table", *body), class_="scroll", tabindex="0")


def indented(lines):
    """Indented lines: commands, equations or a table."""
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    lines = [line[margin:].rstrip() for line in lines]
    if re.match("python |torchrun |pip |uv ", lines[0]):
        commands = (line.partition("  #") for line in lines)
        rows = (tag("p", tag("code", escape(x.strip())), " ", tag("span", inline(y.strip()))) for x, _, y in commands)
        return tag("div", *rows, class_="shell")
    parts = [re.split(r"\s{3,}", line) for line in lines]
    if not all(is_equation(part[0]) for part in parts):
        return table(lines)
    out = ""
    for part in parts:
        source = part.pop().strip("()., ") if SOURCE.fullmatch(part[-1]) else ""
        formulas = (tag("div", formula(text.rstrip(",;")), tabindex="0") for text in part)
        out += tag("div", *formulas, source and tag("small", inline(source)), class_="eq")
    return out


def docstring(text, is_lesson=False):
    """A docstring as HTML. Aligned lines are a table; a paragraph of equations is set as such, but in lessons."""
    out = ""
    for block in filter(None, re.split(r"\n\s*\n", text.strip("\n"))):
        lines = block.split("\n")
        aligned = [bool(re.search(r"\S {2,}\S", line)) for line in lines]
        inside = [line.startswith("    ") for line in lines]
        if all(inside) or not is_lesson and all(is_equation(re.split(r"\s{3,}", line.strip())[0]) for line in lines):
            out += indented(lines)
            continue
        for is_apart, part in groupby(zip(map(max, aligned, inside), lines), lambda row: row[0]):
            rows = [line for _, line in part]
            if is_apart and all(row.startswith("    ") for row in rows):
                out += indented(rows)
            else:
                out += table(rows) if is_apart and len(rows) > 1 else tag("p", inline(" ".join(rows)))
    return out


def highlight(source, language="python", links=None):
    """The lines of a source as HTML; the names in `links` lead to their addresses, those of methods after a dot."""
    lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    markup = pygments.highlight(source, lexer, HtmlFormatter(nowrap=True)).replace('<span class="o">.</span>', ".")

    links = links or {}
    name = r'(\.?)<span class="n">([^<]*)</span>'
    linked = lambda m: m[1] + (tag("a", m[2], href=links[m[1] + m[2]]) if m[1] + m[2] in links else m[2])
    markup = re.sub(name, linked, markup)
    return re.sub(r'<span class="(?:[nopw])">([^<]*)</span>', r"\1", markup).split("\n")
