"""Make the zip that Gradescope runs: release.py --gradescope. It holds the originals, so it is for teachers only.

Gradescope unpacks it into /autograder/source and runs setup.sh once; then, for each upload (in /autograder/submission),
run_autograder, which has to write /autograder/results/results.json.
"""

import zipfile
from pathlib import Path

from forms import BadInput
from release import by_script, requirements
from start import ROOT

HERE = Path(__file__).resolve().parent
FOR_NOBODY = {"__pycache__", "sheets", "teachers"}  # folders of exercises/ that a grader does not need

SETUP = """#!/usr/bin/env bash
# Once, when Gradescope builds the image: a Python that the students' processes, of another user, may run as well.
set -euo pipefail
cd "$(dirname "$0")"
export UV_PYTHON_INSTALL_DIR=/opt/python DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/install.sh | env UV_INSTALL_DIR=/usr/local/bin sh
uv venv --python 3.12 /opt/grader
uv pip install --python /opt/grader/bin/python --torch-backend cpu -r requirements.txt
"""
RUN = """#!/usr/bin/env bash
# For each upload. Of it nothing is copied or run but {scripts}, by check.py, in processes of their own.
SOURCE="${{SOURCE:-/autograder/source}}"  # where this zip was unpacked; submission and results lie beside it
PYTHON="${{PYTHON:-/opt/grader/bin/python}}"
cd "$SOURCE" || exit 1
rm -f ../results/results.json
chmod -R go= exercises *.py  # expected numbers and originals: not for the user whom a student's file runs as
chmod go-w . ../results
# {seconds} seconds are less than Gradescope's own limit, after which there would be no results at all. Here they are
# written after each step; what was not reached has no points.
timeout --kill-after=5 {seconds} "$PYTHON" -B exercises/check.py {names} --up-to {up_to} \\
    --work ../submission --json ../results/results.json
if [ $? -eq 124 ]; then
    sed -i '1s/{{/{{ "output": "After {seconds} seconds the time was up: what is missing here was not reached.",/' \\
        ../results/results.json
fi
test -f ../results/results.json  # wrong answers are no error: only if there are no results at all, the grader failed
"""


def write_zip(chosen, out, up_to=3, minutes=10):
    """Write the zip that grades these exercises and hunts. `minutes` is the limit set at Gradescope. Returns its Path.

    BadInput if there is a file already, or if one upload cannot hold them all.
    """
    scripts, out = by_script(chosen), Path(out)
    if out.exists():
        raise BadInput(f"{out} is there already: remove it, or choose another --out")
    names = " ".join(task.name for task in chosen)
    files = ", ".join(Path(script).name for script in scripts)
    run = RUN.format(scripts=files, names=names, up_to=up_to, seconds=60 * minutes - 30)
    texts = {"setup.sh": SETUP, "run_autograder": run, "requirements.txt": requirements(scripts)}
    grader = [path for path in HERE.rglob("*") if path.is_file() and not FOR_NOBODY & {*path.relative_to(HERE).parts}]
    demos = [path for path in (ROOT / "demos").rglob("*.npz") if "ppod.py" in scripts]
    out.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o644 if name == "requirements.txt" else 0o755) << 16  # who may run it
            archive.writestr(entry, text)
        for path in sorted({*grader, *demos, *(ROOT / script for script in scripts)}):
            archive.write(path, path.relative_to(ROOT))
    return out
