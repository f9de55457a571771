"""The demo: NICs are taken away under a running AllReduce, and given back.

    report = run(DemoSpec(), screen)
    report.ok, report.as_dict()

plan      what is asked for, and the phases that follow from it.
feeds     what the running job tells: its windows, its journals, its NICs' counters.
evidence  pure: from journals to "traffic resumed after so many milliseconds".
stage     starts the job, plays the phases, cleans up.
report    the verdict, as dictionary and as tables; picture: as PNG; screen: while it runs.
"""

from r2ccl_ctl.demo.plan import DemoSpec
from r2ccl_ctl.demo.report import Report
from r2ccl_ctl.demo.stage import run
from r2ccl_ctl.interrupts import Interrupted

__all__ = ["DemoSpec", "Interrupted", "Report", "run"]
