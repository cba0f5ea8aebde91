"""@target_python: the CPython that extension modules and the wheel are built for.

By default the one that runs the tests (@python_env). Environment variables (or --repo_env) choose
another one, of which only the headers are needed:
  MOK_TARGET_PYTHON_HEADERS  a folder with Python.h (or a folder or .tar.gz that holds one such
                             folder), made for this operating system and processor.
Debian and Ubuntu keep the platform's half of pyconfig.h in another folder, which may be missing
from such a copy; the half of the Python that runs here then stands in for it: it describes the
platform (sizes of types and the like), not the version.
"""

load("//third_party/python:pip.bzl", "run")

_MINORS = [str(minor) for minor in range(10, 15)]

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**/*.h", "platform_include/**/*.h"], allow_empty = True),
    includes = ["include", "platform_include"],
)

cc_library(
    name = "pybind11",
    deps = [
        ":headers",
        "@python_env//:pybind11_headers",
    ],
)
"""

_DEFS = """
PYTHON_TAG = "{python_tag}"
PLATFORM_TAG = "{platform_tag}"
EXTENSION_SUFFIX = "{extension_suffix}"
IS_HOST_PYTHON = {is_host}
"""

def _find_headers(repository_context, given):
    """The folder with Python.h, and the CPython minor version that its patchlevel.h states."""
    wrong = ("MOK_TARGET_PYTHON_HEADERS=%s: expected a folder with Python.h, or a .tar.gz of " +
             "such a folder") % given
    if not given.startswith("/"):
        fail(wrong + ", by its absolute path")
    if not repository_context.path(given).exists:
        fail(wrong + ", but nothing is there")
    folder = given
    if given.endswith(".tar.gz") or given.endswith(".tgz"):
        repository_context.extract(given, "unpacked")
        folder = str(repository_context.path("unpacked"))
    elif repository_context.execute(["test", "-d", given]).return_code != 0:
        fail(wrong + ", but this is another kind of file")
    found = run(repository_context, ["find", "-L", folder, "-maxdepth", "3", "-name", "Python.h"])
    folders = [line[:-len("/Python.h")] for line in found.splitlines()]
    if len(folders) != 1:
        fail(wrong + ", but Python.h is in %s" % (" and in ".join(folders) or "no folder there"))
    if not repository_context.path(folders[0] + "/patchlevel.h").exists:
        fail(wrong + ", but %s has no patchlevel.h beside it" % folders[0])
    version = {}
    for line in repository_context.read(folders[0] + "/patchlevel.h").splitlines():
        words = [word for word in line.replace("\t", " ").split(" ") if word]
        if len(words) >= 3 and words[0] == "#define":
            version[words[1]] = words[2]
    if version.get("PY_MAJOR_VERSION") != "3" or version.get("PY_MINOR_VERSION") not in _MINORS:
        fail(wrong + ", but %s/patchlevel.h is not of CPython 3.10 to 3.14" % folders[0])
    return folders[0], version["PY_MINOR_VERSION"]

def _add_platform_configuration(repository_context, include, minor, host_include):
    """Supplies <x86_64-linux-gnu/python3.N/pyconfig.h> where pyconfig.h refers to a missing one."""
    ending = "-linux-gnu/python3.%s/pyconfig.h>" % minor
    for line in repository_context.read(include + "/pyconfig.h").splitlines():
        if not line.strip().endswith(ending):
            continue
        path = line.split("<")[1].split(">")[0]
        if not repository_context.path("/usr/include/" + path).exists:
            repository_context.symlink(host_include + "/pyconfig.h", "platform_include/" + path)

def _target_python_implementation(repository_context):
    facts = json.decode(repository_context.read(repository_context.attr.facts))
    include = facts["include"]
    minor = facts["version"][1]
    suffix = facts["extension_suffix"]
    given = repository_context.os.environ.get("MOK_TARGET_PYTHON_HEADERS", "")
    if given:
        include, minor = _find_headers(repository_context, given)

        # ".cpython-311-x86_64-linux-gnu.so": only the version differs on the same platform.
        host_version = "-3%d-" % facts["version"][1]
        suffix = suffix.replace(host_version, "-3%s-" % minor)
        _add_platform_configuration(repository_context, include, minor, facts["include"])
    repository_context.symlink(include, "include")
    repository_context.file("BUILD.bazel", _BUILD)
    repository_context.file("defs.bzl", _DEFS.format(
        python_tag = "cp3%s" % minor,
        platform_tag = facts["platform_tag"],
        extension_suffix = suffix,
        is_host = not given,
    ))

target_python = repository_rule(
    implementation = _target_python_implementation,
    attrs = {"facts": attr.label(
        default = Label("@python_env//:facts.json"),
        allow_single_file = True,
    )},
    environ = ["MOK_TARGET_PYTHON_HEADERS"],
)
