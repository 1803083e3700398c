"""The import of DeepSpeed, which takes seconds: done once, by the process that the ranks are forks of."""

from __future__ import annotations

import os
from typing import Any


def warm_up() -> None:
    """Import DeepSpeed for a CPU: with float16, which it does not expect there, and without operators to compile."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer  # and torch's inductor, which its first engine imports: 2 s
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.real_accelerator import set_accelerator

    class Accelerator(CPU_Accelerator):  # type: ignore[misc]
        def is_fp16_supported(self) -> bool:
            return True

        def create_op_builder(self, class_name: str) -> Any:
            return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    set_accelerator(Accelerator())
    deepspeed.logger.setLevel("WARNING")
