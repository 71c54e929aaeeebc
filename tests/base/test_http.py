"""What servers ask for is understood and bounded; a trickle is not an answer."""

import time
from email.utils import formatdate

import pytest
from push_helpers import Clock

from ursa_minor.base import http
from ursa_minor.base.http import Unreadable, check_no_html_page, raise_if_stalled, retry_after

SILLY = ("", "²", "-5", "nan", "1e3", "soon", "Wed, 99 Oct 2026 07:28:00 GMT")


def test_retry_after_is_a_number_or_a_date_and_anything_else_is_no_wait():
    assert [retry_after({"Retry-After": asked}) for asked in ("7", " 7 ", "0")] == [7, 7, 0]
    assert retry_after({}) == 0
    assert [retry_after({"Retry-After": asked}) for asked in SILLY] == [0.0] * len(SILLY)
    assert 900 < retry_after({"Retry-After": formatdate(time.time() + 1000, usegmt=True)}) <= 1000
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)
    return clock


def test_an_answer_that_trickles_fails_and_one_that_is_read_slowly_does_not(clock):
    def sent(each: bytes, seconds: float, number: int):
        for _ in range(number):
            clock.sleep(seconds)
            yield each

    with pytest.raises(TimeoutError, match="fewer than 65,536 bytes in 60 seconds"):
        list(raise_if_stalled(sent(b"x", 9, 10**6)))
    assert clock.now == 63
    whole = list(
        raise_if_stalled(sent(b"x" * 2**14, 10, 100))
    )  # 1.6 KB a second, for a quarter of an hour
    assert len(whole) == 100
    for _ in raise_if_stalled(sent(b"x", 1, 20)):
        clock.sleep(100)  # what is waited here, the server has not to answer for


def test_a_page_is_known_by_its_type_and_its_begin_together():
    html = {"Content-Type": "text/html; charset=utf-8"}
    for begin in (b"<!DOCTYPE html><p>", b"\xef\xbb\xbf\n <HTML lang='en'>", b"<html>"):
        with pytest.raises(
            Unreadable, match="the answer of http://h/a looks like a proxy or login page"
        ):
            check_no_html_page(begin, html, "http://h/a")
        check_no_html_page(begin, {"Content-Type": "text/plain"}, "http://h/a")
    for begin in (b"", b"text of <html>", b'{"text": "<html>"}', b"<htmlx>"):
        check_no_html_page(begin, html, "http://h/a")
