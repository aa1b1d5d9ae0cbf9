"""Same name, same code: a function or class that stands in two scripts has the same source in both; so has the section
that begins with `# ===== run`, to the last byte.

python tests/shared_code.py                  # print what differs; exit code 1 if anything does
python tests/shared_code.py --from ppo.py    # write ppo.py's version of all that is shared into the other scripts
"""

import argparse
import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_ALGORITHM = {"compare.py"}  # it draws what the others have left behind
EXEMPT = {"Args", "train"}  # these are what a script is about; all else that differs has another name
RUN = "# ===== run"


def scripts(root=ROOT):
    """The paths of all algorithms in the repository's root, by name; ppo.py, which the others repeat, comes first."""
    paths = [path for path in Path(root).glob("*.py") if path.name not in NO_ALGORITHM]
    return sorted(paths, key=lambda path: (path.name != "ppo.py", path.name))


def run_section(path):
    """The lines (first, end), from 0 up, of the section that all scripts share; (end, end) where there is none."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if line.startswith(RUN):
            return number, len(lines)
    return len(lines), len(lines)


def definitions(path):
    """{name: (first line, last line)} of the top-level functions and classes above the run section, with decorators.

    Lines count from 0 up.
    """
    story_end, _ = run_section(path)
    spans = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name not in EXEMPT:
            if node.name in spans:
                raise ValueError(f"{path.name} defines {node.name} twice")
            if node.lineno <= story_end:
                first = min([node, *node.decorator_list], key=lambda n: n.lineno).lineno - 1
                spans[node.name] = first, node.end_lineno
    return spans


def sources(path):
    """{name: source lines} of the top-level functions and classes, and of the run section under its first words."""
    lines = path.read_text(encoding="utf-8").split("\n")
    found = {name: lines[first:last] for name, (first, last) in definitions(path).items()}
    first, end = run_section(path)
    return found | ({RUN: lines[first:end]} if first < end else {})


def problems(root=ROOT):
    """[(name, unified diff)] for every name whose source in some script differs from that in the first to have it."""
    found = []
    first = {}
    for path in scripts(root):
        for name, lines in sources(path).items():
            where, original = first.setdefault(name, (path.name, lines))
            if lines != original:
                found.append((name, "\n".join(difflib.unified_diff(original, lines, where, path.name, lineterm=""))))
    return found


def copy_from(source, root=ROOT):
    """Write the version of `source` (a script's file name) over those of all others. Returns what changed, as lines."""
    originals = sources(Path(root, source))
    changes = []
    for path in scripts(root):
        if path.name == source:
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        spans = definitions(path)
        spans[RUN] = run_section(path)
        for name, (begin, end) in sorted(spans.items(), key=lambda item: -item[1][0]):  # upwards: spans above stay
            if name in originals and lines[begin:end] != originals[name]:
                lines[begin:end] = originals[name]
                changes.append(f"{path.name}: {name} replaced by that of {source}")
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
