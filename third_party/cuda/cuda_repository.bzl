"""@local_cuda: the CUDA toolkit of CUDA_HOME, else of the usual places; empty without one."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(
        [
            "include/*.h",
            "include/*.hpp",
            "include/cccl/**",
            "include/cooperative_groups/**",
            "include/crt/**",
            "include/nvtx3/**",
        ],
        allow_empty = True,
    ),
    includes = ["include", "include/cccl"],
)

cc_library(
    name = "cudart_static",
    srcs = glob(["lib64/libcudart_static.a"], allow_empty = True),
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    deps = [":headers"],
)
"""

def _find_toolkit(repository_context):
    """Returns (home, version), or ("", "") when there is no toolkit."""
    cuda_home = repository_context.os.environ.get("CUDA_HOME", "")
    if cuda_home:
        # A set CUDA_HOME is final: pointing it at an empty folder builds without CUDA.
        candidates = [cuda_home]
    else:
        candidates = ["/usr/local/cuda", "/opt/cuda", "/usr/lib/cuda"]
        nvcc = repository_context.which("nvcc")
        if nvcc:
            candidates.append(str(nvcc.realpath.dirname.dirname))
    for home in candidates:
        nvcc = repository_context.path(home + "/bin/nvcc")
        if not nvcc.exists:
            continue
        result = repository_context.execute([nvcc, "--version"])
        if result.return_code == 0 and "release " in result.stdout:
            return home, result.stdout.split("release ")[1].split(",")[0]
    return "", ""

def _cuda_repository_implementation(repository_context):
    home, version = _find_toolkit(repository_context)
    if home:
        repository_context.symlink(home + "/include", "include")
        repository_context.symlink(home + "/lib64", "lib64")
    repository_context.file("BUILD.bazel", _BUILD)
    repository_context.file("defs.bzl", """
CUDA_AVAILABLE = {available}
CUDA_HOME = "{home}"
CUDA_VERSION = "{version}"
""".format(available = bool(home), home = home, version = version))

cuda_repository = repository_rule(
    implementation = _cuda_repository_implementation,
    environ = ["CUDA_HOME"],
    configure = True,
    local = True,
)
