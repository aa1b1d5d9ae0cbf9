"""Docstrings as HTML: what is plain text in the scripts, A_t = delta_t + gamma lambda A_{t+1}, looks as in a book.

Variables in sentences become MathML, and so do equations that stand on lines of their own, their source in brackets
after three spaces. Lines whose columns are parted by two spaces or more become tables. A slash is a fraction between
two single operands: a / (b c). Names of Python stand in backticks.
"""

import re
from html import escape
from itertools import groupby

import pygments
from latex2mathml.converter import convert
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

LATIN = "alpha|beta|gamma|delta|epsilon|eps|theta|lambda|mu|pi|rho|sigma|tau|phi|Phi"
GREEK = dict(zip(LATIN.split("|"), "αβγδεεθλμπρστφΦ"))
COMMANDS = {"sum": r"\sum ", "argmax": r"\text{arg max}", "sqrt": r"\surd ", "<-": r"\leftarrow ", "->": r"\to "}
COMMANDS |= {"<=": r"\leq ", ">=": r"\geq ", "||": r"\| ", "*": r"\cdot ", "~": r"\sim "}
SAME = {"'": "′", "−": "-", "·": "*", "Σ": "sum", "×": r"\times ", "←": "<-", "≤": "<=", "…": r"\dots "}
SIGNS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "||": "∥", "-": "−", "*": "·", "x": "×", "sqrt": "√"}
FUNCTIONS = {"log", "exp", "clip", "mean", "std", "tanh", "softmax", "sign", "Var", "KL", "Huber", "sqrt"}
INSIDE = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"  # of brackets, with up to two more pairs inside each other
OPERAND = rf"(?:\d+|[^\W\d]\w*(?:[_^](?:\w+|\{{[^}}]*\}})|′)*(?:\({INSIDE}\))?|\({INSIDE}\)(?:\^\w)?)"
ARXIV = "https://arxiv.org/abs/"
LINKS = {}  # {name of a function: address in the page}: code in a sentence that names it is a link


def tag(name, *inner, **attributes):
    """An HTML element."""
    given = "".join(f' {key.strip("_")}="{value}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(inner)}</{name}>"


# ------------------------------------------------------------------------------------------------------ formulas
def single(operand):
    """An operand of a fraction without its brackets."""
    return re.sub(rf"^\(({INSIDE})\)$", r"\1", operand)


def latex(text, is_inline):
    """A formula in plain text as LaTeX."""
    text = re.sub("|".join(map(re.escape, SAME)), lambda match: SAME[match[0]], text)
    fraction = lambda match: rf"{match[1]}\frac{{{single(match[2])}}}{{{single(match[3])}}}"
    text = re.sub(rf"(^|[-=,+([~] ?)({OPERAND}) ?/ ?({OPERAND})", fraction, text)
    text = re.sub(r"\b([A-Za-z])(\d)", r"\1_\2", text)  # s0
    text = re.sub(r"(?<=[\w′}])\^?\*", r"^\\ast ", text)  # a*
    text = re.sub(r"([_^])(?:\(([^()]*)\)|([^\W_]+(?:,\w)?))", r"\1{\2\3}", text)  # an index is what stands together
    text = re.sub(r"(^|[=,([{] ?)-(?! )", r"\1−", text)  # a minus before a single operand needs no space
    if not is_inline:
        text = re.sub(r"\b(sum|min|max|argmax)_\{([^}]*)\}", r"\\,\\underset{\2}{\1}\\,", text)
    sign = lambda word: COMMANDS.get(word) or GREEK.get(word)
    word = lambda match: sign(match[2]) or rf"{match[1]}\text{{{match[2]}}}{match[3]}".replace(" ", r"\,")
    return re.sub(r"((?:(?<=[\w)}]) )?)(?<![\\a-zA-Z])([^\W\d_]{2,}|<-|->|<=|>=|\|\||[*~])( ?)", word, text)


def mathml(text, is_inline):
    """A formula in plain text as MathML."""
    markup = convert(latex(text, is_inline))
    return re.sub("^<math.*?>", tag("math", displaystyle=str(not is_inline).lower()).removesuffix("</math>"), markup)


def formula(text):
    """An equation as MathML; a long one may be broken before each relation, and before each term of a sum."""
    parts = []
    for part in re.split(r" (?=(?:[-=~+−←]|<-|<=) )|(?<=[,;]) ", text):
        is_open = parts and sum(map(parts[-1].count, "([{")) > sum(map(parts[-1].count, ")]}"))
        parts[-1:] = [f"{parts[-1]} {part}"] if is_open else [*parts[-1:], part]
    sign = re.compile("<mrow><mo>(?=&#x0(?:003D|002B|2212|2190|223C))")  # as between two terms
    return " ".join(sign.sub("<mrow><mo form='infix' lspace='0'>", mathml(part, False)) for part in parts)


# -------------------------------------------------------------------------------------------------------- in sentences
LETTER = rf"(?:{LATIN}|[A-Za-z])(?![A-Za-z])|[α-ωΑ-Ω]|(?:sum|min|max|argmax)(?=_)"
INDEX = r"['′](?!\w)|\d(?!\d)|\*(?![\w(]| [\d(])|[_^](?:\{[^}]*\}|\([^()]*\)|[^\W\d_]+(?:,\w)?|\d+|[-+*])"
KINDS = {
    "code": r"`[^`]+`|(?<![\w-])--[a-z][\w-]*|\b\w+\.(?:py|md|csv|json|pt)\b",
    "name": rf"\b\w+(?:_[a-z]{{2,}}){{2,}}|(?!(?:{LATIN}|sum|min|max|argmax)_)[A-Za-z]{{2,}}(?:_\w+)+(?:\.\w+)*",  # gae_lambda
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
    return SIGNS[word] if kind == "sign" else mathml(word, True)


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
    words = set(re.findall(r"(?<![\w^])[^\W\d_]{2,}", text)) - FUNCTIONS - {*GREEK, *COMMANDS, "min", "max", "terminated"}
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
