"""Files that a benchmark writes are refused at once, or lie where the user is."""

import pytest
from absl import flags

from benchmarks import outputs


@pytest.fixture
def values(monkeypatch):
    """Flags of its own, parsed from arguments."""
    own = flags.FlagValues()
    for define in (flags.DEFINE_string, flags.register_validator):
        options = {"flag_values": own}
        monkeypatch.setattr(
            flags,
            define.__name__,
            lambda *arguments, define=define, options=options: define(*arguments, **options),
        )
    json, plot = outputs.define_json(), outputs.define_plot("curves")

    def parse(*arguments):
        own(["benchmark", *arguments])
        return outputs.output_path(json.value), outputs.output_path(plot.value)

    return parse


def test_files_lie_where_the_user_is(values, tmp_path, monkeypatch):
    assert values() == (None, None)
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    paths = values("--json=a.json", "--plot=a.png")
    assert paths == (str(tmp_path / "a.json"), str(tmp_path / "a.png"))


@pytest.mark.parametrize("flag", ["json", "plot"])
def test_what_cannot_be_written_is_refused(values, flag, tmp_path):
    with pytest.raises(flags.IllegalFlagValueError, match=f"flag --{flag}=.*cannot be written"):
        values(f"--{flag}={tmp_path}/nowhere/a.png")


def test_plots_have_a_format(values, tmp_path):
    with pytest.raises(flags.IllegalFlagValueError, match=r"must end in \.png, \.pdf, \.svg"):
        values(f"--plot={tmp_path}/a.foo")


def test_results_of_before_stay_until_there_are_new_ones(values, tmp_path):
    old = tmp_path / "a.json"
    old.write_text("old")
    values(f"--json={old}")
    assert old.read_text() == "old"
