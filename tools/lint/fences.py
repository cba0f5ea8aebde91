"""What may appear only in certain folders: PTX, Python's and PyTorch's headers.

PTX is inline assembly in a file that nvcc may compile: .cu, .cuh and headers. A .cc file is the
host compiler's alone, and so is the emulator: their assembly is the processor's and stands where
it is needed.
"""

import re

from tools.lint import cpp_text, source_tree

PTX_FOLDER = "mok_core/ptx/"
HOST_FOLDER = "mok_core/emulator/"
# The build's own proofs that extension modules work are the only other users of pybind11.
PYTHON_FOLDERS = ("mok_torch/", "tools/py/chain/", "tools/wheel/chain/")

_ASSEMBLY = re.compile(r"\b(?:asm|__asm|__asm__)\b")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_PYTORCH = re.compile(r"^(?:torch|ATen|c10|caffe2)/")
_PYTHON = re.compile(r"^(?:Python\.h$|pybind11/|nanobind/)")


def includes(text):
    """[(line, path)] of the #include lines of a C++ source."""
    code = cpp_text.without_comments(text)
    return [
        (code.count("\n", 0, match.start(1)) + 1, match.group(1))
        for match in _INCLUDE.finditer(code)
    ]


def check(path, text):
    """Returns the violations of one file as a list of "path:line: what"."""
    if not source_tree.is_cpp(path):
        return []
    violations = []
    if not path.endswith(".cc") and not path.startswith((PTX_FOLDER, HOST_FOLDER)):
        code = cpp_text.code_only(text)
        for match in _ASSEMBLY.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            violations.append(f"{path}:{line}: inline assembly belongs in {PTX_FOLDER}")
    for line, included in includes(text):
        if _PYTORCH.match(included):
            violations.append(f"{path}:{line}: PyTorch's header {included} may not be used")
        if _PYTHON.match(included) and not path.startswith(PYTHON_FOLDERS):
            violations.append(f"{path}:{line}: {included} may be used in mok_torch only")
    return violations
