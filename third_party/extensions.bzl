"""MODULE.bazel entry point; Bazel 4 never loads this file (it has no module_extension)."""

load("//third_party:deps.bzl", "mok_repositories")

def _mok_dependencies_implementation(_module_context):
    mok_repositories()

mok_dependencies_extension = module_extension(implementation = _mok_dependencies_implementation)
