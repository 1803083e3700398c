"""An object that no reader may build, as its pickle runs a command."""

from __future__ import annotations

import os
from typing import Any


class Evil:
    """Makes the file `evil` in the working directory where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)
