"""A package whose only job is to be packed into a wheel and installed."""

from tools.wheel.chain import _version


def main():
    print(f"built for {_version.python_version()}")
