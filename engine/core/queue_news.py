"""QueueNews: tells every HTTP worker whether the queue is full, and what the forecast has measured. Never torch.

Workers refuse requests while it is full. They hand the costs to the next engine, whose first forecasts would know
nothing otherwise.
"""

from engine.core.outputs import Transport
from engine.core.queue_forecast import QueueForecast
from engine.core.queue_limits import QueueLimits
from engine.interface.protocol import QueueState

_COSTS_S = 1.0  # between two tellings of the costs


class QueueNews:
    """The news that have been told."""

    def __init__(self, limits: QueueLimits, forecast: QueueForecast, transport: Transport) -> None:
        self._limits = limits
        self._forecast = forecast
        self._transport = transport
        self._is_full = False
        self._num_steps = 0  # measured when the costs were told
        self._next_costs_s = 0.0

    def tell(self, now: float) -> None:
        """Send QueueState when the queue becomes full or has room again, and QueueCosts if there are new ones."""
        is_full = self._limits.is_full
        if is_full != self._is_full:
            self._is_full = is_full
            self._transport.broadcast(QueueState(is_full, self._limits.retry_after_s()))
        if now >= self._next_costs_s and self._forecast.num_steps > self._num_steps:
            self._next_costs_s = now + _COSTS_S
            self._num_steps = self._forecast.num_steps
            self._transport.broadcast(self._forecast.costs())
