"""Tests the wheel packer on made-up files."""

import zipfile

from tools.wheel import make_wheel


def _pack(folder, out_name):
    (folder / "module.py").write_text("ANSWER = 42\n")
    (folder / "LICENSE").write_text("free\n")
    (folder / "README.md").write_text("# A wheel\n")
    out = folder / out_name
    make_wheel.main(
        [
            f"--out={out}",
            "--name=made-up",
            "--version=1.2",
            "--tag=py3-none-any",
            "--summary=a summary",
            "--license=Apache-2.0",
            "--python-requires=>=3.10",
            "--requires=torch>=2.8",
            "--requires=numpy",
            "--script=made-up=made_up.module:main",
            f"--license-file={folder / 'LICENSE'}",
            f"--description={folder / 'README.md'}",
            f"--file=made_up/module.py={folder / 'module.py'}",
        ]
    )
    return out


def test_members_and_metadata(tmp_path):
    with zipfile.ZipFile(_pack(tmp_path, "a.whl")) as wheel:
        info = "made_up-1.2.dist-info/"
        assert wheel.namelist() == [
            "made_up/module.py",
            info + "LICENSE",
            info + "METADATA",
            info + "WHEEL",
            info + "entry_points.txt",
            info + "RECORD",
        ]
        headers, description = wheel.read(info + "METADATA").decode().split("\n\n", 1)
        assert description == "# A wheel\n"
        assert "Name: made-up\nVersion: 1.2\n" in headers
        assert "Requires-Python: >=3.10\nRequires-Dist: torch>=2.8\nRequires-Dist: numpy" in headers
        assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in wheel.read(info + "WHEEL").decode()
        scripts = wheel.read(info + "entry_points.txt").decode()
        assert scripts == "[console_scripts]\nmade-up = made_up.module:main\n"
        assert wheel.read(info + "RECORD").decode().endswith(f"{info}RECORD,,\n")


def test_same_input_gives_same_bytes(tmp_path):
    first = _pack(tmp_path, "first.whl").read_bytes()
    assert first == _pack(tmp_path, "second.whl").read_bytes()
