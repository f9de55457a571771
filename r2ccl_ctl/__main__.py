"""python -m r2ccl_ctl: the same as r2ccl-ctl."""

from r2ccl_ctl.cli.main import main

main(prog_name="r2ccl-ctl")
