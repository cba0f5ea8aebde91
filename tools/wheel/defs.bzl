"""py_wheel: a pip-installable wheel of the modules and extension modules of py_library targets.

    py_wheel(
        name = "wheel",
        distribution = "mok-torch",
        packages = ["mok_torch"],
        requires = ["torch>=2.8"],
        version = MOK_VERSION,
        deps = [":mok_torch"],
    )

The wheel is tagged for @target_python: by default the Python that runs the tests. For another
CPython only its headers are needed:

    ./bazelw build //mok_torch:wheel --repo_env=MOK_TARGET_PYTHON_HEADERS=/path/to/python3.12

(a folder with Python.h, or a .tar.gz of one). Extension modules get that Python's file suffix.
"""

load("@target_python//:defs.bzl", "EXTENSION_SUFFIX", "PLATFORM_TAG", "PYTHON_TAG")

# The version of every MoK package; MODULE.bazel repeats it.
MOK_VERSION = "0.1.0"

def _in_packages(path, packages):
    for package in packages:
        if path.startswith(package + "/"):
            return True
    return False

def _wheel_members(ctx):
    """Returns {path inside the wheel: File}; fails on a module that the wheel would lack."""
    sources = depset(transitive = [library[PyInfo].transitive_sources for library in ctx.attr.deps])
    runfiles = depset(
        transitive = [library[DefaultInfo].default_runfiles.files for library in ctx.attr.deps],
    )
    members = {}
    for file in depset(transitive = [sources, runfiles]).to_list():
        path = file.short_path
        if _in_packages(path, ctx.attr.packages):
            if path.endswith(".so") and not ctx.attr.pure:
                path = path[:-len(".so")] + EXTENSION_SUFFIX
            members[path] = file
        elif file.extension in ["py", "so"]:
            fail("%s: %s is needed at run time but is in none of the packages %s" % (
                ctx.label,
                path,
                ctx.attr.packages,
            ))
    return members

def _py_wheel_implementation(ctx):
    if ctx.attr.pure:
        tag = "py3-none-any"
    else:
        tag = "%s-%s-%s" % (PYTHON_TAG, PYTHON_TAG, PLATFORM_TAG)
    distribution = ctx.attr.distribution.replace("-", "_")
    wheel = ctx.actions.declare_file("%s-%s-%s.whl" % (distribution, ctx.attr.version, tag))
    members = _wheel_members(ctx)
    arguments = ctx.actions.args()
    arguments.set_param_file_format("multiline")
    arguments.use_param_file("@%s", use_always = True)
    arguments.add("--out=%s" % wheel.path)
    arguments.add("--name=" + ctx.attr.distribution)
    arguments.add("--version=" + ctx.attr.version)
    arguments.add("--tag=" + tag)
    arguments.add("--summary=" + ctx.attr.summary)
    arguments.add("--license=" + ctx.attr.license)
    arguments.add("--python-requires=" + ctx.attr.python_requires)
    arguments.add_all(ctx.attr.requires, format_each = "--requires=%s")
    arguments.add_all(
        ["%s=%s" % item for item in ctx.attr.entry_points.items()],
        format_each = "--script=%s",
    )
    arguments.add_all(ctx.files.license_files, format_each = "--license-file=%s")
    arguments.add_all(ctx.files.description, format_each = "--description=%s")
    arguments.add_all(
        ["%s=%s" % (path, file.path) for path, file in members.items()],
        format_each = "--file=%s",
    )
    ctx.actions.run(
        executable = ctx.executable._make_wheel,
        arguments = [arguments],
        inputs = members.values() + ctx.files.license_files + ctx.files.description,
        outputs = [wheel],
        mnemonic = "PyWheel",
        progress_message = "Packing %s" % wheel.short_path,
    )
    return [DefaultInfo(files = depset([wheel]), runfiles = ctx.runfiles([wheel]))]

py_wheel = rule(
    implementation = _py_wheel_implementation,
    attrs = {
        "deps": attr.label_list(providers = [PyInfo], mandatory = True),
        "distribution": attr.string(mandatory = True, doc = "the name that pip knows"),
        "packages": attr.string_list(mandatory = True, doc = "folders that go into the wheel"),
        "version": attr.string(mandatory = True),
        "description": attr.label(allow_single_file = [".md"], doc = "shown by package indexes"),
        "entry_points": attr.string_dict(doc = "console scripts: {command: 'module:function'}"),
        "license": attr.string(default = "Apache-2.0"),
        "license_files": attr.label_list(allow_files = True, default = ["//:LICENSE"]),
        "pure": attr.bool(doc = "no extension module: one wheel for every Python"),
        "python_requires": attr.string(default = ">=3.10"),
        "requires": attr.string_list(doc = "Requires-Dist lines"),
        "summary": attr.string(),
        "_make_wheel": attr.label(
            default = "//tools/wheel:make_wheel",
            executable = True,
            cfg = "exec",
        ),
    },
)
