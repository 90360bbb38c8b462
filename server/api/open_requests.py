"""Which POST requests this worker is serving, so that one can be cancelled by its id. Imports server.http.access_log.

AccessLog adds a request's record when it arrives and removes it when its answer is over. How to end it is noted there
by grammar_wait.py first; then, with the answer's id, by routes/answer.py (generations) or routes/embeddings.py.
"""

from server.api.request_record import RequestRecord


class OpenRequests:
    """The records of one worker, in order of arrival."""

    def __init__(self) -> None:
        self._records: dict[int, RequestRecord] = {}  # by id(): two requests may bring the same x-request-id

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: RequestRecord) -> None:
        """A request has arrived."""
        self._records[id(record)] = record

    def remove(self, record: RequestRecord) -> None:
        """Its answer is over."""
        self._records.pop(id(record), None)

    def cancel(self, request_id: str, *, key_hash: str) -> bool:
        """End the requests that have this id or x-request-id and came with this API key; return if there was one.

        One that generates nothing yet ends as soon as it would begin.
        """
        found = False
        for record in self._records.values():
            if request_id in (record.request_id, record.answer_id) and record.key_hash == key_hash:
                found = record.is_cancelled = True
                if record.cancel is not None:
                    record.cancel()
        return found
