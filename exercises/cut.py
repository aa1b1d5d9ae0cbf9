"""Cut out of the tables of exercises and hunts what others may know: a handout, or the process of a student's code."""

import ast


def names_in(node):
    """All names that a piece of code refers to."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def names_bound(node):
    """The names that a top-level statement gives something to."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}


def entry(node):
    """The name in the table of a statement exercise("name", …), hunt("name", …) or pool("name", …), else None."""
    call = getattr(node, "value", None)
    if (
        isinstance(node, ast.Expr)
        and isinstance(call, ast.Call)
        and getattr(call.func, "id", "") in ("exercise", "hunt", "pool")
    ):
        return call.args[0].value
    return None


def source_with(tree, statements):
    """The source of a module with these statements and those of the tree that they refer to, without comments."""
    kept, wanted = list(statements), set().union(*map(names_in, statements), {"probes"} if statements else ())
    while new := [n for n in tree.body if n not in kept and entry(n) is None and names_bound(n) & wanted]:
        kept += new
        wanted |= set().union(*map(names_in, new))
    body = [node for node in tree.body if node in kept] + [node for node in statements if node not in tree.body]
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):  # those that are needed, of several on a line
            node.names = [a for a in node.names if (a.asname or a.name).split(".")[0] in wanted]
    return ast.unparse(ast.Module([ast.parse('"""What the checks look at."""').body[0], *body], [])) + "\n"


def cut_table(source, chosen):
    """The source of a table with the chosen entries only, and what they refer to; without plants and comments.

    Comments show how the expected numbers come about, plants where the bugs are: that is for teachers.
    """
    tree = ast.parse(source)
    entries = [node for node in tree.body if entry(node) in chosen]
    for node in entries:
        node.value.keywords = [keyword for keyword in node.value.keywords if keyword.arg not in ("plant", "plants")]
    return source_with(tree, entries)


def cut_calls(source, name, *others):
    """The source of a module with CALLS, which the cases of this entry make, and with these other functions.

    Nothing that is expected is in it, nor what is known of mistakes.
    """
    tree = ast.parse(source)
    (chosen,) = [node.value for node in tree.body if entry(node) == name]
    cases = [case for keyword in chosen.keywords if keyword.arg == "cases" for case in keyword.value.elts]
    # A case that several exercises share has a name of its own.
    shared = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            shared[node.targets[0].id] = node.value
    calls = [shared[case.id] if isinstance(case, ast.Name) else case for case in cases]
    calls = ast.List([case.args[1] for case in calls], ast.Load())
    statements = [ast.Assign([ast.Name("CALLS", ast.Store())], calls, lineno=0)]
    statements += [node for node in tree.body if names_bound(node) & {*others}]
    return source_with(tree, statements)
