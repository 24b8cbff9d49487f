"""Small changes to Python code that make it wrong in a way that a test should detect.

`mutants(source)` lists them. A change replaces one node of the syntax tree at its place in the text, so that the rest
of the text stays the same. Messages (f-strings, and arguments of errors, logging and printing), annotations, decorators
and docstrings are not changed, because they do not compute anything.
"""

import ast
import copy
import hashlib
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {  # functions and methods that are easily confused
    "min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "argmax": "argmin", "argmin": "argmax",
    "floor": "ceil", "ceil": "floor", "zeros": "ones", "ones": "zeros", "sum": "mean", "mean": "sum",
}  # fmt: skip
SILENT = {"debug", "info", "warning", "error", "print", "log"}  # calls that only produce text
SYMMETRIC = {"min", "max", "minimum", "maximum", "union1d"}  # the order of arguments does not matter
HARMLESS_KEYWORDS = {"strict"}  # of zip: it only ever raises


@dataclass(frozen=True)
class Mutant:
    """One changed version of a source."""

    function: str  # where: a dotted name, "" at the top of the module
    line: int
    operator: str  # what kind of change
    before: str  # the lines that change, on one line
    after: str
    source: str  # all of the changed code
    number: int  # among equal changes in the same function

    @property
    def id(self) -> str:
        """An identifier that stays the same as long as the changed lines do, whatever changes around the function."""
        text = repr((self.function, self.operator, self.before, self.after, self.number))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def mutants(source: str) -> list[Mutant]:
    """Return all distinct mutants of a source, in its order."""
    finder = _Finder()
    finder.visit(ast.parse(source))
    seen, numbers, found = {ast.dump(ast.parse(source))}, dict[tuple[str, ...], int](), []
    for function, node, operator, text in finder.changes:
        changed = _replaced(source, node, text)
        try:
            dump = ast.dump(ast.parse(changed))
        except SyntaxError:
            continue
        if dump in seen:
            continue
        seen.add(dump)
        before, after = _changed_lines(source, changed)
        number = numbers[key] = numbers.get(key := (function, operator, before, after), -1) + 1
        found.append(Mutant(function, node.lineno, operator, before, after, changed, number))
    return sorted(found, key=lambda mutant: mutant.line)


class _Finder(ast.NodeVisitor):
    """Collects (function, node, operator, new text of the node)."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, ast.expr | ast.stmt, str, str]] = []
        self._names: list[str] = []

    def _add(self, node: ast.expr | ast.stmt, operator: str, new: ast.AST | str) -> None:
        self.changes.append((".".join(self._names), node, operator, new if isinstance(new, str) else ast.unparse(new)))

    # Code that is not changed

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._names.append(node.name)
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "statement removed", "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call):
            if isinstance(call.func, ast.Attribute) and call.func.attr in SILENT:
                return
            self._add(node, "statement removed", "pass")
        self.generic_visit(node)

    # Statements

    def visit_Assign(self, node: ast.Assign) -> None:
        if not self._names and not isinstance(node.value, ast.Constant):
            return  # aliases of types, tables
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add(node, "statement removed", "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "statement removed", "pass")
        if new := ARITHMETIC.get(type(node.op)):
            self._add(node, "arithmetic", _with(node, op=new()))
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add(node, "statement removed", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "statement removed", "pass")

    visit_Continue = visit_Break

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and ast.unparse(node.value) != "None":
            self._add(node, "return value", "return None")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    # Expressions

    def _negate(self, test: ast.expr) -> None:
        simple = isinstance(test, ast.Compare) and len(test.ops) == 1
        if not simple and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._add(test, "condition negated", f"(not ({ast.unparse(test)}))")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            for new in COMPARISONS[type(op)]:
                self._add(node, "comparison", _grouped(_with(node, ops=[*node.ops[:i], new(), *node.ops[i + 1 :]])))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if new := ARITHMETIC.get(type(node.op)):
            self._add(node, "arithmetic", _grouped(_with(node, op=new())))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, "and/or", _grouped(_with(node, op=new)))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._add(node, f"{type(node.op).__name__} removed", _grouped(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, "constant", repr(not value))
        elif isinstance(value, int):
            for new in (value + 1, value - 1):
                self._add(node, "constant", f"({new})" if new < 0 else str(new))
        elif isinstance(value, float):
            self._add(node, "constant", repr(2 * value if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in HARMLESS_KEYWORDS:
                rest = [*node.keywords[:i], *node.keywords[i + 1 :]]
                self._add(node, "keyword argument removed", _with(node, keywords=rest))
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        plain = not any(isinstance(argument, ast.Starred) for argument in node.args[:2])
        if len(node.args) > 1 and plain and name not in SYMMETRIC:
            self._add(node, "arguments swapped", _with(node, args=[node.args[1], node.args[0], *node.args[2:]]))
        if new := NAMES.get(name):
            field = "id" if isinstance(node.func, ast.Name) else "attr"
            self._add(node, "another function", _with(node, func=_with(node.func, **{field: new})))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in HARMLESS_KEYWORDS:
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            for end in ("lower", "upper"):
                if getattr(node.slice, end) is not None:
                    self._add(node, "bound of a slice removed", _with(node, slice=_with(node.slice, **{end: None})))
        self.generic_visit(node)


def _with(node: ast.AST, **changes: object) -> ast.AST:
    node = copy.copy(node)
    for name, value in changes.items():
        setattr(node, name, value)
    return node


def _grouped(node: ast.AST) -> str:
    """Return an expression in parentheses, because its context may bind more tightly."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Constant | ast.Call | ast.Attribute) else f"({text})"


def _replaced(source: str, node: ast.expr | ast.stmt, text: str) -> str:
    lines = [line.encode() for line in source.splitlines(keepends=True)]  # positions count bytes
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    changed = lines[first][: node.col_offset] + text.encode() + lines[last][node.end_col_offset :]
    return b"".join((*lines[:first], changed, *lines[last + 1 :])).decode()


def _changed_lines(source: str, changed: str) -> tuple[str, str]:
    """Return the lines that differ, without the equal lines before and after them."""
    old, new = source.splitlines(), changed.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    return " ".join(" ".join(old).split()), " ".join(" ".join(new).split())
