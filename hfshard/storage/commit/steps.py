"""The steps that a commit consists of, and the list of them that a plan builds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

TRANSFORMERS: Final = "hfshard and transformers"
HUB: Final = "huggingface_hub"
"""The two kinds of readers, which look for the weights in different orders."""


@dataclass(frozen=True, slots=True)
class CommitStep:
    """One change of the directory."""

    kind: Literal["rename", "link", "remove", "sync"]
    """rename: move a staged file into place; link: give a file a second name; sync: make all steps before durable."""
    target: str = ""
    source: str = ""
    is_commit: bool = False
    """From this step on every reader finds the new checkpoint. An error up to here is rolled back."""
    moves: str = ""
    """Who finds the new checkpoint from this step on, where the others follow with the commit; in words."""


@dataclass
class CommitPlan:
    """The steps of one commit, and the bytes of the small files that they move into place."""

    steps: list[CommitStep] = field(default_factory=list)
    small_files: dict[str, bytes] = field(default_factory=dict)
    """Name in the staging directory -> bytes."""

    def write_small(self, target: str, content: bytes, *, is_commit: bool = False, moves: str = "") -> None:
        """Stage a small file and rename it into place."""
        staged = f"{len(self.small_files):03d}.small"
        self.small_files[staged] = content
        self.steps.append(CommitStep("rename", target, staged, is_commit, moves))

    def rename(self, files: Mapping[str, str], *, is_commit: bool = False, moves: str = "") -> None:
        """Rename staged files into place; if they are the commit, the last one decides."""
        last = list(files)[-1:]
        self.steps.extend(
            CommitStep("rename", target, staged, is_commit and [target] == last, moves)
            for target, staged in files.items()
        )

    def link(self, source: str, target: str) -> None:
        """Give a file in the directory a second name, replacing the file that has it."""
        self.steps.append(CommitStep("link", target, source))

    def remove(self, targets: Iterable[str], *, is_commit: bool = False) -> None:
        """Remove files, in the order of their names; the commit is the removal of a single one."""
        self.steps.extend(CommitStep("remove", target, is_commit=is_commit) for target in sorted(targets))

    @property
    def to_commit(self) -> list[CommitStep]:
        """The steps up to the commit."""
        return self.steps[: next(number for number, step in enumerate(self.steps, 1) if step.is_commit)]

    def sync(self) -> None:
        """Make the steps before durable before any step after; nothing where there is nothing to sync."""
        if self.steps and self.steps[-1].kind != "sync":
            self.steps.append(CommitStep("sync"))
