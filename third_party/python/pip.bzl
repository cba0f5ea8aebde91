"""Helpers of the repository rules that run Python."""

def run(repository_context, command, timeout = 3600):
    """Runs command in the repository's folder and returns what it printed, or fails."""
    result = repository_context.execute(command, timeout = timeout, quiet = True)
    if result.return_code != 0:
        fail("%s\nfailed with exit status %d:\n%s\n%s" % (
            " ".join([str(part) for part in command]),
            result.return_code,
            result.stdout[-2000:],
            result.stderr[-4000:],
        ))
    return result.stdout

def find_python(repository_context):
    """The interpreter that repositories start from: MOK_PYTHON, else python3 on PATH."""
    given = repository_context.os.environ.get("MOK_PYTHON", "")
    python = given or repository_context.which("python3")
    if not python:
        fail("python3 not found: install it, or set MOK_PYTHON to a CPython 3.10 to 3.14")
    return python
