"""The lab (docs/testing.md): nodes as network namespaces, NICs as veth pairs, rails as bridges."""

from r2ccl_ctl.lab.core import FAIL_MODES, Lab, remove
from r2ccl_ctl.lab.spec import (
    DEFAULT_NAME,
    DIRECTIONS,
    VARIANTS,
    LabError,
    LabSpec,
    LabUsageError,
    format_rate,
    parse_counts,
    parse_rate,
    parse_rates,
)
from r2ccl_ctl.lab.state import known_labs, known_nics

__all__ = [
    "DEFAULT_NAME",
    "DIRECTIONS",
    "FAIL_MODES",
    "VARIANTS",
    "Lab",
    "LabError",
    "LabSpec",
    "LabUsageError",
    "format_rate",
    "known_labs",
    "known_nics",
    "parse_counts",
    "parse_rate",
    "parse_rates",
    "remove",
]
