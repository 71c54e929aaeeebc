"""Redaction of credentials and control characters, and redacted URLs that still identify a file."""

import io
import logging
import random
import re
import string

import pytest

from ursa_minor.base.redaction import (
    AZURE_PARAMETERS,
    CREDENTIAL_PARAMETERS,
    RedactingFilter,
    is_redacted,
    is_valid_url,
    one_line,
    redact,
    redact_url,
)

SECRET = "S3cr3t-%2F+value="
SENTENCES = [
    "{url}",
    "{url}: row 3: failed",
    "see {url}, and '{url}'.",
    "({url})",
    "[URL('{url}')]",
]


# URLs and texts that stay as they are.


@pytest.mark.parametrize(
    "url",
    [
        "https://host/a/b.parquet",
        "http://[::1]:8000/files/a[1].csv",
        "hf://datasets/owner/name@main/data/*.parquet",
        "hub://owner/name@step-00005000",
        "https://host/@scope/a@b:c.csv",
        "file:///data/a.txt",
    ],
)
def test_url_without_credentials_is_unchanged(url):
    assert redact_url(url) == url
    assert is_valid_url(url)
    assert not is_redacted(url)
    for template in SENTENCES:
        sentence = template.format(url=url)
        assert redact(sentence) == sentence


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a?b=c",
        "data/a?.jsonl: no such file",
        "/data/a?.jsonl: no such file",
        "is it new? x=1",
        "://",
        "a: //b?c=d",
        "C:\\a?b",
        "basic training, bearer of news, token by token",
        "a\tb\nशब्द को \u200d 한국어 עברית\u200f 👩\u200d🔬 é",
    ],
)
def test_ordinary_text_is_unchanged(text):
    assert redact(text) == text


# URLs with credentials.


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/x.txt?token=S", "https://h/x.txt?redacted"),
        ("https://u:S@h/x.txt", "https://redacted@h/x.txt"),
        ("https://u@h:1/x.txt", "https://redacted@h:1/x.txt"),
        ("https://u:S@S@h/x.txt?a", "https://redacted@h/x.txt?redacted=ca978112ca1b"),
        (
            "s3://K:S@bucket/x.parquet?versionId=1",
            "s3://redacted@bucket/x.parquet?redacted=3019f043e2de",
        ),
        ("https://h/x.csv?sig=S#S", "https://h/x.csv?redacted"),
        ("HTTPS://u:S@H/X?SIG=S", "HTTPS://redacted@H/X?redacted"),
    ],
)
def test_user_password_and_query_are_redacted(url, expected):
    assert redact_url(url) == expected
    assert redact_url(expected) == expected
    assert redact(url) == expected
    assert is_redacted(expected)
    assert not is_redacted(url)


def test_fragment_and_empty_query_are_dropped():
    assert redact_url("https://h/x.csv#S") == "https://h/x.csv"
    assert redact_url("https://h/x.csv?") == "https://h/x.csv"


@pytest.mark.parametrize(
    "url",
    [
        "https://u:S/S@h/x",
        "https://u:S?S@h/x",
        "https://u:S#S@h/x?y",
        "https://[S/x",
        "https://u:S\\@S:S/x",
    ],
)
def test_url_with_ambiguous_password_is_redacted_completely(url):
    assert redact_url(url) == "https://redacted"
    assert not is_valid_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://h/a b",
        "https://h/x?t=a b",
        'https://h/x?t="S"',
        "https://h/x?t=<S>",
        "https://h/\n",
        "https://h:x/",
    ],
)
def test_url_that_clients_read_differently_is_invalid(url):
    assert not is_valid_url(url)


def random_url(generator):
    """Return a URL that contains a secret, which starts and ends with Zq."""
    characters = string.ascii_letters + string.digits + "-._~%!$&'()*+,;=:@/?#[]"
    secret = "Zq" + "".join(generator.choices(characters, k=generator.randint(1, 20))) + "Zq"
    password = re.sub(r"[/?#\[\]]", "", secret)
    addresses = [f"h/x?a=1&b={secret}", f"h/x?{secret}", f"h/x#{secret}", f"me:{password}@h/x"]
    return "https://" + generator.choice(addresses)


def test_random_secrets_are_removed_from_messages():
    generator = random.Random(1)
    surroundings = [
        ("", ""),
        ("cannot open ", ": 403"),
        ("url='", "'"),
        ("['", "', 'a']"),
        ("(", "), "),
    ]

    for _ in range(3000):
        url = random_url(generator)
        before, after = generator.choice(surroundings)
        redacted = redact(f"{before}{url}{after}")
        assert "Zq" not in redacted, url
        assert redacted.startswith(f"{before}https://"), url


# Identity of a file.


