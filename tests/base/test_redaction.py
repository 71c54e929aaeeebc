"""URLs are shown without user, password and query; the same file behind a renewed signature is known again."""

import random
import string

import pytest

from pretrain.base.errors import BadInput, TrainingStopped
from pretrain.base.redaction import PROOFS, is_redacted, is_url, redact, redact_url

SECRET = "S3cr3t-%2F+value="
PLAIN = [
    "https://host/a/b.parquet",
    "http://127.0.0.1:8000/files/a[1].csv",
    "http://[::1]:8000/a.csv",
    "hf://datasets/owner/name@main/data/*.parquet",
    "hub://owner/name@step-00005000",
    "https://host/@scope/a@b:c.csv",
    "https://host",
    "file:///data/a.txt",
]


def test_what_has_no_secrets_stays_as_it_is_also_in_a_sentence():
    for url in PLAIN:
        assert redact_url(url) == url and is_url(url) and not is_redacted(url)
        for sentence in (f"{url}: row 3: failed", f"see {url}, and '{url}'.", f"({url})", f"[URL('{url}')]", url):
            assert redact(sentence) == sentence
    for text in ("", "a?b=c", "data/a?.jsonl: no such file", "what is left? x=1", "://", "a: //b?c=d", "C:\\a?b"):
        assert redact(text) == text


@pytest.mark.parametrize(
    "url, shown",
    [
        ("https://h/x.txt?token=S", "https://h/x.txt?redacted"),
        ("https://u:S@h/x.txt", "https://redacted@h/x.txt"),
        ("https://u@h:1/x.txt", "https://redacted@h:1/x.txt"),
        ("https://u:S@S@h/x.txt?a", "https://redacted@h/x.txt?redacted=ca978112ca1b"),
        ("s3://K:S@bucket/x.parquet?versionId=1", "s3://redacted@bucket/x.parquet?redacted=3019f043e2de"),
        ("https://h/x.csv#S", "https://h/x.csv"),
        ("https://h/x.csv?sig=S#S", "https://h/x.csv?redacted"),
        ("HTTPS://u:S@H/X?SIG=S", "HTTPS://redacted@H/X?redacted"),
    ],
)
def test_user_password_and_query_are_left_out_and_that_is_said(url, shown):
    assert redact_url(url) == shown == redact_url(shown) == redact(url)
    assert is_redacted(shown) == ("redacted" in shown) and not is_redacted(url)


def test_of_a_url_whose_password_has_no_clear_end_nothing_is_shown():
    for url in ("https://u:S/S@h/x", "https://u:S?S@h/x", "https://u:S#S@h/x?y", "https://[S/x", "https://u:S\\@S:S/x"):
        assert redact_url(url) == "https://redacted" and not is_url(url)
    for url in ("https://h/a b", "https://h/x?t=a b", 'https://h/x?t="S"', "https://h/x?t=<S>", "https://h/\n"):
        assert not is_url(url)  # clients would read it differently


def test_no_piece_of_a_secret_is_left_whatever_stands_around_it():
    draw = random.Random(1)
    legal = string.ascii_letters + string.digits + "-._~%!$&'()*+,;=:@/?#[]"
    for _ in range(3000):
        secret = "Zq" + "".join(draw.choices(legal, k=draw.randint(1, 20))) + "Zq"
        kind = draw.choice(["query", "name", "fragment", "user"])
        if kind == "user":
            secret = "".join(c for c in secret if c not in "/?#[]")
        url = {
            "query": f"https://h/x?a=1&b={secret}",
            "name": f"https://h/x?{secret}",
            "fragment": f"https://h/x#{secret}",
            "user": f"https://me:{secret}@h/x",
        }[kind]
        before, after = draw.choice(
            [("", ""), ("cannot open ", ": 403"), ("url='", "'"), ("['", "', 'a']"), ("(", "), ")]
        )
        shown = redact(f"{before}{url}{after}")
        assert "Zq" not in shown and shown.startswith(f"{before}https://"), (url, shown)


# The same file.


def test_a_renewed_signature_is_the_same_file():
    aws = "https://b.s3.amazonaws.com/x.parquet?versionId=7&X-Amz-Date={0}&X-Amz-Credential={0}&X-Amz-Signature={0}"
    azure = "https://a.blob.core.windows.net/c/x.parquet?sv={0}&se={0}&sr=b&sp=r&sig={0}"
    cloud = "https://cdn.h/x.parquet?Expires={0}&Signature={0}&Key-Pair-Id={0}&Policy={0}"
    google = "https://storage.googleapis.com/b/x.parquet?X-Goog-Expires={0}&X-Goog-Signature={0}"
    own = "https://me:{0}@h/x.parquet?access_token={0}&file=a&API-KEY={0}"
    for url in (aws, azure, cloud, google, own):
        assert redact_url(url.format("1")) == redact_url(url.format("2")), url
    for name in PROOFS.split():
        assert redact_url(f"https://h/x?{name}=1") == "https://h/x?redacted"


def test_another_file_is_another():
    urls = [
        f"https://h/{path}?{query}" for path in ("x", "y") for query in ("v=1", "v=2", "v=1&w=1", "st=1", "token=1")
    ]
    urls += ["https://g/x?v=1", "http://h/x?v=1", "https://h/x", "https://me@h/x?v=1"]
    assert len(set(map(redact_url, urls))) == len(urls) and redact_url("https://h/x?") == "https://h/x"
    assert redact_url("https://h/x?a=1&token=2&b=3") == redact_url("https://h/x?b=3&a=1")


# Messages.


def test_no_message_of_ours_holds_a_secret_of_a_url():
    url = f"https://me:{SECRET}@h/x.csv?token={SECRET}"
    for error in (BadInput([f"{url}: row 3", f"--data_files {url}"]), BadInput(url), TrainingStopped(f"{url}: failed")):
        assert "S3cr3t" not in str(error) + str(getattr(error, "lines", "")) and "https://redacted@h/x.csv" in str(
            error
        )
