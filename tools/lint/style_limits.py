"""Limits on the size of files, functions and lines (the style page's rule 13)."""

import ast

from tools.lint import cpp_text, source_tree

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
# The body of a kernel's warp role (a function named ...Role) counts code lines only.
MAX_ROLE_CODE_LINES = 120
MAX_COLUMNS = 100


def _cpp_functions(text):
    code_lines = cpp_text.without_comments(text).splitlines()
    for function in cpp_text.functions(text):
        body = code_lines[function.first_line - 1 : function.last_line]
        if function.name.endswith("Role"):
            size, limit = sum(bool(line.strip()) for line in body), MAX_ROLE_CODE_LINES
        else:
            size, limit = len(body), MAX_FUNCTION_LINES
        yield function.name, function.first_line, size, limit


def _python_functions(text):
    # Starlark is a subset of Python's syntax.
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1, MAX_FUNCTION_LINES


def check(path, text):
    """Returns the violations of one file as a list of "path:line: what"."""
    if source_tree.is_cpp(path):
        functions = _cpp_functions(text)
    elif source_tree.is_python(path) or path.endswith(".bzl"):
        functions = _python_functions(text)
    else:
        return []
    lines = text.splitlines()
    violations = [
        f"{path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"
        for number, line in enumerate(lines, 1)
        if len(line) > MAX_COLUMNS
    ]
    if len(lines) > MAX_FILE_LINES:
        violations.append(f"{path}:1: {len(lines)} lines, at most {MAX_FILE_LINES}")
    violations += [
        f"{path}:{line}: function {name} has {size} lines, at most {limit}"
        for name, line, size, limit in functions
        if size > limit
    ]
    return violations
