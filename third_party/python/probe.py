"""Prints what the repository rule python_env needs to know about an interpreter, as JSON."""

import importlib.metadata
import importlib.util
import json
import sys
import sysconfig


def _package_folder(name):
    """The folder of an importable package, or "" when it is not installed."""
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec else None
    return next(iter(locations)) if locations else ""


def main():
    distributions = sorted(
        f"{distribution.metadata['Name']}=={distribution.version}"
        for distribution in importlib.metadata.distributions()
    )
    print(
        json.dumps(
            {
                "executable": sys.executable,
                "extension_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
                "implementation": sys.implementation.name,
                "include": sysconfig.get_paths()["include"],
                "platform_tag": sysconfig.get_platform().replace("-", "_").replace(".", "_"),
                "pybind11": _package_folder("pybind11"),
                "stamp": "\n".join([sys.executable, sys.version] + distributions),
                "version": list(sys.version_info[:2]),
            }
        )
    )


if __name__ == "__main__":
    main()
