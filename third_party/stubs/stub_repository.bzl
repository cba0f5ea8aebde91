"""Declares a folder of third_party/stubs as the repository of the same name (WORKSPACE mode)."""

def _stub_repository_implementation(repository_context):
    root = repository_context.path(repository_context.attr.root_file).dirname
    stub = str(root) + "/third_party/stubs/" + repository_context.name
    for entry in repository_context.path(stub).readdir():
        if entry.basename != "MODULE.bazel":
            repository_context.symlink(entry, entry.basename)

stub_repository = repository_rule(
    implementation = _stub_repository_implementation,
    attrs = {"root_file": attr.label(default = Label("//:WORKSPACE"), allow_single_file = True)},
    local = True,
)
