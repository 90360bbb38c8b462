"""Executor and StepHandle: the interface between the engine's loop and the device. Never imports torch.

forward(plan) launches a step and returns immediately; the caller samples and reads its tokens later through its handle.
ModelRunner is the Executor of one device. RankedExecutor (tensor parallelism) sends the same plan bytes to every rank.
tests/support/fakes.py has an Executor that computes tokens by arithmetic.
"""

from typing import Protocol

from engine.core.step import StepPlan, StepResult, TokenMasks


class StepHandle(Protocol):
    """One step in flight. Call sample() exactly once, then wait() exactly once."""

    def sample(self, masks: TokenMasks | None = None) -> None:
        """Launch the sampling of the rows that sample, after the previous step was committed. Does not block.

        masks: the allowed tokens of constrained rows; None: every row may sample any token.
        """
        ...

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host: the only place where the loop waits for the device."""
        ...


class Executor(Protocol):
    """Runs plans in the order given. A device fault raises out of any method and ends the process.

    If the device has too little memory for a step, any of its methods raises the Engine's memory_error. The step may be
    partly applied: the Engine drops its handle and those of later steps, lists its freed rows again, and initialises
    the rows of continuing requests again.
    """

    def forward(self, plan: StepPlan) -> StepHandle:
        """Apply the plan's frees and inits and launch its forward pass. Does not wait for the device."""
        ...

    def close(self) -> None:
        """Release device memory and ranks."""
        ...
