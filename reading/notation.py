"""Docstrings as HTML: what is plain text in the scripts, A_t = delta_t + gamma A_{t+1}, looks as in a book.

Variables in sentences become MathML, and so do equations on lines of their own, with their source in brackets after
three spaces. Lines whose columns are parted by two spaces or more become tables. A slash is a fraction between two
single operands: a / (b c). Names of Python stand in backticks.
"""

import re
import unicodedata
from html import escape
from itertools import groupby, zip_longest

import pygments
from latex2mathml.converter import convert
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

LATIN = "alpha|beta|gamma|delta|epsilon|eps|theta|lambda|mu|pi|rho|sigma|tau|phi|Phi"
GREEK = dict(zip(LATIN.split("|"), "αβγδεεθλμπρστφΦ"))
COMMANDS = {"sum": r"\sum ", "argmax": r"\text{arg max}", "sqrt": r"\surd "}
COMMANDS |= {"<-": r"\leftarrow ", "->": r"\to ", "<=": r"\leq ", ">=": r"\geq "}
COMMANDS |= {"||": r"\| ", "*": r"\cdot ", "~": r"\sim "}
SAME = {"'": "′", "−": "-", "·": "*", "Σ": "sum", "×": r"\times ", "←": "<-", "≤": "<=", "…": r"\dots "}
SIGNS = {"<-": "←", "->": "→", "<=": "≤", ">=": "≥", "||": "∥", "-": "−", "*": "·", "x": "×", "sqrt": "√"}
NAMES = "log exp clip mean std tanh softmax sign Var KL Huber sqrt sum min max argmax terminated".split()
INSIDE = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"  # of brackets, with up to two more pairs
INDICES = r"(?:[_^](?:\w+|\{[^}]*\})|′)*"
OPERAND = rf"(?:\d+(?:\.\d+)?|[^\W\d]\w*{INDICES}(?:\({INSIDE}\))?|\({INSIDE}\)(?:\^\w)?)"
ADDRESSES = {"arxiv": "https://arxiv.org/abs/", "doi": "https://doi.org/"}
LINKS = {}  # {name of a function: address in the page}: code in a sentence that names it is a link


def tag(name, *inner, **attributes):
    """An HTML element."""
    given = "".join(f' {key.strip("_")}="{value}"' for key, value in attributes.items())
    return f"<{name}{given}>{''.join(inner)}</{name}>"


# ----------------------------------------------------------------------------------------- formulas
def latex(text, is_inline):
    """A formula in plain text as LaTeX."""
    text = re.sub("|".join(map(re.escape, SAME)), lambda match: SAME[match[0]], text)
    bare = lambda x: x if "," in x else re.sub(rf"^\(({INSIDE})\)$", r"\1", x)  # a vector keeps its brackets
    fraction = lambda match: rf"{match[1]}\frac{{{bare(match[2])}}}{{{bare(match[3])}}}"
    text = re.sub(rf"(^|[-=,+([~] ?)({OPERAND}) ?/ ?({OPERAND})", fraction, text)
    text = re.sub(r"\b1e-(\d)", r"10^{-\1}", text)
    text = re.sub(r"\b([A-Za-z])(\d)", r"\1_\2", text)  # s0
    text = re.sub(r"(?<=[\w′}])\^?\*", r"^\\ast ", text)  # a*
    text = re.sub(r"([_^])(?:\(([^()]*)\)|(-?[^\W_]+(?:,\w)?[′⁺]*))", r"\1{\2\3}", text)  # pi_old
    text = re.sub(r"(^|[=,([{] ?)-(?! )", r"\1−", text)  # the sign of a number has no space behind it
    if not is_inline:
        text = re.sub(r"\b(sum|min|max|argmax)_\{([^}]*)\}", r"\\,\\underset{\2}{\1}\\,", text)
    sign = lambda word: COMMANDS.get(word) or GREEK.get(word)
    name = lambda match: rf"{match[1]}\text{{{match[2]}}}{match[3]}".replace(" ", r"\,")
    words = r"((?:(?<=[\w)\]}′]) )?)(?<![\\a-zA-Z])([A-Za-z]{2,}|<-|->|<=|>=|\|\||[*~])((?: (?![A-Za-z]{2}))?)"
    return re.sub(words, lambda match: sign(match[2]) or name(match), text)


def mathml(text, is_inline):
    """A formula in plain text as MathML."""
    style = "" if is_inline else ' displaystyle="true"'
    return re.sub("^<math.*?>", f"<math{style}>", convert(latex(text, is_inline)))


