"""HTTP answers: Retry-After headers, stalled downloads, and pages of proxies."""

import time
from email.utils import formatdate

import pytest
from push_helpers import Clock

from ursa_minor.base import http
from ursa_minor.base.http import Unreadable, check_no_html_page, raise_if_stalled, retry_after

HTML = {"Content-Type": "text/html; charset=utf-8"}


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Return a clock that only ``sleep`` advances."""
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)
    return clock


def receive(clock, block, *, count, seconds):
    """Yield the block ``count`` times, with a wait of this many seconds before each one."""
    for _ in range(count):
        clock.sleep(seconds)
        yield block


@pytest.mark.parametrize(("value", "seconds"), [("7", 7), (" 7 ", 7), ("0", 0)])
def test_retry_after_may_be_a_number(value, seconds):
    assert retry_after({"Retry-After": value}) == seconds


def test_retry_after_may_be_a_date():
    date = formatdate(time.time() + 1000, usegmt=True)

    assert 900 < retry_after({"Retry-After": date}) <= 1000


@pytest.mark.parametrize(
    "value", ["", "²", "-5", "nan", "1e3", "soon", "Wed, 99 Oct 2026 07:28:00 GMT"]
)
def test_invalid_retry_after_is_zero(value):
    assert retry_after({"Retry-After": value}) == 0.0


def test_past_or_missing_retry_after_is_zero():
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0
    assert retry_after({}) == 0


def test_stalled_download_fails(clock):
    blocks = receive(clock, b"x", count=10**6, seconds=9)

    with pytest.raises(TimeoutError, match="fewer than 65,536 bytes in 60 seconds"):
        list(raise_if_stalled(blocks))

    assert clock.now == 63


def test_slow_download_is_accepted(clock):
    blocks = receive(clock, b"x" * 2**14, count=100, seconds=10)  # 1.6 kB per second

    assert len(list(raise_if_stalled(blocks))) == 100


def test_time_of_the_caller_does_not_count(clock):
    blocks = receive(clock, b"x", count=20, seconds=1)

    for _ in raise_if_stalled(blocks):
        clock.sleep(100)

    assert clock.now == 20 * 101


@pytest.mark.parametrize(
    "content", [b"<!DOCTYPE html><p>", b"\xef\xbb\xbf\n <HTML lang='en'>", b"<html>"]
)
def test_html_page_is_rejected(content):
    with pytest.raises(Unreadable) as caught:
        check_no_html_page(content, HTML, "http://h/a")

    message = str(caught.value)
    assert "http://h/a" in message
    assert "proxy or login page" in message


@pytest.mark.parametrize(
    "content", [b"<!DOCTYPE html><p>", b"\xef\xbb\xbf\n <HTML lang='en'>", b"<html>"]
)
def test_html_is_accepted_as_plain_text(content):
    check_no_html_page(content, {"Content-Type": "text/plain"}, "http://h/a")


@pytest.mark.parametrize("content", [b"", b"text of <html>", b'{"text": "<html>"}', b"<htmlx>"])
def test_other_content_is_accepted_as_html(content):
    check_no_html_page(content, HTML, "http://h/a")
