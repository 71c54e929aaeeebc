"""What servers ask for is understood and bounded; a log-in page is not an answer."""

import time
from email.utils import formatdate

import pytest

from pretrain.base.network import Unreadable, refuse_page, retry_after

SILLY = ("", "²", "-5", "nan", "1e3", "soon", "Wed, 99 Oct 2026 07:28:00 GMT")


def test_retry_after_is_a_number_or_a_date_and_anything_else_is_no_wait():
    assert [retry_after({"Retry-After": asked}) for asked in ("7", " 7 ", "0")] == [7, 7, 0]
    assert retry_after({}) == 0
    assert [retry_after({"Retry-After": asked}) for asked in SILLY] == [0.0] * len(SILLY)
    assert 900 < retry_after({"Retry-After": formatdate(time.time() + 1000, usegmt=True)}) <= 1000
    assert retry_after({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}) == 0


def test_a_page_is_known_by_its_type_and_its_begin_together():
    html = {"Content-Type": "text/html; charset=utf-8"}
    for begin in (b"<!DOCTYPE html><p>", b"\xef\xbb\xbf\n <HTML lang='en'>", b"<html>"):
        with pytest.raises(Unreadable, match="the answer of http://h/a looks like a proxy's or log-in page"):
            refuse_page(begin, html, "http://h/a")
        refuse_page(begin, {"Content-Type": "text/plain"}, "http://h/a")
    for begin in (b"", b"text of <html>", b'{"text": "<html>"}', b"<htmlx>"):
        refuse_page(begin, html, "http://h/a")
