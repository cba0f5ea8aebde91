"""The top level of the repository is fixed: a new entry needs a change of the design."""

PACKAGES = (
    "benchmarks",
    "docs",
    "examples",
    "mok_comm",
    "mok_core",
    "mok_gemm",
    "mok_megakernel",
    "mok_schedule",
    "mok_torch",
    "third_party",
    "tools",
)
FILES = (
    "BUILD",
    "CONTRIBUTING.md",
    "LICENSE",
    "MODULE.bazel",
    "README.md",
    "WORKSPACE",
    "WORKSPACE.bzlmod",
    "bazelw",
)
# Written by Bazel 7 and not committed.
IGNORED = ("MODULE.bazel.lock",)


def check(names):
    """Returns the violations of a list of top-level names (dot files and bazel-* aside)."""
    names = set(names)
    known = set(PACKAGES + FILES)
    unknown = sorted(names - known - set(IGNORED))
    missing = sorted(known - names)
    return [f"{name}: not a top-level entry of the design" for name in unknown] + [
        f"{name}: missing at the top level" for name in missing
    ]