@pytest.mark.parametrize(
    "url",
    [
        "https://b.s3.amazonaws.com/x?versionId=7"
        "&X-Amz-Date={0}&X-Amz-Credential={0}&X-Amz-Signature={0}",
        "https://a.blob.core.windows.net/c/x?sv={0}&se={0}&sr=b&sp=r&sig={0}",
        "https://cdn.h/x?Expires={0}&Signature={0}&Key-Pair-Id={0}&Policy={0}",
        "https://storage.googleapis.com/b/x?X-Goog-Expires={0}&X-Goog-Signature={0}",
        "https://me:{0}@h/x?access_token={0}&file=a&API-KEY={0}",
        "https://h/x?s%69g={0}",
    ],
)
def test_renewed_signature_identifies_the_same_file(url):
    assert redact_url(url.format("1")) == redact_url(url.format("2"))


@pytest.mark.parametrize("name", sorted(CREDENTIAL_PARAMETERS))
def test_credential_parameter_does_not_select_a_file(name):
    assert redact_url(f"https://h/x?{name}=1") == "https://h/x?redacted"


@pytest.mark.parametrize("name", sorted(AZURE_PARAMETERS))
def test_azure_parameter_selects_file_without_signature(name):
    assert redact_url(f"https://h/x?{name}=1&sig=S") == "https://h/x?redacted"
    assert redact_url(f"https://h/x?{name}=1") != redact_url(f"https://h/x?{name}=2")


def test_different_files_have_different_redacted_urls():
    urls = [
        "https://h/x?v=1",
        "https://h/x?v=2",
        "https://h/x?v=1&w=1",
        "https://h/x?token=1",
        "https://h/y?v=1",
        "https://h/y?v=2",
        "https://h/y?v=1&w=1",
        "https://h/y?token=1",
        "https://g/x?v=1",
        "http://h/x?v=1",
        "https://h/x",
        "https://me@h/x?v=1",
    ]

    assert len({redact_url(url) for url in urls}) == len(urls)


def test_order_of_parameters_does_not_select_a_file():
    assert redact_url("https://h/x?a=1&token=2&b=3") == redact_url("https://h/x?b=3&a=1")


# Messages.


@pytest.mark.parametrize(
    "message",
    [
        f"Max retries exceeded with url: /x.csv?Policy={SECRET}&v=1 (Caused by SSLError())",
        f'"GET /a/x?X-Amz-Signature={SECRET} HTTP/1.1" 403 0',
        rf"""{{"next": "http:\/\/me:{SECRET}@h\/x"}}""",
        rf"""'{{"next": "http:\\/\\/me:{SECRET}@h\\/x"}}'""",
        "https://h/a,https://me:S3cr3t@h/b, //me:S3cr3t@h",
        "https://archive/https://me:S3cr3t@h/b",
        "headers: {'Authorization': 'Bearer S3cr3t.x-y'}",
        "[(b'Authorization', b'Bearer S3cr3t')]",
        "AUTHORIZATION: token S3cr3t",
        "the token hf_S3cr3tS3cr3tS3cr3tS3cr3t may not write",
        "Illegal header value b'Bearer hf_S3cr3tS3cr3tS3cr3tS3cr3t\\n'",
    ],
)
def test_credential_in_message_is_redacted(message):
    redacted = redact(message)

    assert "S3cr3t" not in redacted
    assert "redacted" in redacted
    assert redact(redacted) == redacted


def test_control_characters_are_escaped():
    text = "a\x1b[2J\x1bc\r\x07\x9b\x7f\u202egnp.\u2066\u2028"
    expected = "a\\x1b[2J\\x1bc\\r\\x07\\x9b\\x7f\\u202egnp.\\u2066\\u2028"

    assert redact(text) == expected
    assert redact(expected) == expected


def test_quoted_message_is_one_redacted_line():
    error = ValueError(" no\n  such\tfile  \x1b[2J http://me:S3cr3t@h/x\n")

    assert one_line(error) == "no such file  \\x1b[2J http://redacted@h/x"


# Log records.


@pytest.fixture
def stream():
    """Return the stream that ``logger`` writes to."""
    return io.StringIO()


@pytest.fixture
def logger(stream):
    """Return a logger whose handler writes to ``stream`` and has the filter."""
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    logger = logging.Logger("library")
    logger.addHandler(handler)
    return logger


def test_filter_redacts_message_and_arguments(logger, stream):
    logger.warning("\x1b[2J%s: try %d", f"http://me:{SECRET}@h/x", 3)

    assert stream.getvalue() == "\\x1b[2Jhttp://redacted@h/x: try 3\n"


def test_filter_shows_record_with_wrong_arguments(logger, stream):
    logger.warning("%d files from %s", f"http://me:{SECRET}@h/x")

    assert stream.getvalue() == "%d files from %s ('http://redacted@h/x',)\n"
