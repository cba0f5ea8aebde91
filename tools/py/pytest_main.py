"""Entry point of pytest_test targets: translates Bazel's test protocol for pytest."""

import os
import pathlib
import sys

import pytest


class _Shard:
    """Keeps every total-th test, starting with this shard's index."""

    def __init__(self, total, index):
        self._total = total
        self._index = index

    def pytest_collection_modifyitems(self, items):
        items[:] = items[self._index :: self._total]


def main():
    environment = os.environ
    arguments = sys.argv[1:] + ["-p", "no:cacheprovider", "--import-mode=importlib", "-ra"]
    if environment.get("XML_OUTPUT_FILE"):
        arguments.append("--junitxml=" + environment["XML_OUTPUT_FILE"])
    if environment.get("TESTBRIDGE_TEST_ONLY"):
        arguments += ["-k", environment["TESTBRIDGE_TEST_ONLY"]]
    if environment.get("TEST_TMPDIR"):
        temporary = environment["TEST_TMPDIR"]
        # The sandbox hides the home folder; caches and example databases go to the test's own.
        environment.setdefault("HOME", temporary)
        environment.setdefault("MPLCONFIGDIR", os.path.join(temporary, "matplotlib"))
        environment.setdefault(
            "HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(temporary, "hypothesis")
        )
        arguments.append("--basetemp=" + os.path.join(temporary, "pytest"))
    plugins = []
    if environment.get("TEST_SHARD_STATUS_FILE"):
        # Tells Bazel that this runner understands sharding.
        pathlib.Path(environment["TEST_SHARD_STATUS_FILE"]).touch()
        total = int(environment["TEST_TOTAL_SHARDS"])
        plugins.append(_Shard(total, int(environment["TEST_SHARD_INDEX"])))
    code = pytest.main(arguments, plugins=plugins)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and plugins:
        # More shards than tests: an empty shard is no failure.
        code = 0
    return code


if __name__ == "__main__":
    sys.exit(main())
