"""Every command of the experiment sheets is one that its script accepts: flags, values, environments. Nothing is trained.

Sheets are Markdown; their commands stand in blocks ```sh, with loops over seeds and settings, which are played here.
"""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
for folder in (ROOT, ROOT / "exercises"):
    sys.path.insert(0, str(folder))

SHEETS = sorted((ROOT / "exercises" / "sheets").glob("week-*.md"))
TEACHERS = ROOT / "exercises" / "teachers"
every_sheet = pytest.mark.parametrize("sheet", SHEETS, ids=lambda path: path.stem)


def commands(text):
    """All commands of a sheet, lists of words, in the order in which a shell would run them."""
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line.strip() for block in blocks for line in re.sub(r"\\\n", " ", block).splitlines() if line.strip()]
    return played(lines, {})


def played(lines, names):
    """What a shell would run: loops (`for x in a b; do` … `done`), assignments (x="…") and $x are understood."""
    found, i = [], 0
    while i < len(lines):
        line = lines[i]
        i += 1
        if loop := re.fullmatch(r"for (\w+) in (.*); do", line):
            depth, start = 1, i
            while depth:
                depth += lines[i].startswith("for ") - (lines[i] == "done")
                i += 1
            for value in loop[2].split():
                found += played(lines[start : i - 1], names | {loop[1]: value})
        else:
            line = re.sub(r"\$(\w+)", lambda match: names[match[1]], line)
            if assignment := re.fullmatch(r'(\w+)="(.*)"', line):
                names = names | {assignment[1]: assignment[2]}
            else:
                found.append(shlex.split(line))
    return found
