"""The temporary directory in which ranks put the files of one push, and which of them see it."""

from __future__ import annotations

from dataclasses import dataclass

from hfshard.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class StagingFolder:
    """A temporary directory for the files of one push."""

    path: str
    seen_by: tuple[int, ...] = ()
    """The ranks that may write there; those of other machines may not see it."""
    unseen_by: tuple[int, ...] = ()

    def refuse_unseen(self) -> None:
        """Refuse to go on where a rank is needed that does not see it.

        Raises:
            InvalidArgumentError: It names one.
        """
        if self.unseen_by:
            raise InvalidArgumentError(
                f"Rank {self.unseen_by[0]} does not see '{self.path}' of rank {self.seen_by[0]}, by way of which this "
                f"model is pushed. Nothing was pushed: {elsewhere('all ranks see')}",
                path=self.path,
            )


def elsewhere(need: str) -> str:
    """What to do where the temporary directory does not serve, for a message.

    Args:
        need: What the right one does: "has more space".
    """
    return (
        f"set TMPDIR on rank 0 to a directory that {need}; or call save_pretrained on every rank and then, on one, "
        "hfshard.push_checkpoint."
    )
