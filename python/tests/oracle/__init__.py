"""The oracle: torch, over real gloo processes, says what every rank must hold; Tessera has to give the same bits.

`cases` draws random cases, `reference` lets torch produce both sides of each, `worker` is one process of a launch (of
both jobs, where it is a rank of both), `launching` starts the processes and collects what they saw, `verdict` compares.
"""