# ------------------------------------------------------------------------------------- in sentences
LETTER = rf"(?:{LATIN}|[A-Za-z])(?![A-Za-z])|[α-ωΑ-Ω]|(?:sum|min|max|argmax)(?=_)|log(?=_\d)"
INDEX = r"['′](?![^\W_])|\d(?!\d)|\*(?![\w(]| [\d(])"
INDEX += r"|[_^](?:\{[^}]*\}|\([^()]*\)|[-−]?[^\W\d_]+(?:,\w)?|\d+|[-+*])"
KINDS = {
    "code": r"`[^`]+`|(?<![\w-])--[a-z][\w-]*|\b\w+\.(?:py|md|csv|json|pt)\b",
    "many": r"\b\w+(?:_[a-z]{2,}){2,}",  # max_episode_steps
    "name": rf"(?!(?:{LATIN})_|(?:sum|min|max|argmax)_(?:\w\b|\{{)|log_\d)[A-Za-z]{{2,}}(?:_\w+)+(?:\.\w+)*",
    "arxiv": r"(?<![\w.])\d{4}\.\d{4,5}",
    "doi": r"doi 10\.\S+\w",
    "hyphen": r"[A-Za-z]+(?:-[A-Za-z]{2,})+|\b[A-Za-z][.&][A-Za-z]\b|(?<=\d )M\b",  # e.g, S&B, 1 M
    "genitive": rf"(?:\b(?!(?:{LATIN})\b)[^\W_]+|(?<=\w))['’]s\b",
    "sign": r"<-|->|<=|>=|\|\||(?<= )\*(?= )|\bsqrt\b",
    "times": r"(?<=[\d)\]] )x(?= [\w([-])|(?<=\w )x(?= \d)",
    "minus": r"(?:^|(?<=[\s([]))-(?=[\s\w(])",
    "power": r"(?<=[)\]\w])\^-?[\w*]+",  # (r - 1)^2
    "index": r"(?<=[)\]])_\w+",
    "formula": rf"(?<![\w^'’])(?<!\w[-+])(?:{LETTER})(?!\d[A-Za-z\d])(?:{INDEX})*",  # r, A_t, theta^-
}
INLINE = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in KINDS.items()))
WORDS = "of in is are to and or for from by that with as over has at".replace(" ", "|")
BEHIND_A = rf"[,.;:)\]|=(*/]| ([-+=*/<>|]|({WORDS})\b)"  # a variable


def is_article(match):
    """Whether a match of INLINE is the word "a", or "I", and no variable."""
    before, after = match.string[: match.start()], match.string[match.end() :]
    if match[0] not in ("a", "A"):
        return match[0] == "I"
    is_variable = re.match(BEHIND_A, after) or re.search(r"([-+=|]|action) ?$", before)
    return bool(before + after) and not is_variable


def code_word(name):
    """Code in a sentence."""
    hyphenated = r"(?<!\S)\S{0,12}-\S{1,24}(?!\S)"  # no line ends inside
    markup = tag("code", re.sub(hyphenated, r'<span class="kept">\g<0></span>', escape(name, quote=False)))
    return tag("a", markup, href=LINKS[name]) if name in LINKS else markup


def marked(match):
    """The HTML of one match of INLINE."""
    kind, word = match.lastgroup, match[0]
    if kind in ("code", "many", "name"):
        return code_word(word.strip("`"))
    if kind in ADDRESSES:
        return tag("a", word, href=ADDRESSES[kind] + word.removeprefix("doi "))
    if kind in ("hyphen", "genitive") or is_article(match):
        return escape(word, quote=False)
    if kind in ("power", "index"):
        return tag("sup" if kind == "power" else "sub", inline(word[1:]))
    return SIGNS[word] if kind in ("sign", "times", "minus") else mathml(word, True)


def small_sign(match):
    """A raised or lowered sign of Unicode, such as ², as ^2 or _2."""
    kind, code = unicodedata.decomposition(match[0][-1]).split()
    return ("^" if kind == "<super>" else "_") + "-" * ("⁻" in match[0]) + chr(int(code, 16))


def inline(text):
    """A sentence as HTML: code, links to papers, and variables, as far as they look like it."""
    text = re.sub("⁻?[¹²³⁰-⁹ⁿⁱ₀-₉ₖᵢ]", small_sign, text)
    parts, at = "", 0
    for match in INLINE.finditer(text):
        parts += escape(text[at : match.start()], quote=False) + marked(match)
        at = match.end()
    kept = r"[([|]*<math(?:(?!</math>).)*</math>[])|,.;:]*"  # no line ends inside
    return re.sub(kept, r'<span class="kept">\g<0></span>', parts + escape(text[at:], quote=False))


