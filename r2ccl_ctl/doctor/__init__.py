"""Checks before a job: of this host (`local`), and between hosts (`hosts`, `agent`)."""
