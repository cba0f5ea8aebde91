"""@cutlass: CUTLASS and CuTe headers, of CUTLASS_HOME or of the wheel nvidia-cutlass."""

load("//third_party/python:pip.bzl", "find_python", "run")

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cutlass",
    hdrs = glob(["include/**"]),
    includes = ["include"],
)
"""

def _cutlass_repository_implementation(repository_context):
    home = repository_context.os.environ.get("CUTLASS_HOME", "")
    if home:
        repository_context.symlink(home + "/include", "include")
    else:
        requirements = repository_context.path(repository_context.attr.requirements)

        # Debian's python3 has no pip of its own: a throwaway virtual environment does.
        run(repository_context, [find_python(repository_context), "-m", "venv", "pip_venv"])
        run(repository_context, [
            "pip_venv/bin/python3",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-compile",
            "--target",
            "wheel",
            "-r",
            requirements,
        ])
        repository_context.delete("pip_venv")
        repository_context.symlink("wheel/cutlass_library/source/include", "include")
    repository_context.file("BUILD.bazel", _BUILD)

cutlass_repository = repository_rule(
    implementation = _cutlass_repository_implementation,
    attrs = {"requirements": attr.label(mandatory = True, allow_single_file = True)},
    environ = ["CUTLASS_HOME", "MOK_PYTHON"],
)
