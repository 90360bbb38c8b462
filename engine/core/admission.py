"""From a message to a Request: what the engine itself checks of one, since a wrong id would be a fault of the device.

Plain Python; never torch.
"""

from collections.abc import Callable

from engine.core.pooling import PooledPrompt
from engine.core.request import Request
from engine.core.speculative import Drafter
from engine.interface.errors import InvalidParameter, UnsupportedFeature
from engine.interface.protocol import AddRequest


class Admission:
    """What a model takes; the arguments are those of Engine."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_loras: int,
        can_generate: bool,
        make_drafter: Callable[[Request], Drafter | None] | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._num_loras = num_loras
        self._can_generate = can_generate
        self._make_drafter = make_drafter

    def request(self, message: AddRequest, *, client_id: int) -> Request:
        """Make the request. Raises InvalidParameter or UnsupportedFeature."""
        self._check_ids(message.prompt_token_ids, "prompt")
        self._check_ids(message.params.logit_bias, "logit_bias")
        self._check_ids(message.params.stop_token_ids, "stop_token_ids")
        if not 0 <= message.lora_index <= self._num_loras:
            raise InvalidParameter(
                f"There is no adapter {message.lora_index}; {self._num_loras} are loaded.", param="model"
            )
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.params,
            arrival_s=message.arrival_s,
            cache_salt=message.cache_salt,
            priority=message.priority,
            client_id=client_id,
            lora_index=message.lora_index,
        )
        if message.pooling is not None:
            request.pooled = PooledPrompt(message.pooling, len(message.prompt_token_ids))
        elif not self._can_generate:
            raise UnsupportedFeature("This model has no language-model head: it makes embeddings and no text.")
        elif message.grammar is None and self._make_drafter is not None:
            request.drafter = self._make_drafter(request)
        return request

    def _check_ids(self, token_ids: list[int] | dict[int, float], name: str) -> None:
        """Raise InvalidParameter unless all ids exist."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidParameter(
                f"Token id {wrong} is outside the vocabulary of {self._vocab_size} tokens.", param=name
            )
