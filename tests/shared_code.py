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
EARLIER_EXEMPT = EXEMPT | {"main"}  # in scripts that do not have their new form yet
RUN = "# ===== run"


def scripts(root=ROOT):
    """The paths of all algorithms in the repository's root, by name; ppo.py, which the others repeat, comes first."""
    paths = [path for path in Path(root).glob("*.py") if path.name not in NO_ALGORITHM]
    return sorted(paths, key=lambda path: (path.name != "ppo.py", path.name))


def run_section(path):
    """(line number from 0 up, text) of the section that all scripts share, or None in one of the earlier form."""
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if line.startswith(RUN):
            return number, "\n".join(lines[number:])
    return None


def definitions(path):
    """{name: (first line, last line)} of the top-level functions and classes above the run section, with decorators.

    Lines count from 0 up.
    """
    section = run_section(path)
    exempt = EXEMPT if section else EARLIER_EXEMPT
    spans = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name not in exempt:
            if node.name in spans:
                raise ValueError(f"{path.name} defines {node.name} twice")
            if section is None or node.lineno <= section[0]:
                first = min([node, *node.decorator_list], key=lambda n: n.lineno).lineno - 1
                spans[node.name] = first, node.end_lineno
    return spans


def sources(path):
    """{name: source lines} of the top-level functions and classes, and of the run section under its first words."""
    lines = path.read_text(encoding="utf-8").split("\n")
    found = {name: lines[first:last] for name, (first, last) in definitions(path).items()}
    section = run_section(path)
    return found | ({RUN: section[1].split("\n")} if section else {})


def problems(root=ROOT):
    """[(name, unified diff)] for every name whose source in some script differs from that in the first to have it.

    Scripts that have the run section are compared with each other, and those of the earlier form with each other.
    """
    found = []
    first = {}
    for path in scripts(root):
        new_form = run_section(path) is not None
        for name, lines in sources(path).items():
            where, original = first.setdefault((new_form, name), (path.name, lines))
            if lines != original:
                found.append((name, "\n".join(difflib.unified_diff(original, lines, where, path.name, lineterm=""))))
    return found


def copy_from(source, root=ROOT):
    """Write the version of `source` (a script's file name) over those of all others. Returns what changed, as lines."""
    originals = sources(Path(root, source))
    changes = []
    for path in scripts(root):
        if path.name == source or (run_section(path) is None) != (RUN not in originals):
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        spans = definitions(path)
        if RUN in originals:
            spans[RUN] = run_section(path)[0], len(lines)
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
