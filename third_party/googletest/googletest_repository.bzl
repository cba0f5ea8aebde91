"""@googletest from source on disk: GOOGLETEST_SRC, else the Debian package googletest."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "gtest",
    srcs = glob(
        ["googletest/src/*.cc", "googletest/src/*.h", "googlemock/src/*.cc"],
        exclude = [
            "googletest/src/gtest-all.cc",
            "googletest/src/gtest_main.cc",
            "googlemock/src/gmock-all.cc",
            "googlemock/src/gmock_main.cc",
        ],
    ),
    hdrs = glob(["googletest/include/**/*.h", "googlemock/include/**/*.h"]),
    # Its warnings, under sanitizers for one, are not this repository's to mend.
    copts = ["-w"],
    includes = ["googletest", "googletest/include", "googlemock", "googlemock/include"],
    linkopts = ["-lpthread"],
)

# main() that understands both googletest's and googlemock's flags.
cc_library(
    name = "gtest_main",
    srcs = ["googlemock/src/gmock_main.cc"],
    deps = [":gtest"],
)
"""

def _googletest_repository_implementation(repository_context):
    source = repository_context.os.environ.get("GOOGLETEST_SRC", "") or "/usr/src/googletest"
    if not repository_context.path(source + "/googletest/src/gtest-all.cc").exists:
        fail(("no googletest source in %s: start Bazel through ./bazelw, or install the Debian " +
              "package googletest, or set GOOGLETEST_SRC to a checkout") % source)
    for part in ["googletest", "googlemock"]:
        for folder in ["include", "src"]:
            repository_context.symlink(
                "%s/%s/%s" % (source, part, folder),
                "%s/%s" % (part, folder),
            )
    repository_context.file("BUILD.bazel", _BUILD)

googletest_repository = repository_rule(
    implementation = _googletest_repository_implementation,
    environ = ["GOOGLETEST_SRC"],
    local = True,
)
