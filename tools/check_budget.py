"""Keeps files, functions and parameter lists within the budgets of CONTRIBUTING.md.

Python is measured with `ast`; C++ and CUDA by their braces: a function is a block at namespace or
class level whose head ends with `)` and perhaps qualifiers or initialisers. Operators
(`TORCH_BOX(&name)`) and their fakes take the arguments of their schema, so their parameters are not
counted, and blocks of schemas and registrations may be as long as there are operators.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

MAX_FILE_LINES = 400
MAX_LINES = {"host": 60, "device": 150, "entry": 80}
MAX_PARAMETERS = 8
MAX_NESTING = 4
NATIVE = (".h", ".cuh", ".cpp", ".cu")
CONTROL = re.compile(
    r"^(if|for|while|switch|do|else|try|catch|return|namespace|struct|class|enum|"
    r"union|extern|static_assert|template)\b"
)
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*")


@dataclasses.dataclass(frozen=True)
class Function:
    """A function as the budgets see it."""

    name: str
    line: int
    lines: int
    parameters: int
    nesting: int
    kind: str  # "host", "device", "entry" or "registration"


def python_functions(text: str) -> list[Function]:
    """Functions and methods; docstrings do not count, `self` is no parameter."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body
        documented = ast.get_docstring(node) is not None
        docstring = (body[0].end_lineno or 0) - body[0].lineno + 1 if documented else 0
        lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
        arguments = node.args.posonlyargs + node.args.args
        names = [a.arg for a in arguments if a.arg not in ("self", "cls")]
        # Keyword-only parameters are named where they are passed, so they do not count.
        found.append(Function(node.name, node.lineno, lines, len(names), nesting(node), "host"))
    return found


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Deepest nesting of compound statements inside a function."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            continue
        compound = isinstance(child, (ast.If, ast.For, ast.While, ast.With, ast.Try))
        # `elif` is an If inside the parent's orelse, not a deeper level.
        chained = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, nesting(child, depth + (compound and not chained)))
    return deepest


def strip_comments(text: str) -> str:
    """Blanks comments and string contents, keeping every line break."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"\w*\(.*?\)\w*"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S
    )
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]) or " ", text)


def count_parameters(head: str) -> int:
    """Parameters in the last top-level parenthesis of a function's head."""
    start = head.find("(")
    depth, commas, seen = 0, 0, False
    for character in head[start:]:
        if character in "(<[{":
            depth += 1
        elif character in ")>]}":
            depth -= 1
            if depth == 0:
                break
        elif character == "," and depth == 1:
            commas += 1
        elif not character.isspace():
            seen = True
    return commas + 1 if seen else 0


@dataclasses.dataclass(frozen=True)
class Block:
    """An open brace: what it starts, where its head begins, and that head in one line."""

    kind: str  # "function", "scope", "control", "block" or "initialiser"
    line: int
    head: str


def native_functions(text: str) -> list[Function]:
    """Functions of a C++ or CUDA file, found by their braces."""
    code = without_directives(strip_comments(text))
    found: list[Function] = []
    stack: list[Block] = []
    deepest = 0
    start = 0  # where the text in front of the next brace begins
    for position, character in enumerate(code):
        if character not in ";{}":
            continue
        in_parentheses = code.count("(", start, position) > code.count(")", start, position)
        if character == "{":
            block = open_block(code, start, position, stack, in_parentheses)
            stack.append(block)
            if block.kind == "function":
                deepest = 0
            deepest = max(deepest, sum(b.kind == "control" for b in stack))
        elif character == "}" and stack:
            block = stack.pop()
            in_parentheses = block.kind == "initialiser"
            if block.kind == "function":
                found.append(close_function(block, code.count("\n", 0, position) + 1, deepest))
        if not in_parentheses:
            start = position + 1
    return found


def without_directives(code: str) -> str:
    """Blanks preprocessor lines: they have no say in the structure."""
    directive = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
    return directive.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), code)


def open_block(
    code: str, start: int, position: int, stack: list[Block], in_parentheses: bool
) -> Block:
    """The block that the brace at `position` opens."""
    raw = code[start:position]
    head = " ".join(raw.split())
    line = code.count("\n", 0, position - len(raw.lstrip())) + 1
    if in_parentheses:
        kind = "initialiser"
    elif any(block.kind == "function" for block in stack):
        kind = "control" if CONTROL.match(head) else "block"
    else:
        kind = block_kind(head)
    return Block(kind, line, head)


def close_function(block: Block, last_line: int, deepest: int) -> Function:
    """What the budgets ask of a function that ends at `last_line`."""
    head = LAUNCH_BOUNDS.sub("", block.head)
    name = re.search(r"([~\w:]+|operator\W+)\s*\(", head)
    return Function(
        name=name[1] if name else head[:40],
        line=block.line,
        lines=last_line - block.line + 1,
        parameters=count_parameters(head[name.start(1) :] if name else head),
        nesting=deepest,
        kind=function_kind(block.head),
    )


def block_kind(head: str) -> str:
    """Whether an opening brace starts a function or only a scope, type or initialiser."""
    plain = re.sub(r"^(template\s*<.*?>\s*(?=[\w_]))", "", head)
    plain = LAUNCH_BOUNDS.sub("", plain)
    if CONTROL.match(plain) and not re.match(r"^(extern|template)\b", plain):
        return "scope"
    ends = re.search(r"\)\s*(const|noexcept|override|final|->\s*[\w:<>*& ]+|:\s.*)*$", plain)
    return "function" if "(" in plain and ends and "=" not in plain.split("(")[0] else "scope"


def function_kind(head: str) -> str:
    """Kernel entry, device role, registration or host function."""
    if head.startswith("STABLE_TORCH_LIBRARY"):
        return "registration"
    if "__global__" in head:
        return "entry"
    return "device" if re.search(r"__device__|XS_DEVICE", head) else "host"


def operators_of(text: str) -> set[str]:
    """Functions that a file registers as operators: their parameters are the schema's."""
    pairs = re.findall(
        r"TORCH_BOX\(&(?:\w+::)*(\w+)\)|register_fake\(\s*f?\"[^\"]+\", (\w+)\)", text
    )
    return {name for pair in pairs for name in pair if name}


def problems(path: pathlib.Path, operators: set[str]) -> list[str]:
    """Everything over budget in one file."""
    text = path.read_text()
    lines = text.count("\n")
    name = path.relative_to(ROOT)
    found = [f"{name}: {lines} lines, {MAX_FILE_LINES} allowed"] if lines > MAX_FILE_LINES else []
    functions = python_functions(text) if path.suffix == ".py" else native_functions(text)
    for function in functions:
        if function.kind == "registration":
            continue
        where = f"{name}:{function.line}: {function.name}"
        limit = MAX_LINES[function.kind]
        if function.lines > limit:
            found.append(f"{where}: {function.lines} lines, {limit} allowed ({function.kind})")
        if function.parameters > MAX_PARAMETERS and function.name not in operators:
            found.append(f"{where}: {function.parameters} parameters, {MAX_PARAMETERS} allowed")
        if function.nesting > MAX_NESTING:
            found.append(f"{where}: nesting {function.nesting}, {MAX_NESTING} allowed")
    return found


def main() -> int:
    """Checks every tracked source file; prints what is over budget."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    paths = [ROOT / name for name in listed if name.endswith((*NATIVE, ".py"))]
    paths = [path for path in paths if path.exists()]
    operators = set().union(*(operators_of(path.read_text()) for path in paths))
    found = [text for path in paths for text in problems(path, operators)]
    print("\n".join(found) if found else f"{len(paths)} files within budget")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
