"""Packs files into a wheel (PEP 427): the same input gives the same bytes."""

import argparse
import base64
import hashlib
import os
import sys
import zipfile

# The earliest time that a zip file can state.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def _read(path):
    with open(path, "rb") as file:
        return file.read()


def _record_hash(data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def _metadata(options):
    lines = [
        "Metadata-Version: 2.1",
        "Name: " + options.name,
        "Version: " + options.version,
    ]
    if options.summary:
        lines.append("Summary: " + options.summary)
    if options.license:
        lines.append("License: " + options.license)
    lines += ["License-File: " + os.path.basename(path) for path in options.license_file]
    lines.append("Requires-Python: " + options.python_requires)
    lines += ["Requires-Dist: " + requirement for requirement in options.requires]
    text = "\n".join(lines) + "\n"
    if options.description:
        text = text + "Description-Content-Type: text/markdown\n\n"
        text = text + _read(options.description).decode()
    return text.encode()


def _wheel_file(tag):
    return (
        "Wheel-Version: 1.0\n"
        "Generator: mok\n"
        f"Root-Is-Purelib: {str(tag.endswith('-none-any')).lower()}\n"
        f"Tag: {tag}\n"
    ).encode()


def _members(options):
    """[(path in the wheel, bytes)], RECORD last as PEP 427 recommends."""
    info = f"{options.name.replace('-', '_')}-{options.version}.dist-info/"
    members = []
    for specification in sorted(options.file):
        path, source = specification.split("=", 1)
        members.append((path, _read(source)))
    members += [(info + os.path.basename(path), _read(path)) for path in options.license_file]
    members.append((info + "METADATA", _metadata(options)))
    members.append((info + "WHEEL", _wheel_file(options.tag)))
    if options.script:
        scripts = "".join(f"{script.replace('=', ' = ', 1)}\n" for script in options.script)
        members.append((info + "entry_points.txt", f"[console_scripts]\n{scripts}".encode()))
    record = "".join(f"{path},{_record_hash(data)},{len(data)}\n" for path, data in members)
    members.append((info + "RECORD", f"{record}{info}RECORD,,\n".encode()))
    return members


def _parse(arguments):
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    for name in ("out", "name", "version", "tag", "python-requires"):
        parser.add_argument("--" + name, required=True)
    for name in ("summary", "license", "description"):
        parser.add_argument("--" + name, default="")
    for name in ("requires", "script", "file", "license-file"):
        parser.add_argument("--" + name, action="append", default=[])
    return parser.parse_args(arguments)


def main(arguments):
    options = _parse(arguments)
    with zipfile.ZipFile(options.out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in _members(options):
            entry = zipfile.ZipInfo(path, _TIMESTAMP)
            mode = 0o755 if path.endswith(".so") else 0o644
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)


if __name__ == "__main__":
    main(sys.argv[1:])
