"""Words from outside are shown without secrets and steer no terminal; a file behind a renewed signature is known again."""

import io
import logging
import random
import re
import string
import sys
import threading
import warnings
from urllib.parse import quote

import pytest

from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.base.foreign import PROOFS, clean, guard, is_redacted, is_url, one_line, redact, redact_url

SECRET = "S3cr3t-%2F+value="
PLAIN = [
    "https://host/a/b.parquet",
    "http://[::1]:8000/files/a[1].csv",
    "hf://datasets/owner/name@main/data/*.parquet",
    "hub://owner/name@step-00005000",
    "https://host/@scope/a@b:c.csv",
    "file:///data/a.txt",
]


def test_what_has_no_secrets_stays_as_it_is_also_in_a_sentence():
    for url in PLAIN:
        assert redact_url(url) == url and is_url(url) and not is_redacted(url)
        for sentence in (f"{url}: row 3: failed", f"see {url}, and '{url}'.", f"({url})", f"[URL('{url}')]", url):
            assert redact(sentence) == sentence
    for text in ("", "a?b=c", "data/a?.jsonl: no such file", "what is left? x=1", "://", "a: //b?c=d", "C:\\a?b"):
        assert redact(text) == text


def test_user_password_and_query_are_left_out_and_that_is_said():
    for url, shown in (
        ("https://h/x.txt?token=S", "https://h/x.txt?redacted"),
        ("https://u:S@h/x.txt", "https://redacted@h/x.txt"),
        ("https://u@h:1/x.txt", "https://redacted@h:1/x.txt"),
        ("https://u:S@S@h/x.txt?a", "https://redacted@h/x.txt?redacted=ca978112ca1b"),
        ("s3://K:S@bucket/x.parquet?versionId=1", "s3://redacted@bucket/x.parquet?redacted=3019f043e2de"),
        ("https://h/x.csv#S", "https://h/x.csv"),
        ("https://h/x.csv?sig=S#S", "https://h/x.csv?redacted"),
        ("HTTPS://u:S@H/X?SIG=S", "HTTPS://redacted@H/X?redacted"),
    ):
        assert redact_url(url) == shown == redact_url(shown) == redact(url)
        assert is_redacted(shown) == ("redacted" in shown) and not is_redacted(url)
    # Where a password has no clear end nothing is shown.
    for url in ("https://u:S/S@h/x", "https://u:S?S@h/x", "https://u:S#S@h/x?y", "https://[S/x", "https://u:S\\@S:S/x"):
        assert redact_url(url) == "https://redacted" and not is_url(url)
    for url in ("https://h/a b", "https://h/x?t=a b", 'https://h/x?t="S"', "https://h/x?t=<S>", "https://h/\n"):
        assert not is_url(url)  # clients would read it differently


def test_no_piece_of_a_secret_is_left_whatever_stands_around_it():
    draw = random.Random(1)
    legal = string.ascii_letters + string.digits + "-._~%!$&'()*+,;=:@/?#[]"
    around = [("", ""), ("cannot open ", ": 403"), ("url='", "'"), ("['", "', 'a']"), ("(", "), ")]
    for _ in range(3000):
        secret = "Zq" + "".join(draw.choices(legal, k=draw.randint(1, 20))) + "Zq"
        as_user = re.sub(r"[/?#\[\]]", "", secret)
        urls = [f"x?a=1&b={secret}", f"x?{secret}", f"x#{secret}", f"me:{as_user}@h/x"]
        url = draw.choice(["https://h/" + url if url[0] == "x" else "https://" + url for url in urls])
        before, after = draw.choice(around)
        shown = redact(f"{before}{url}{after}")
        assert "Zq" not in shown and shown.startswith(f"{before}https://"), (url, shown)


def test_a_renewed_signature_is_the_same_file_and_another_file_another():
    aws = "https://b.s3.amazonaws.com/x.parquet?versionId=7&X-Amz-Date={0}&X-Amz-Credential={0}&X-Amz-Signature={0}"
    azure = "https://a.blob.core.windows.net/c/x.parquet?sv={0}&se={0}&sr=b&sp=r&sig={0}"
    cloud = "https://cdn.h/x.parquet?Expires={0}&Signature={0}&Key-Pair-Id={0}&Policy={0}"
    google = "https://storage.googleapis.com/b/x.parquet?X-Goog-Expires={0}&X-Goog-Signature={0}"
    own = "https://me:{0}@h/x.parquet?access_token={0}&file=a&API-KEY={0}"
    for url in (aws, azure, cloud, google, own):
        assert redact_url(url.format("1")) == redact_url(url.format("2")), url
    for name in PROOFS.split():
        assert redact_url(f"https://h/x?{name}=1") == "https://h/x?redacted"
    urls = [
        f"https://h/{path}?{query}" for path in ("x", "y") for query in ("v=1", "v=2", "v=1&w=1", "st=1", "token=1")
    ]
    urls += ["https://g/x?v=1", "http://h/x?v=1", "https://h/x", "https://me@h/x?v=1"]
    assert len(set(map(redact_url, urls))) == len(urls) and redact_url("https://h/x?") == "https://h/x"
    assert redact_url("https://h/x?a=1&token=2&b=3") == redact_url("https://h/x?b=3&a=1")


