"""What a GPU machine without Bazel needs: programs, wheel, tests, examples, benchmarks.

    ./bazelw run //tools/gpu_bundle -- --output=/path/to/bundle

The wheel is for the CPython of @target_python; docs/build.md says how to choose another one. The
folder is complete: PyTorch is all that the GPU machine has to have. run.sh in it does the rest.
"""

import hashlib
import pathlib
import shutil

from absl import app, flags

_OUTPUT = flags.DEFINE_string("output", None, "The folder to make; absent or empty.", required=True)

# What Bazel has built, by its path from the workspace root.
RUNFILES = pathlib.Path(__file__).absolute().parents[2]

PROGRAMS = {
    "emulator_validation_main": "mok_core/emulator/tests/emulator_validation_main",
    "schedule_gpu_main": "mok_schedule/device/schedule_gpu_main",
    "grouped_gemm_gpu_main": "mok_gemm/sm90/grouped_gemm_gpu_main",
    "backward_gemm_gpu_main": "mok_gemm/sm90/backward_gemm_gpu_main",
    "forward_gpu_main": "mok_megakernel/sm90/forward_gpu_main",
    "backward_gpu_main": "mok_megakernel/sm90/backward_gpu_main",
}
DATA = {"emulator_reference.bin": "mok_core/emulator/tests/emulator_reference.bin"}

# Folder of the bundle: patterns below the workspace root, kept with their paths.
TREES = {
    "tests": ["mok_torch/*_test.py", "mok_torch/*/*_test.py", "mok_torch/*test_support.py"],
    "benchmarks": [
        "benchmarks/*.py",
        *(f"benchmarks/{name}/*.py" for name in ("grouped_gemm", "layer", "transport")),
        "benchmarks/grouped_gemm/libgrouped_gemm.so",
        "benchmarks/transport/libtransport.so",
    ],
    "examples": [
        "examples/__init__.py",
        "examples/train_lm/*.py",
        "examples/data_parallel/*.py",
    ],
}
# Not in the wheel, so not a test of it: mok_torch's own self test is.
_IN_WHEEL = ("mok_torch/self_test.py",)


def contents(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Path inside the bundle: file. Raises FileNotFoundError that names what was not built."""
    files = {"run.sh": root / "tools/gpu_bundle/run.sh"}
    files |= {f"bin/{name}": root / path for name, path in (PROGRAMS | DATA).items()}
    wheels = list(root.glob("mok_torch/*.whl"))
    if len(wheels) != 1:
        raise FileNotFoundError(f"{root}/mok_torch: expected one wheel, got {wheels}")
    files[f"wheel/{wheels[0].name}"] = wheels[0]
    for folder, patterns in TREES.items():
        for pattern in patterns:
            found = [
                path for path in root.glob(pattern) if str(path.relative_to(root)) not in _IN_WHEEL
            ]
            if not found and "*/" not in pattern:
                raise FileNotFoundError(f"{root}: nothing matches {pattern}")
            files |= {f"{folder}/{path.relative_to(root)}": path for path in found}
    for path in files.values():
        if not path.exists():
            raise FileNotFoundError(str(path))
    return files


def make_bundle(root: pathlib.Path, output: pathlib.Path) -> int:
    """Fills `output`, writes its MANIFEST (sha256sum's format); returns the number of files."""
    if output.exists() and any(output.iterdir()):
        raise FileExistsError(f"{output}: expected an absent or empty folder")
    lines = []
    for name, source in sorted(contents(root).items()):
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        runs = name == "run.sh" or name.removeprefix("bin/") in PROGRAMS
        target.chmod(0o755 if runs else 0o644)
        lines.append(f"{hashlib.sha256(target.read_bytes()).hexdigest()}  {name}\n")
    (output / "MANIFEST").write_text("".join(lines))
    return len(lines)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    output = pathlib.Path(_OUTPUT.value)
    if not output.is_absolute():
        raise app.UsageError(
            "--output has to be absolute: `bazel run` starts in a folder of its own"
        )
    count = make_bundle(RUNFILES, output)
    print(f"{output}: {count} files. On the GPU machine: {output.name}/run.sh all")


if __name__ == "__main__":
    app.run(main)
