#!/usr/bin/env python3
"""Entry for `make bench`, which runs every tests/bench/bench_*.py. See run.py."""

from run import main

if __name__ == "__main__":
    main()
