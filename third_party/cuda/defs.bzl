"""CUDA rules: cuda_library, cuda_binary, cuda_test, and what other targets need to depend on them.

Without a CUDA toolkit every target that these rules declare, and every target marked with
target_compatible_with = cuda_target(), is skipped by //... patterns; nothing else changes.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@local_cuda//:defs.bzl", "CUDA_AVAILABLE", "CUDA_HOME")
load("//tools/cc:defs.bzl", "cc_binary", "cc_test")

_CUDART = Label("@local_cuda//:cudart_static")
_UNAVAILABLE = Label("//tools:unavailable")
_GTEST = Label("@googletest//:gtest")

CudaArchsInfo = provider(
    doc = "The GPU architectures to compile for.",
    fields = {"archs": "list of sm_NN names"},
)

def _cuda_archs_implementation(ctx):
    for arch in ctx.build_setting_value:
        if not arch.startswith("sm_"):
            fail("%s: %r is not of the form sm_NN" % (ctx.label, arch))
    return [CudaArchsInfo(archs = ctx.build_setting_value)]

cuda_archs = rule(
    implementation = _cuda_archs_implementation,
    build_setting = config.string_list(flag = True),
)

def if_cuda(with_toolkit, without_toolkit = []):
    """Picks the value of an attribute (deps, srcs, local_defines) by whether there is a toolkit."""
    return with_toolkit if CUDA_AVAILABLE else without_toolkit

def cuda_target():
    """The target_compatible_with of anything that needs a CUDA toolkit."""
    return if_cuda([], [_UNAVAILABLE])

def _compile_flags(ctx, cc_toolchain, context, archs):
    """Returns the nvcc arguments that do not depend on the source file."""
    flags = ctx.actions.args()
    flags.add_all(["-x", "cu", "-c", "-std=c++20", "-ccbin", cc_toolchain.compiler_executable])
    flags.add_all(["--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-Wall"])
    flags.add_all(["-Werror", "all-warnings"])

    # "will not be called for conversions": said of operators that a requires-clause switches off.
    flags.add_all(["-diag-suppress", "554"])
    for arch in archs:
        number = arch[len("sm_"):]
        flags.add("-gencode=arch=compute_%s,code=sm_%s" % (number, number))
    mode = ctx.var["COMPILATION_MODE"]
    if mode == "opt":
        flags.add_all(["-O3", "-DNDEBUG", "-lineinfo"])
    elif mode == "dbg":
        flags.add_all(["-g", "-O0"])
    flags.add_all(context.defines, format_each = "-D%s")
    flags.add_all(ctx.attr.local_defines, format_each = "-D%s")

    # nvcc knows no -iquote.
    flags.add_all(context.includes, before_each = "-I")
    flags.add_all(context.quote_includes, before_each = "-I")
    flags.add_all(context.system_includes, before_each = "-isystem")
    flags.add_all(ctx.attr.copts)
    return flags

def _own_context(ctx):
    """The rule's headers, and its repository's root as include path (source and generated)."""
    root = ctx.label.workspace_root
    roots = [root or ".", ctx.bin_dir.path + ("/" + root if root else "")]
    return CcInfo(compilation_context = cc_common.create_compilation_context(
        headers = depset(ctx.files.hdrs),
        quote_includes = depset(roots),
        defines = depset(ctx.attr.defines),
    ))

def _compile(ctx, cc_toolchain, context):
    """Declares one nvcc action per source file; returns the object files."""
    archs = ctx.attr.archs or ctx.attr._archs[CudaArchsInfo].archs
    flags = _compile_flags(ctx, cc_toolchain, context, archs)
    objects = []
    for source in ctx.files.srcs:
        if source.extension != "cu":
            continue
        stem = source.basename[:-len(".cu")]
        object_file = ctx.actions.declare_file("_objs/%s/%s.o" % (ctx.label.name, stem))
        last = ctx.actions.args()
        last.add(source)
        last.add("-o", object_file)
        headers = [file for file in ctx.files.srcs if file.extension != "cu"]
        ctx.actions.run(
            executable = CUDA_HOME + "/bin/nvcc",
            arguments = [flags, last],
            inputs = depset(
                [source] + headers,
                transitive = [context.headers, cc_toolchain.all_files],
            ),
            outputs = [object_file],
            mnemonic = "CudaCompile",
            progress_message = "nvcc %s [%s]" % (source.short_path, ",".join(archs)),
            env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": "/tmp"},
        )
        objects.append(object_file)
    return objects

def _cuda_library_implementation(ctx):
    cc_toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    merged = cc_common.merge_cc_infos(
        direct_cc_infos = [_own_context(ctx)],
        cc_infos = [dependency[CcInfo] for dependency in ctx.attr.deps],
    )
    objects = _compile(ctx, cc_toolchain, merged.compilation_context)
    linking_context, outputs = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = features,
        cc_toolchain = cc_toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        linking_contexts = [merged.linking_context],
        user_link_flags = ctx.attr.linkopts,
        alwayslink = ctx.attr.alwayslink,
        disallow_dynamic_library = True,
    )
    library = outputs.library_to_link
    archive = (library.pic_static_library or library.static_library) if library else None
    return [
        DefaultInfo(files = depset([archive] if archive else [])),
        CcInfo(
            compilation_context = merged.compilation_context,
            linking_context = linking_context,
        ),
    ]

_cuda_library = rule(
    implementation = _cuda_library_implementation,
    attrs = {
        "srcs": attr.label_list(allow_files = [".cu", ".cuh", ".h", ".inc"]),
        "hdrs": attr.label_list(allow_files = [".cuh", ".h", ".hpp", ".inc"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "alwayslink": attr.bool(doc = "keep objects that nothing refers to, such as tests"),
        "archs": attr.string_list(doc = "overrides --//third_party/cuda:archs"),
        "copts": attr.string_list(doc = "further arguments for nvcc"),
        "defines": attr.string_list(doc = "also for targets that depend on this one"),
        "linkopts": attr.string_list(),
        "local_defines": attr.string_list(),
        "_archs": attr.label(default = "//third_party/cuda:archs", providers = [CudaArchsInfo]),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_library(name, deps = [], target_compatible_with = [], **kwargs):
    """.cu files compiled by nvcc for the architectures of //third_party/cuda:archs.

    Any cc_* target can depend on it (and has to be marked with cuda_target() then).
    """
    _cuda_library(
        name = name,
        # A skipped target still has its dependencies fetched: ask for none.
        deps = if_cuda(deps + [_CUDART]),
        target_compatible_with = target_compatible_with + cuda_target(),
        **kwargs
    )

def cuda_binary(name, srcs, deps = [], data = [], args = [], tags = [], **kwargs):
    """A program from .cu files."""
    cuda_library(name = name + "_objects", srcs = srcs, deps = deps, alwayslink = True, **kwargs)
    cc_binary(
        name = name,
        args = args,
        data = data,
        tags = tags,
        target_compatible_with = cuda_target(),
        deps = [":" + name + "_objects"],
    )

def cuda_test(name, srcs, deps = [], data = [], size = "small", tags = [], **kwargs):
    """A googletest from .cu files. It builds wherever there is a toolkit.

    It runs there too, with or without a GPU: call GTEST_SKIP() when cudaGetDeviceCount finds none.
    """
    cuda_library(
        name = name + "_objects",
        testonly = True,
        srcs = srcs,
        deps = deps + [_GTEST],
        alwayslink = True,
        **kwargs
    )
    cc_test(
        name = name,
        size = size,
        data = data,
        tags = tags,
        target_compatible_with = cuda_target(),
        deps = if_cuda([":" + name + "_objects"]),
    )
