"""Same name, same code: a function or class that stands in two scripts has the same source in both.

python tests/shared_code.py                  # print what differs; exit code 1 if anything does
python tests/shared_code.py --from ppo.py    # write ppo.py's version of every shared name into the other scripts
"""

import argparse
import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXEMPT = {"Args", "train", "main"}  # these are what a script is about; all else that differs has another name


def scripts(root=ROOT):
    """The paths of all scripts in the repository's root, by name; ppo.py, which the others repeat, comes first."""
    return sorted(Path(root).glob("*.py"), key=lambda path: (path.name != "ppo.py", path.name))


def definitions(path):
    """{name: (first line, last line)} of the top-level functions and classes, decorators included; lines from 0 up."""
    spans = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name not in EXEMPT:
            if node.name in spans:
                raise ValueError(f"{path.name} defines {node.name} twice")
            spans[node.name] = min([node, *node.decorator_list], key=lambda n: n.lineno).lineno - 1, node.end_lineno
    return spans


def sources(path):
    """{name: source lines} of the top-level functions and classes."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return {name: lines[first:last] for name, (first, last) in definitions(path).items()}


def problems(root=ROOT):
    """[(name, unified diff)] for every name whose source in some script differs from that in the first to have it."""
    found, first = [], {}
    for path in scripts(root):
        for name, lines in sources(path).items():
            where, original = first.setdefault(name, (path.name, lines))
            if lines != original:
                found.append((name, "\n".join(difflib.unified_diff(original, lines, where, path.name, lineterm=""))))
    return found


def copy_from(source, root=ROOT):
    """Write the version of `source` (a script's file name) over those of all others. Returns what changed, as lines."""
    originals, changes = sources(Path(root, source)), []
    for path in scripts(root):
        if path.name == source:
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        spans = definitions(path)
        for name, (begin, end) in sorted(spans.items(), key=lambda item: -item[1][0]):  # upwards: spans above stay
            if name in originals and lines[begin:end] != originals[name]:
                lines[begin:end] = originals[name]
                changes.append(f"{path.name}: {name} replaced by that of {source}")
        if lines != path.read_text(encoding="utf-8").split("\n"):
            path.write_text("\n".join(lines), encoding="utf-8")
    return changes


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", metavar="SCRIPT", help="whose version the other scripts get")
    source = parser.parse_args().source
    if source:
        if not Path(ROOT, source).is_file():
            parser.error(f"there is no script {source} in {ROOT}")
        print("\n".join(copy_from(source)) or "nothing to change")
    differing = problems()
    for name, diff in differing:
        print(f"\n{name} differs:\n{diff}")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
