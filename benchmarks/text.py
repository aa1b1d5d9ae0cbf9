"""A hash of what a script computes, which stays the same while only its words change."""

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENTRIES = "train", "make_envs", "make_agent", "tuned_settings"  # where the run section enters what stands above it
NAMED = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name", ast.ExceptHandler: "name"}  # and where the name is
ALWAYS = {"total_timesteps", "stop_at_return"}  # settings that only the run section reads


def text_of(script, env_id=None):
    """A hash of what the code above a script's run section does, as far as its entries reach.

    These count: constants, names of attributes, methods and settings, and everything that is done. These do not: other
    names, the order of definitions, docstrings, what is printed, refusals and their messages, settings that this code
    does not read, defaults that TUNED overrides, what only Atari meets, and, with env_id, TUNED of other environments.
    """
    story = Story(Path(ROOT, script).read_text(encoding="utf-8").split("# ===== run")[0])
    for name in ENTRIES:
        story.reach(name)
    settings = {name: value for name, value in story.args.items() if name in story.attributes | ALWAYS}
    settings |= story.settings(story.tuned[env_id]) if env_id in story.tuned else {}
    settings |= story.tuned if env_id is None else {}
    settings = [(name, story.code(value)) for name, value in sorted(settings.items())]
    return hashlib.sha256(repr([settings, story.parts]).encode()).hexdigest()[:12]


def lengths_of(script, env_id):
    """How long a script trains in an environment, as its settings say."""
    story = Story(Path(ROOT, script).read_text(encoding="utf-8").split("# ===== run")[0])
    settings = story.args | (story.settings(story.tuned[env_id]) if env_id in story.tuned else {})
    return [ast.unparse(settings[name]) for name in sorted(ALWAYS)]


class Plain(ast.NodeTransformer):
    """Takes out what computes nothing, or only in Atari's games: docstrings, what is printed, refusals, messages."""

    def visit_Expr(self, node):
        printed = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "print"
        return None if printed or isinstance(node.value, ast.Constant) else node

    def visit_Assign(self, node):
        return None if ast.unparse(node.targets[0]).startswith("torch.backends.cudnn") else node  # GPUs only

    def visit_Raise(self, node):
        return ast.Raise()

    def visit_If(self, node):
        self.generic_visit(node)
        only_speaks = not node.body or isinstance(node.body[-1], ast.Raise)
        is_ataris = ast.unparse(node.test) == "package == 'ale_py'"
        return None if (only_speaks or is_ataris) and not node.orelse else node

    def visit_For(self, node):
        self.generic_visit(node)
        return node if node.body else None  # it only refused

    def visit_Try(self, node):
        self.generic_visit(node)
        only_refuses = all(isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)
        return node.body + node.orelse + node.finalbody if only_refuses else node


class Story:
    """The definitions of a script; in `parts` the code of those that were reached, numbers in place of chosen names."""

    def __init__(self, source):
        self.definitions, self.imported, self.places = {}, {}, {}  # places of arguments, for each function
        self.numbers, self.attributes, self.parts = {}, set(), []  # of what was reached
        tree = Plain().visit(ast.parse(source))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                package = getattr(node, "module", "")
                self.imported |= {alias.asname or alias.name: f"{package}.{alias.name}" for alias in node.names}
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef):
                    name = node.name if child.name == "__init__" else child.name
                    arguments = enumerate(child.args.args + child.args.kwonlyargs)
                    self.places.setdefault(name, {}).update((child.arg, str(place)) for place, child in arguments)
        for node in tree.body:
            for target in getattr(node, "targets", None) or [getattr(node, "target", node)]:
                self.definitions.setdefault(getattr(target, "id", getattr(node, "name", None)), []).append(node)
        fields = self.definitions.pop("Args")[0].body
        self.args = {field.target.id: field.value for field in fields}
        self.tuned = self.settings(self.definitions.pop("TUNED")[0].value) if "TUNED" in self.definitions else {}

    def settings(self, node):
        """{key: value} of a dict in TUNED: one that is written there, one that has a name, or the union of two."""
        if isinstance(node, ast.BinOp):
            return self.settings(node.left) | self.settings(node.right)
        if isinstance(node, ast.Name):
            return self.settings(self.definitions[node.id][0].value)
        return {key.value: value for key, value in zip(node.keys, node.values)}

    def reach(self, name):
        """The number of a definition. The first time, its code becomes one of the parts."""
        if name not in self.numbers:
            self.numbers[name] = f"definition {len(self.numbers)}"
            self.parts.append([self.code(node) for node in self.definitions.get(name, [])])
        return self.numbers[name]

    def code(self, node):
        """A definition or a value as text; of a class a list, in which methods and attributes keep their names."""
        if isinstance(node, ast.ClassDef):
            members = [*node.bases, *sorted(node.body, key=lambda member: getattr(member, "name", ""))]
            return [(getattr(member, "name", ""), self.code(member)) for member in members]
        inside = [child for child in ast.walk(node) if type(child) in NAMED]
        local = {}  # names that are bound here, and their numbers
        for child in inside:
            if not isinstance(getattr(child, "ctx", None), ast.Load):
                local.setdefault(getattr(child, NAMED[type(child)]), f"local {len(local)}")
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute):
                self.attributes.add(child.attr)
            if isinstance(child, ast.Call):
                places = self.places.get(getattr(child.func, "attr", getattr(child.func, "id", None)), {})
                for keyword in child.keywords:
                    keyword.arg = places.get(keyword.arg, keyword.arg)
        for child in inside:
            name = getattr(child, NAMED[type(child)])
            if name in local:
                name = local[name]
            elif name in self.definitions:
                name = self.reach(name)
            setattr(child, NAMED[type(child)], self.imported.get(name, name))
        return ast.unparse(node)
