"""What a server's answer asks of its client."""

from collections.abc import Iterator


def causes(error: BaseException | None, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yield an error and those behind it, each once.

    Args:
        contexts: also one that was met while another was handled; some libraries name no cause.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if contexts else None)


def answer_of(error: BaseException | None, *, contexts: bool = False) -> tuple[int | None, float]:
    """Return the HTTP status behind an error (None: there was no answer), and the seconds that its Retry-After asks for.

    Args:
        contexts: as ``causes`` has it.
    """
    for one in causes(error, contexts=contexts):
        answer = getattr(one, "response", None)
        status = getattr(one, "status", None) or getattr(answer, "status_code", None)
        if isinstance(status, int) and not _is_garbled(one):
            headers = getattr(one, "headers", None) or getattr(answer, "headers", None) or {}
            asked = str(headers.get("Retry-After", ""))
            return status, float(asked) if asked.isdigit() else 0.0
    return None, 0.0


def _is_garbled(error: BaseException) -> bool:
    # Of an answer that it cannot parse aiohttp says status 400, which no server has said.
    return any(kind.__name__ == "HttpProcessingError" for kind in type(error.__cause__).__mro__)
