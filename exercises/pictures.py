"""A failed case as a table: the values of a grid world as its grid, what a buffer holds as its rows."""

from dataclasses import dataclass

from mechanism import close, short


@dataclass
class Table:
    """How an answer is drawn: as a grid of so many columns, or, with titles, as rows of a buffer."""

    columns: int = 0
    titles: tuple = ()
    part: int | None = None  # of the answer; None: all of it

    def cells(self, answer):
        """The answer as rows of numbers. ValueError if it has not this form."""
        try:
            numbers = answer if self.part is None else answer[self.part]
            if self.titles:
                rows = [[slot, *row] for slot, row in enumerate(numbers)]
            else:
                rows = [numbers[i : i + self.columns] for i in range(0, len(numbers), self.columns)]
            text = [[short(x) for x in row] for row in rows]
        except (TypeError, IndexError, KeyError):
            raise ValueError("no table") from None
        if not rows or len({len(row) for row in rows}) > 1:
            raise ValueError("no table")
        return rows, text

    def both(self, yours, expected):
        """(cells, where they are wrong) of the two tables; ValueError if they cannot be compared."""
        (mine, text), (right, right_text) = self.cells(yours), self.cells(expected)
        if len(mine) != len(right) or len(mine[0]) != len(right[0]):
            raise ValueError("not alike")
        wrong = [[not close(x, y) for x, y in zip(*rows)] for rows in zip(mine, right)]
        return text, right_text, wrong

    def text(self, yours, expected):
        """Both tables side by side, where a * marks what is wrong; empty if they cannot be drawn."""
        try:
            mine, right, wrong = self.both(yours, expected)
        except ValueError:
            return ""
        mine = [[x + "*" * bad for x, bad in zip(*row)] for row in zip(mine, wrong)]
        tables = [[["slot", *self.titles], *cells] if self.titles else cells for cells in (mine, right)]
        width = max(len(x) for table in tables for row in table for x in row) + 1
        lines = [
            "".join(x.rjust(width) for x in a) + "  |" + "".join(x.rjust(width) for x in b) for a, b in zip(*tables)
        ]
        return "\n".join(["yours, where * is wrong".ljust(width * len(tables[0][0])) + "  | expected", *lines])

    def save(self, path, yours, expected):
        """Write the tables as a PNG, what is wrong in red. Returns whether they can be drawn."""
        try:
            mine, right, wrong = self.both(yours, expected)
        except ValueError:
            return False
        from matplotlib.figure import Figure  # slow to import

        figure = Figure(figsize=(0.9 * len(mine[0]) * 2 + 0.5, 0.4 * len(mine) + 0.8), layout="constrained")
        colors = [["mistyrose" if bad else "white" for bad in row] for row in wrong]
        for axes, title, cells in zip(figure.subplots(1, 2), ("yours", "expected"), (mine, right)):
            titles = ["slot", *self.titles] if self.titles else None
            axes.table(cells, cellColours=colors, colLabels=titles, cellLoc="center", loc="center").scale(1, 1.6)
            axes.set_title(title)
            axes.axis("off")
        figure.savefig(path, dpi=100)
        return True


def drawn(table, call):
    """The call, with how its answer is drawn."""
    call.table = table
    return call


def parts(call, **looks):
    """The call, which returns so many parts: names them, and says for each where to look if it is the first wrong."""
    call.parts = looks
    return call
