"""A device that has too little memory for some steps."""

from tests.support.engine_harness import CheckedExecutor


class ScarceExecutor(CheckedExecutor):
    """Runs out of memory where `fails(place, plan)` says so; what was launched and then dropped never runs."""

    def __init__(self, scheduler):
        super().__init__(scheduler)
        self.fails = lambda place, plan: False

    def forward(self, plan):
        while self._launched and not self._launched[-1].is_sampled:  # dropped by the engine
            self._launched.pop()
        self._fail("before forward", plan)
        step = super().forward(plan)
        try:
            self._fail("after forward", plan)
        except MemoryError:
            self._launched.pop()
            raise
        return _ScarceStep(self, step)

    def _fail(self, place, plan):
        if self.fails(place, plan):
            self.num_failures += 1
            raise MemoryError(f"no memory {place}\nand a second line")


class _ScarceStep:
    def __init__(self, executor, step):
        self._executor, self._step = executor, step

    def sample(self, masks=None):
        self._executor._fail("sample", self._step.plan)
        self._step.sample(masks)

    def is_done(self):
        return self._step.is_done()

    def wait(self):
        try:
            self._executor._fail("wait", self._step.plan)
        except MemoryError:
            self._executor._launched.clear()
            raise
        return self._step.wait()
