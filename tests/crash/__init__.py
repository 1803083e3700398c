"""The crash sweeps: stop a save at each of its file-changing system calls, and ask what is then there.

Here is the engine: `tracer` runs a fork under strace and stops it, `effects` reads traces, `points` and `sweep` record
a transition and stop it at every point, `power` cuts the power, `report` and `main` are the command line. A `suite` is
what is swept: its table of transitions, how a directory is made, and who judges what is left. There are four, in
`saves`, `runs`, `directory_hub` and `ranks`; `scripts/crash_sweep SUITE` runs all of one. In `ranks` there also is a
table of faults of each rank in each phase of a save or load, which `scripts/crash_sweep rank-faults` plays.
"""
