"""Workers that are spawned import the script anew, and have what it installs at its top."""

from __future__ import annotations

from pathlib import Path

from tests.cli.programs import by_python, without_hfshard_on

SCRIPT = """
import multiprocessing

import hfshard

hfshard.install(verify="full", checksum="xxh3")

def look(_):
    from hfshard.models.install_settings import current_settings
    return current_settings()

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(*pool.map(look, range(2), chunksize=1))
"""


def test_spawned_workers_have_what_their_script_installs(tmp_path: Path, child_environment: dict[str, str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    done = by_python(["script.py"], tmp_path, without_hfshard_on(child_environment))

    settings = "Settings(verify='full', checksum='xxh3')"
    assert (done.returncode, done.stdout) == (0, f"{settings} {settings}\n"), done.stderr
    assert done.stderr.count("\n") == 1
