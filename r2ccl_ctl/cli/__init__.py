"""The commands of r2ccl-ctl: they parse and print; what they do lives in the other modules."""