def test_what_clients_say_of_a_request_without_its_host_or_of_a_login_holds_no_secret(monkeypatch):
    monkeypatch.setenv("A_TOKEN", SECRET[:10])
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    said = [
        f"Max retries exceeded with url: /x.csv?Policy={SECRET}&v=1 (Caused by SSLError())",
        f'"GET /a/x?X-Amz-Signature={SECRET} HTTP/1.1" 403 0',
        rf"""{{"next": "http:\/\/me:{SECRET}@h\/x"}}""",
        "headers: {'Authorization': 'Bearer S3cr3t.x-y'}",
        "the token hf_S3cr3tS3cr3tS3cr3tS3cr3t may not write",
        rf"""'{{"next": "http:\\/\\/me:{SECRET}@h\\/x"}}'""",
        f"http%3A%2F%2Fme%3A{quote(SECRET, safe='')}%40h%2Fx%3Ftoken%3D{SECRET}",
        "https://proxy/http%3a%2f%2fme%3aS3cr3t%40h, https://h/a,https://me:S3cr3t@h/b, //me:S3cr3t@h",
        "[(b'Authorization', b'Bearer S3cr3t'), (b'cookie', b'a=S3cr3t; b=S3cr3t')]",
        "AUTHORIZATION: token S3cr3t\nSet-Cookie: sid=S3cr3t; Path=/",
        f"you sent {SECRET}; true or false",
    ]
    for words in said:
        assert "S3cr3t" not in redact(words) and redact(redact(words)) == redact(words), redact(words)
    assert redact(said[-1]) == "you sent (HF_TOKEN); true or false"


def test_control_characters_are_written_out_and_letters_of_any_script_stay():
    odd = "a\x1b[2J\x1bc\r\x07\x9b\x7f\u202egnp.\u2066\u2028"
    assert clean(odd) == "a\\x1b[2J\\x1bc\\r\\x07\\x9b\\x7f\\u202egnp.\\u2066\\u2028" == clean(clean(odd))
    plain = "a\tb\nशब्द को \u200d 한국어 עברית\u200f 👩\u200d🔬 é"
    assert clean(plain) == plain and one_line(" a\n  b\tc  d.txt\n") == "a b c  d.txt"
    assert str(BadInput("x\n\x1b]0;mine\x07")) == "x \\x1b]0;mine\\x07"
    assert str(TrainingStopped("http://me:S3cr3t@h/x: failed")) == "http://redacted@h/x: failed"


@pytest.fixture
def guarded():
    """The guard, for one test."""
    kept = sys.excepthook, threading.excepthook, sys.unraisablehook, warnings.showwarning, logging.getLogRecordFactory()
    guard()
    yield
    sys.excepthook, threading.excepthook, sys.unraisablehook, warnings.showwarning = kept[:4]
    logging.setLogRecordFactory(kept[4])


def test_no_logger_of_a_library_shows_a_secret_or_steers_a_terminal_whichever_handlers_it_has(guarded):
    url, shown = f"http://me:{SECRET}@h/x?token={SECRET}", io.StringIO()
    library = logging.Logger("a.library")
    library.addHandler(logging.StreamHandler(shown))  # as some of them bring their own
    library.warning("while downloading from %s: \x1b[2J %d", url, 3)
    library.error("%d: %s", url)  # a call that its format does not fit
    try:
        raise ValueError(f"\x1bc {url}")
    except ValueError:
        library.exception("failed", stack_info=True)
    record = logging.getLogRecordFactory()("uvicorn.access", logging.INFO, "", 0, "%s %d", ("/a?b=c", 200), None)
    assert record.args == ("/a?b=c", 200)  # which its handler may want
    text = shown.getvalue()
    assert "S3cr3t" not in text and "\x1b" not in text
    assert "http://redacted@h/x?redacted: \\x1b[2J 3\n" in text and "ValueError: \\x1bc http://redacted@h" in text


def test_warnings_and_what_a_thread_or_a_destructor_raises_are_clean(guarded, capsys):
    def fail():
        raise ValueError(f"\x1bc http://me:{SECRET}@h/x")

    class Falls:
        __del__ = lambda self: fail()  # noqa: E731

    warnings.showwarning(UserWarning(f"\x1bc http://me:{SECRET}@h/x"), UserWarning, "a.py", 1)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    Falls()
    sys.excepthook(ValueError, ValueError(f"\x1bc http://me:{SECRET}@h/x"), None)
    err = capsys.readouterr().err
    assert err.count("\\x1bc http://redacted@h/x") >= 4 and "S3cr3t" not in err and "\x1b" not in err
