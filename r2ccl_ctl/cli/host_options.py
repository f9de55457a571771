"""--hosts, --hostfile, --via: other hosts, reached through the user's own ssh, srun or mpirun."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from r2ccl_ctl.cli.common import only_with, some_time
from r2ccl_ctl.errors import R2UsageError
from r2ccl_ctl.remote import PEERS, SSH, parse_hosts

OF_HOSTS = 'Of these hosts, in place of this one; "peers": of all hosts of the jobs here.'


def host_options(
    what: str, *, peers: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The command gets `hosts`, empty for this host alone, and `via`. what: help of --hosts.
    peers: it can find the hosts of a running job."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_hosts(*args: Any, names: str | None, hostfile: Path | None, **rest: Any) -> Any:
            hosts = parse_hosts(names, hostfile)
            if PEERS in hosts and not peers:
                raise R2UsageError("--hosts peers is for ps, status and top: name the hosts here")
            only_with("--via", "--hosts or --hostfile", bool(hosts))
            return command(*args, hosts=hosts, **rest)

        found: Callable[..., Any] = with_hosts
        for option in (
            click.option(
                "--via",
                default=SSH,
                show_default=True,
                metavar="COMMAND",
                help="What starts a helper on a host: ssh, srun or mpirun, with options.",
            ),
            click.option(
                "--hostfile",
                type=click.Path(path_type=Path, dir_okay=False),
                help="The hosts, one at the start of each line.",
            ),
            click.option("--hosts", "names", metavar="A,B,...", help=what),
        ):
            found = option(found)
        return found

    return decorate


def host_timeout(command: Callable[..., Any]) -> Callable[..., Any]:
    """`timeout`: seconds that one host has for its answer."""

    @functools.wraps(command)
    def with_timeout(*args: Any, hosts: list[str], **rest: Any) -> Any:
        only_with("--timeout", "--hosts or --hostfile", bool(hosts))
        return command(*args, hosts=hosts, **rest)

    return click.option(
        "--timeout",
        default="10s",
        show_default=True,
        metavar="DURATION",
        callback=some_time,
        help="How long to wait for a host's answer.",
    )(with_timeout)
