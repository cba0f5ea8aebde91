"""A small reader of C++ and CUDA sources: enough to find comments, strings and function bodies.

It is no parser. It knows what the lint tests need: which characters are code, and where a function
definition starts and ends.
"""

import dataclasses
import re

_TOKEN = re.compile(
    r"""
    (?P<line_comment>//[^\n]*)
  | (?P<block_comment>/\*.*?\*/)
  | (?P<raw_string>\bR"(?P<delimiter>[^()\s\\]{0,16})\(.*?\)(?P=delimiter)")
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<number>\b\d[\w']*)
  | (?P<character>'(?:\\.|[^'\\\n])+')
    """,
    re.DOTALL | re.VERBOSE,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.)*(?:\\\n[^\n]*)*", re.MULTILINE)
_CONTAINER = re.compile(r"\b(?:namespace|class|struct|union|enum)\b|\bextern\s*\"")
_NAME = re.compile(r"(~?\w+|operator\W+?)\s*\(")


@dataclasses.dataclass(frozen=True)
class Function:
    """A function definition; the lines count from 1 and include the signature and both braces."""

    name: str
    first_line: int
    last_line: int


def _blank(text):
    """Spaces in place of every character but the line ends."""
    return re.sub(r"[^\n]", " ", text)


def without_comments(text):
    """The text with comments blanked; positions and lines stay the same."""

    def replace(match):
        return _blank(match.group()) if match.group().startswith(("//", "/*")) else match.group()

    return _TOKEN.sub(replace, text)


def code_only(text):
    """The text with comments and the contents of strings blanked; positions stay the same."""

    def replace(match):
        found = match.group()
        if match.lastgroup == "number":
            return found
        if found.startswith(("//", "/*")):
            return _blank(found)
        return '"' + _blank(found[1:-1]) + '"'

    return _TOKEN.sub(replace, text)


def _is_container(header):
    """Whether "header {" opens a namespace or a type rather than a function."""
    found = _CONTAINER.search(header)
    if not found:
        return False
    # "struct Foo Make(" returns a type, "template <class T> void Run(" only mentions one.
    before_template = re.sub(r"\btemplate\s*<[^{}]*?>\s*(?=\w)", "", header)
    found = _CONTAINER.search(before_template)
    return bool(found) and not re.search(r"\w\s*\([^)]*\)\s*(?:const|noexcept|\w*)\s*$", header)


def functions(text):
    """All function definitions that are not inside another one, in order."""
    code = _DIRECTIVE.sub(lambda match: _blank(match.group()), code_only(text))
    found = []
    open_braces = []  # "container", "other", or the start position of a function's signature
    statement_start = 0
    for match in re.finditer(r"[{};]", code):
        position = match.start()
        if match.group() == "{":
            header = code[statement_start:position]
            in_function = any(brace not in ("container", "other") for brace in open_braces)
            if not in_function and _is_container(header):
                open_braces.append("container")
            elif in_function or "(" not in header or "other" in open_braces:
                open_braces.append("other")
            else:
                open_braces.append((header, statement_start))
        elif match.group() == "}":
            top = open_braces.pop() if open_braces else "other"
            if isinstance(top, tuple):
                found.append(_make_function(code, *top, position))
        statement_start = position + 1
    return found


def _make_function(code, header, start, end):
    name = _NAME.search(header)
    start += len(header) - len(header.lstrip())
    return Function(
        name=name.group(1) if name else "?",
        first_line=code.count("\n", 0, start) + 1,
        last_line=code.count("\n", 0, end) + 1,
    )
