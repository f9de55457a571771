"""r2ccl-ctl: see and steer the R2CCL of running jobs, and try it out."""

__version__ = "0.1.0"
