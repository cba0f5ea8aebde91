"""Code compiled for a wide instruction set shares no function with the rest of the program.

The linker keeps one copy of a function that several object files define weakly (inline functions,
template instantiations). If it kept the copy of an AVX-512 object, the program would die on a
machine without AVX-512 wherever else that function is used. So the archives of the kernels may
define nothing that is visible outside but the one accessor of their table.
"""

import pathlib
import re
import subprocess

import pytest

# Relative to the runfiles' root, where Bazel starts tests: __file__ is a link into the source tree.
_ARCHIVES = sorted(pathlib.Path("mok_gemm/host").glob("libkernels_*.a"))
# A definition that another object file can see: upper-case types and the weak ones.
_VISIBLE_DEFINITION = re.compile(r"^[0-9a-f]+ [A-TV-Zuvw] (.*)$")


def test_the_archives_were_found():
    assert any(archive.name.startswith("libkernels_portable") for archive in _ARCHIVES)


@pytest.mark.parametrize("archive", _ARCHIVES, ids=lambda archive: archive.stem)
def test_only_the_accessor_is_visible(archive):
    symbols = subprocess.run(
        ["nm", "--demangle", archive], check=True, capture_output=True, text=True
    ).stdout
    found = [_VISIBLE_DEFINITION.match(line) for line in symbols.splitlines()]
    visible = [match.group(1) for match in found if match]
    assert len(visible) == 1, visible
    assert re.fullmatch(r"mok::\w+Kernels\(mok::DType\)", visible[0])