def instructions(sentences):
    """What an exercise asks for, as HTML: there names of Python have no backticks."""
    names = r"`[^`]+`|\b(?:epsilon_\w\w+|[A-Za-z]{2,}\w*(?:\.\w+)+)"
    return inline(re.sub(names, lambda match: f"`{match[0].strip('`')}`", " ".join(sentences)))


def unlinked(markup):
    """HTML without its links, to stand in one itself."""
    return re.sub("</?a[^>]*>", "", markup)


# --------------------------------------------------------------------------------------- docstrings
SOURCE = re.compile(r"\([^()]*(?:[A-Za-z]{3}|eq\.)[^()]*\)[.,]?")  # behind an equation: where it is from


def is_equation(text):
    """Whether a text has a sign of relation, and at most three words that are no names."""
    words = {*re.findall(r"(?<![\w^])[^\W\d_]{2,}", text)} - {*NAMES, *GREEK}
    return len(words) <= 3 and bool(re.search(r"\S (=|<-|←|~|<=) \S", text))


def table(lines):
    """Aligned lines as a table, whose columns are where all lines have two spaces; others as they are."""
    blank = ["".join(column).isspace() for column in zip_longest(*lines, fillvalue=" ")]
    blank = "".join("x" if is_blank else " " for is_blank in blank)
    starts = [match.end() for match in re.finditer(r"^x*|xx+", blank)]
    rows = [[line[a:b].rstrip() for a, b in zip(starts, [*starts[1:], None])] for line in lines]
    staggered = any(re.match(r" {4,}\S", text) for row in rows for text in row[1:])
    if len(starts) < 2 or staggered or re.search("[─│┌└]", "".join(lines)):
        return tag("pre", escape("\n".join(lines), quote=False), class_="drawing", tabindex="0")
    has_digits = [bool(re.search(r"\d", line)) for line in lines]
    head = "th" if all(has_digits[1:]) and not has_digits[0] else "td"
    cells = [[re.sub(" {2,}", " &emsp; ", inline(text.strip())) for text in row] for row in rows]
    body = (tag("tr", *(tag("td" if i else head, x) for x in row)) for i, row in enumerate(cells))
    return tag("div", tag("table", *body), class_="scroll", tabindex="0")


def indented(lines):
    """Indented lines: commands, equations or a table."""
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    lines = [line[margin:].rstrip() for line in lines]
    if re.match("python |torchrun |pip |uv ", lines[0]):
        return tag("pre", "\n".join(highlight("\n".join([*lines, ""]), "sh")), tabindex="0")
    parts = [re.split(r"\s{3,}", line) for line in lines]
    if not all(is_equation(part[0]) for part in parts):
        return table(lines)
    out = ""
    for part in parts:
        source = part.pop().strip("()., ") if SOURCE.fullmatch(part[-1]) else ""
        formulas = (tag("div", mathml(text.rstrip(",;"), False), tabindex="0") for text in part)
        out += tag("div", *formulas, source and tag("small", inline(source)), class_="eq")
    return out


def docstring(text, is_lesson=False):
    """A docstring as HTML. Aligned lines are a table; a paragraph of equations is set so, but in lessons."""
    out = ""
    for block in filter(None, re.split(r"\n\s*\n", text.strip("\n"))):
        lines = block.split("\n")
        first_columns = [re.split(r"\s{3,}", line.strip())[0] for line in lines]
        if all(map(is_equation, first_columns)) and not is_lesson:
            out += indented(lines)
            continue
        for is_apart, part in groupby(lines, lambda line: bool(re.match(r" {4}|.*\S {2,}\S", line))):
            rows = list(part)
            if is_apart and all(row.startswith("    ") for row in rows):
                out += indented(rows)
            else:
                out += table(rows) if is_apart and len(rows) > 1 else tag("p", inline(" ".join(rows)))
    return out


def highlight(source, language="python", links=None):
    """The lines of a source as HTML. Names in `links` are links; those of methods stand there with a dot."""
    lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
    markup = pygments.highlight(source, lexer, HtmlFormatter(nowrap=True))
    markup = markup.replace('<span class="o">.</span>', ".")

    def linked(match):
        dot, name = match.groups()
        return dot + (tag("a", name, href=links[dot + name]) if dot + name in links else name)

    markup = re.sub(r'(\.?)<span class="n">([^<]*)</span>', linked if links else r"\1\2", markup)
    return re.sub(r'<span class="(?:[nopwm]|nb|nn|bp|fm|vm|ne|nv|se)">([^<]*)</span>', r"\1", markup).split("\n")
