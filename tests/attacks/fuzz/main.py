"""The command line of the fuzzer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

DESCRIPTION = """\
Change files of whole checkpoints, training runs and directory hubs, and read them. Each case must end in one
HfshardError that names the file, or give the bytes that stand in the files. The same seed runs the same cases."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="fuzz_readers", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--cases", type=int, default=20_000, metavar="N", help="how many; default: %(default)s")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="decides all cases; default: %(default)s")
    made.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first case")
    made.add_argument("--batch", type=int, default=2_000, metavar="N", help="cases in one child process")
    made.add_argument("--base", action="append", metavar="NAME", help="only these checkpoints; may be repeated")
    made.add_argument("--show", type=int, default=20, metavar="N", help="findings to print")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the counts and all findings there")
    made.add_argument("--keep", type=Path, metavar="DIR", help="write the file that case --first changes there")
    made.add_argument("--table", action="store_true", help="print what came of each reader of each checkpoint")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases; 0 where none is a finding."""
    options = parser().parse_args(argv)
    import torch

    from tests.attacks.files import raw
    from tests.attacks.fuzz.bases import all_bases
    from tests.attacks.fuzz.cases import Fuzzer
    from tests.attacks.fuzz.runner import Report, run_cases, work_folder

    torch.set_num_threads(1)
    bases = {name: base for name, base in all_bases().items() if not options.base or name in options.base}
    start = time.monotonic()
    report = Report()
    with work_folder() as folder:
        fuzzer = Fuzzer(bases, Path(folder), options.seed)
        if options.keep is not None:
            raw.write(options.keep, fuzzer.describe(options.first))
            print(fuzzer.run(options.first))
            return 0
        numbers = range(options.first, options.first + options.cases)
        for report in run_cases(fuzzer, numbers, options.batch):
            if options.json is not None:
                counts = {"cases": report.done, "counts": report.counts, "by_base": report.by_base}
                found = {"findings": [asdict(finding) for finding in report.findings]}
                options.json.write_text(json.dumps({"seed": options.seed, **counts, **found}, indent=1))
            if sys.stderr.isatty():
                print(f"\r{report.done:,} cases, {len(report.findings)} findings", end="", file=sys.stderr)
    seconds = time.monotonic() - start
    shown = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.counts.items()))
    print(f"{report.done:,} cases (seed {options.seed}) in {seconds:,.0f} s: {shown}")
    if options.table:
        print("\n".join(f"{count:9,}  {name}" for name, count in sorted(report.by_base.items())))
    for finding in report.findings[: options.show]:
        print(finding)
    return 1 if report.findings else 0
