"""What of the benchmark runs without GPUs and without its library."""

import ctypes

import pytest

from benchmarks.transport import library, transport
from benchmarks.transport.transfers import Transfer


def test_arguments_have_the_layout_of_the_header():
    assert library.Args.row_bytes.offset == 32
    assert library.Args.rank.offset == 40
    assert library.Args.of_rank.offset == 72
    assert ctypes.sizeof(library.Args) == 72 + 2 * 8 * library.MAX_RANKS


@pytest.mark.parametrize("group", transport.GROUPS)
def test_transfers_are_possible_and_differ(group):
    transfers = transport.GROUPS[group]()
    assert len(set(transfers)) == len(transfers)
    for transfer in transfers:
        assert transfer.side in library.SIDES
        assert transfer.arrival in library.ARRIVALS
        assert max(transfer.rows) <= transport._MAX_ROWS
        assert transfer.warps <= library.MAX_WARPS
        if transfer.mechanism != "copy_engine":
            assert transfer.mechanism in library.MECHANISMS and transfer.sms <= 132


def test_skewed_transfers_move_as_much_in_all():
    assert {sum(transfer.rows) for transfer in transport.skewed()} == {16384}


def test_rates_are_of_the_busiest_direction():
    transfer = Transfer("pull", "bulk", rows=(1000, 10), row_bytes=16000)
    assert transport.Result(transfer, "skewed", 0.1).gigabytes == pytest.approx(160)


def test_tables_and_plot_show_every_sweep(tmp_path):
    results = [
        transport.Result(transfer, group, 1.0 + index)
        for group, make in transport.GROUPS.items()
        for index, transfer in enumerate(make())
    ]
    assert transport.sweep_table(results).row_count == 8
    others = sum(result.group != "sweep" for result in results)
    assert transport.list_table(results).row_count == others
    transport.write_plot(str(tmp_path / "plot.png"), results)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
