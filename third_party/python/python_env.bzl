"""@python_env: a virtual environment with the locked requirements, and its Python toolchain.

Environment variables (or --repo_env): MOK_PYTHON is the interpreter to start from;
MOK_PYTHON_ENV is an environment that already has everything, used as it is.
"""

load("//third_party/python:pip.bzl", "find_python", "run")

_SUPPORTED = [[3, minor] for minor in range(10, 15)]

_BUILD = """
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# A platform runtime: targets start {python} itself, so that its site-packages are importable
# without one symlink per file in every runfiles tree.
py_runtime(
    name = "py3_runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":py3_runtime",
)

# Changes with the set of installed packages; tests depend on it, so that results obtained with
# other packages are not reused.
filegroup(
    name = "stamp",
    srcs = ["stamp.txt"],
)

cc_library(
    name = "python_headers",
    hdrs = glob(["python_include/**/*.h"]),
    includes = ["python_include"],
)

# Headers only, for any CPython: the target Python's headers come from @target_python.
cc_library(
    name = "pybind11_headers",
    hdrs = glob(["pybind11_include/**/*.h"]),
    includes = ["pybind11_include"],
)
"""

def _create_environment(repository_context):
    python = find_python(repository_context)
    repository_context.report_progress("creating the virtual environment")
    run(repository_context, [python, "-m", "venv", "venv"])
    python = str(repository_context.path("venv/bin/python3"))
    requirements = repository_context.path(repository_context.attr.requirements)
    repository_context.report_progress("pip install -r requirements.txt")
    run(repository_context, [python, "-m", "pip", "install", "--quiet", "-r", requirements])
    return python

def _python_env_implementation(repository_context):
    # Asked for first: a path that appears later would restart this function half-way.
    probe = repository_context.path(repository_context.attr.probe)
    existing = repository_context.os.environ.get("MOK_PYTHON_ENV", "")
    if existing and not repository_context.path(existing + "/bin/python3").exists:
        fail("MOK_PYTHON_ENV=%s: expected an environment, but there is no bin/python3" % existing)
    python = existing + "/bin/python3" if existing else _create_environment(repository_context)
    facts = json.decode(run(repository_context, [python, "-B", probe]))

    if facts["implementation"] != "cpython" or facts["version"] not in _SUPPORTED:
        fail("%s is %s %d.%d; MoK supports CPython 3.10 to 3.14 (set MOK_PYTHON)" % (
            python,
            facts["implementation"],
            facts["version"][0],
            facts["version"][1],
        ))
    if not repository_context.path(facts["include"] + "/Python.h").exists:
        fail("no Python.h in %s (Debian: python3-dev; ./bazelw installs it)" % facts["include"])
    if not facts["pybind11"]:
        fail("%s has no pybind11 (requirements: third_party/python/requirements.txt)" % python)

    repository_context.symlink(facts["include"], "python_include")
    repository_context.symlink(facts["pybind11"] + "/include", "pybind11_include")
    repository_context.file("stamp.txt", facts["stamp"] + "\n")
    repository_context.file("facts.json", json.encode(facts))
    repository_context.file("BUILD.bazel", _BUILD.format(python = python))
    repository_context.file("defs.bzl", 'PYTHON = "{}"\nIS_LOCKED = {}\n'.format(
        python,
        not existing,
    ))

python_env = repository_rule(
    implementation = _python_env_implementation,
    attrs = {
        "probe": attr.label(
            default = Label("//third_party/python:probe.py"),
            allow_single_file = True,
        ),
        "requirements": attr.label(mandatory = True, allow_single_file = True),
    },
    environ = ["MOK_PYTHON", "MOK_PYTHON_ENV"],
)
