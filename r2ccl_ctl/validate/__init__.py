"""validate: does R2CCL lose nothing on these nodes, and stay quick? NICs fail under collectives.

cases      pure: the matrix of failures, as steps in time.
agent      the helper on each host: starts ranks, injects faults, reads counters and journals.
bed        the hosts: a lab on this machine, or real nodes through ssh, srun or mpirun.
run        plays the cases and keeps a record of each in the results folder.
nccltests  pure: reads what nccl-tests prints.
judge      pure: from a record to a verdict.
report     HTML, Markdown and JSON; picture: bandwidth over time.
"""
