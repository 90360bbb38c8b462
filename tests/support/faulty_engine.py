"""The real engine process with a device that fails on demand.

The next step with a prompt fails as the file `fault` beside the model tells, once: memory (too little of it for the
step), device (what a wrong address in a kernel gives). With poison, every step fails that begins a request of seven
tokens, for good.
"""

import sys
from pathlib import Path

import torch

from engine import process
from engine.device.model_runner import ModelRunner


def main() -> int:
    """Run the engine process."""
    forward = ModelRunner.forward
    model = Path(process.msgspec.json.decode(Path(sys.argv[1]).read_bytes())["engine"]["model"])

    def fail_or_forward(self: ModelRunner, plan):
        fault = (model / "fault").read_text() if (model / "fault").exists() else ""
        if fault == "poison" and any(init.params.max_tokens == 7 for init in plan.inits):
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore words.")
        if fault in ("memory", "device") and any(row.token_ids for row in plan.rows):
            (model / "fault").unlink()
            if fault == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore words.")
            if self.device.type == "cuda":
                table = torch.zeros(4, device="cuda")
                table[torch.full((4,), 1 << 20, device="cuda")] += 1.0  # an assertion in a kernel: no call works after
                torch.cuda.synchronize()
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nMore words.")
        return forward(self, plan)

    ModelRunner.forward = fail_or_forward
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
