"""Does a sharded tensor act as the whole tensor, for every operation of torch?

    PYTHONPATH=build/cpu/python:python/tests/etp .venv/bin/python -m opinfo --ranks 2 --differ --grad --operations 60

The oracle is plain torch, in the same process. An operation comes from torch's own OpInfo database, and a sample of its
arguments with it. Each tensor argument in turn, and all of them at once, become sharded parameters theta<i> of a small
module, equal on all ranks; then the operation is called in every mode of `modes.MODES`. Each rank compares what it sees
with plain torch on its own arguments: shapes, dtypes and values of results, which of them share memory with an
argument, arguments after a write, and gradients.

A module each for: options, modes, database and lists (operations), cases (arguments), compare, observe (a call, and
plain torch's), adapters (how a tensor is sharded), faults (mistakes that must be found), verdicts, rank, driver.
"""
