"""What a server's answer asks of its client."""


def answer_of(error: BaseException | None, *, contexts: bool = False) -> tuple[int | None, float]:
    """Return the HTTP status behind an error (None: there was no answer), and the seconds that its Retry-After asks for.

    Args:
        contexts: also of an error that was met while another was handled; some libraries name no cause.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        answer = getattr(error, "response", None)
        status = getattr(error, "status", None) or getattr(answer, "status_code", None)
        if isinstance(status, int):
            headers = getattr(error, "headers", None) or getattr(answer, "headers", None) or {}
            asked = str(headers.get("Retry-After", ""))
            return status, float(asked) if asked.isdigit() else 0.0
        error = error.__cause__ or (error.__context__ if contexts else None)
    return None, 0.0
