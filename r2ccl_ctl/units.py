"""Numbers with units, as people type and read them."""

from __future__ import annotations

import datetime
import re

from r2ccl_ctl.errors import R2UsageError

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%/]*)\s*")
_RATE = re.compile(
    r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(bit|b|(?<=[kmgt])ib|)(/s|ps|)\s*", re.IGNORECASE
)
_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TIMES = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "": 1.0,
    "min": 60.0,
    "m": 60.0,
    "h": 3600.0,
}
_LIMIT = 1 << 63
_LONGEST_S = 365 * 24 * 3600.0  # of a duration: as long as a process takes for --for


def _split(text: str, what: str, allowed: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise R2UsageError(f"'{text}' is no {what}: give {allowed}")
    return float(match[1]), match[2].lower()


def parse_size(text: str) -> int:
    """Bytes: 4096, 8K, 1.5M, 2GiB (powers of 1024)."""
    allowed = "bytes, with K, M, G or T if you like"
    number, unit = _split(text, "size", allowed)
    unit = unit.removesuffix("ib") or unit
    unit = unit if unit in _SIZES else unit.removesuffix("b")
    if unit not in _SIZES:
        raise R2UsageError(f"'{text}' is no size: give {allowed}")
    if number * _SIZES[unit] >= _LIMIT:
        raise R2UsageError(f"size '{text}' is out of range: at most 8388607T")
    return int(number * _SIZES[unit])


def rate_bits(text: str, allowed: str) -> float:
    """Bits per second: 100mbit, 1.5gbit/s, 10MB, 10MB/s (bits in powers of 1000, bytes of 1024).
    100Mbps and 100M are refused: to some that is bits, to others (tc) bytes."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise R2UsageError(f"'{text}' is no rate: give {allowed}")
    number, prefix, unit, per = match.groups()
    if not float(number):  # in no unit is that a rate
        raise R2UsageError(f"rate '{text}' is out of range: give more than 0, {allowed}")
    power = " kmgt".index(prefix.lower() or " ")
    if unit.lower() == "bit":
        return float(number) * 1000.0**power
    if "B" not in unit or per == "PS":
        bits, size = f"{number}{prefix.lower()}bit", f"{number}{prefix.upper()}B/s"
        raise R2UsageError(f"'{text}' may mean bits or bytes: give {bits} or {size}")
    return float(number) * 1024.0**power * 8


def parse_rate(text: str) -> int:
    """Bytes per second, of what `rate_bits` takes."""
    rate = rate_bits(text, "for example 100mbit, 1gbit, or bytes per second such as 10MB/s") / 8
    if not 1 <= rate < _LIMIT:
        raise R2UsageError(f"rate '{text}' is out of range: give 1 byte per second to 8388607TB/s")
    return int(rate)


def parse_duration(text: str) -> float:
    """Seconds: 500ms, 30, 30s, 5min, 1h."""
    allowed = "seconds, or a number with ms, s, min or h"
    number, unit = _split(text, "duration", allowed)
    if unit not in _TIMES:
        raise R2UsageError(f"'{text}' is no duration: give {allowed}")
    if number * _TIMES[unit] > _LONGEST_S:
        raise R2UsageError(f"duration '{text}' is out of range: at most a year (8760h)")
    return number * _TIMES[unit]


def parse_percent(text: str) -> int:
    """Parts per million: 1, 1%, 0.5%."""
    allowed = "a percentage above 0, up to 100"
    number, unit = _split(text, "percentage", allowed)
    if unit not in ("", "%") or not 0.5 <= number * 10_000 <= 1_000_000:
        raise R2UsageError(f"'{text}' is no percentage that can be lost: give {allowed}")
    return max(1, round(number * 10_000))


def show_bytes(number: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if number < 1024 or unit == "PiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"


def show_rate(bytes_per_s: float) -> str:
    """Bits per second, as NICs are sold: "9.4 Gbit/s"; "" for none."""
    bits = bytes_per_s * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"):
        if bits < 999.5 or unit == "Tbit/s":  # 999.7 is shown as 1000
            break
        bits /= 1000
    if not bits:
        return ""
    return f"{bits:.3g} {unit}" if bits < 999.5 else f"{bits:.0f} {unit}"


def show_span(seconds: float) -> str:
    """3725 -> "1h 2min"; 0.0213 -> "21 ms"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f}s"
    minutes = int(seconds) // 60
    if minutes < 120:
        return f"{minutes}min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes}min"
    return f"{hours // 24}d {hours % 24}h"


def rfc3339(real_ns: int) -> str:
    """UTC with microseconds; "" for 0 or what no calendar holds."""
    if not 0 < real_ns < 1 << 62:
        return ""
    moment = datetime.datetime.fromtimestamp(real_ns // 10**9, tz=datetime.timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{real_ns % 10**9 // 1000:06d}Z"
