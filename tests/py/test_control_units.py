"""Numbers with units and kinds of faults. Rung 1."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r2ccl_ctl import units
from r2ccl_ctl.errors import R2Error, R2UsageError
from r2ccl_ctl.faults import parse_kind
from r2ccl_ctl.lab import parse_rate as parse_lab_rate


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("4096", 4096), ("8K", 8192), ("1.5M", 3 << 19), ("2GiB", 2 << 30), ("3 kb", 3072)],
)
def test_sizes(text: str, number: int) -> None:
    assert units.parse_size(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("8bit", 1), ("100mbit", 12_500_000), ("1.5gbit", 187_500_000), ("10MB/s", 10 << 20),
     ("10MB", 10 << 20), ("10MiB/s", 10 << 20), ("800kbit/s", 100_000), ("4096B", 4096),
     ("2MBps", 2 << 20), ("800kbitps", 100_000), (" 1 Gbit/s ", 125_000_000)],
)  # fmt: skip
def test_rates(text: str, number: int) -> None:
    assert units.parse_rate(text) == number


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("30", 30), ("30s", 30), ("5min", 300), ("1h", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(("text", "ppm"), [("1", 10_000), ("0.5%", 5000), ("100%", 1_000_000)])
def test_percentages(text: str, ppm: int) -> None:
    assert units.parse_percent(text) == ppm


@pytest.mark.parametrize("text", ["", "x", "-1", "1 2", "1e3", "5furlongs", "9" * 30, "1..2"])
def test_what_is_no_number(text: str) -> None:
    for parse in (units.parse_size, units.parse_rate, units.parse_percent):
        with pytest.raises(R2UsageError, match="give|range"):
            parse(text)
    if "9" not in text:
        with pytest.raises(R2UsageError, match="give"):
            units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "bits", "size"),
    [("100Mbps", "100mbit", "100MB/s"), ("100mbps", "100mbit", "100MB/s"),
     ("1.5gb/s", "1.5gbit", "1.5GB/s"), ("10MBPS", "10mbit", "10MB/s"), ("10M", "10mbit", "10MB/s"),
     ("10kb", "10kbit", "10KB/s"), ("4096", "4096bit", "4096B/s"), ("70b", "70bit", "70B/s")],
)  # fmt: skip
def test_bits_or_bytes(text: str, bits: str, size: str) -> None:
    """What may be either is refused, by all that takes rates, and what is said instead is taken."""
    says = f"'{text}' may mean bits or bytes: give {bits} or {size}"
    for parse in (units.parse_rate, parse_lab_rate):
        with pytest.raises(R2UsageError, match=f"^{says}$"):
            parse(text)
    assert 0 < units.parse_rate(bits) <= units.parse_rate(size)


@pytest.mark.parametrize("text", ["0B", "0mbit", "0.5bit"])
def test_no_rate_is_no_rate(text: str) -> None:
    with pytest.raises(R2UsageError, match="range"):
        units.parse_rate(text)


def test_kinds() -> None:
    assert parse_kind("blackhole") == ("blackhole", 0, 0)
    assert parse_kind("error") == ("error", 0, 0)
    assert parse_kind("slow=8mbit") == ("slow", 1_000_000, 0)
    assert parse_kind("loss=0.1%") == ("loss", 0, 1000)
    for text in ("", "slow", "slow=", "loss=", "loss=0", "loss=101", "error=1", "fire"):
        with pytest.raises(R2UsageError):
            parse_kind(text)


@given(st.text(max_size=20))
def test_any_text_ends_in_a_number_or_an_error(text: str) -> None:
    for parse in (units.parse_size, units.parse_rate, units.parse_duration, units.parse_percent):
        try:
            assert parse(text) >= 0
        except R2Error as err:
            assert err.exit_code == 2


@given(st.integers(min_value=0, max_value=1 << 62))
def test_what_is_shown_is_short(number: int) -> None:
    assert len(units.show_bytes(number)) <= 12
    assert len(units.show_span(number / 1e9)) <= 14


@pytest.mark.parametrize(
    ("bits", "shown"),
    [(0, ""), (999.4e6, "999 Mbit/s"), (999.7e6, "1 Gbit/s"), (3.2e12, "3.2 Tbit/s"),
     (1e15, "1000 Tbit/s")],
)  # fmt: skip
def test_rates_as_they_are_shown(bits: float, shown: str) -> None:
    assert units.show_rate(bits / 8) == shown


@given(st.datetimes(datetime.datetime(1971, 1, 1), datetime.datetime(2100, 1, 1)))
def test_times(moment: datetime.datetime) -> None:
    moment = moment.replace(tzinfo=datetime.timezone.utc)
    delta = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    real_ns = (delta // datetime.timedelta(microseconds=1)) * 1000
    shown = units.rfc3339(real_ns)
    assert shown.endswith("Z")
    assert datetime.datetime.fromisoformat(shown.replace("Z", "+00:00")) == moment


def test_no_time() -> None:
    assert units.rfc3339(0) == units.rfc3339(2**64 - 1) == ""
