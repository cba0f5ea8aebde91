"""Rules that run kernels in the host emulator.

A kernel source is a .cu file of device code and of functions that return kernel addresses. nvcc
compiles it in a cuda_library; emulated_kernel_library compiles the same file for the host.
"""

load("//tools/cc:defs.bzl", "cc_library", "cc_test")

# -fsanitize=thread calls a hook at every plain load and store. The emulator supplies the hooks, so
# the flag is not passed to the linker. Frame pointers let reports name source lines.
_KERNEL_COPTS = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fno-optimize-sibling-calls",
    "-fsanitize=thread",
    "--param",
    "tsan-instrument-func-entry-exit=0",
    "-DMOK_EMULATOR=1",
]

def emulated_kernel_library(name, srcs, hdrs = [], deps = [], **kwargs):
    """Compiles kernel sources (.cu) for the emulator.

    Args:
      name: the target; tests depend on it.
      srcs: .cu files, and headers that only they include.
      hdrs: headers that declare what the sources define.
      deps: libraries of headers, as in a cuda_library of the same sources; //mok_core/device and
        the emulator are added.
      **kwargs: passed to cc_library.
    """
    sources = []
    for source in srcs:
        if not source.endswith(".cu"):
            sources.append(source)
            continue
        copy = "%s_sources/%s.cc" % (name, source.split("/")[-1][:-len(".cu")])
        native.genrule(
            name = copy.replace("/", "_").replace(".", "_"),
            srcs = [source],
            outs = [copy],
            # Reports show lines of the original.
            cmd = "(echo '#line 1 \"$<\"'; cat $<) > $@",
            visibility = ["//visibility:private"],
        )
        sources.append(copy)
    cc_library(
        name = name,
        srcs = sources,
        hdrs = hdrs,
        copts = _KERNEL_COPTS,
        deps = deps + [Label("//mok_core/emulator:kernel_deps")],
        **kwargs
    )

def emulator_test(name, kernels, deps = [], tags = [], **kwargs):
    """A googletest that runs emulated kernels.

    Args:
      name: the test.
      kernels: emulated_kernel_library targets.
      deps: further libraries; //mok_core/device:runtime and the emulator are added.
      tags: further tags. Sanitizers cannot follow the emulator's own stacks and hooks.
      **kwargs: passed to cc_test.
    """
    cc_test(
        name = name,
        tags = tags + ["nosanitizer"],
        deps = deps + kernels + [Label("//mok_core/emulator:test_deps")],
        **kwargs
    )
