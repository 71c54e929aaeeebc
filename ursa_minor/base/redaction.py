"""Keep credentials and control characters out of everything that a run shows, writes or sends.

- ``redact_url`` removes user, password, query and fragment of a URL. The result also identifies the
  file behind the URL in manifests and fingerprints, so it must stay the same for the same URL.
- ``redact`` redacts every URL in a text and escapes its control characters, which a terminal would
  obey. ``one_line`` does the same for a message of a library or server that we quote.
- ``RedactingFilter`` applies ``redact`` to the log records of the handlers that carry it.

SECURITY.md lists the secrets that are not redacted.
"""

import hashlib
import logging
import re
from urllib.parse import unquote_plus, urlsplit

REDACTED = "redacted"
# Query parameters that grant access or identify the reader, but do not select a file. Names are
# compared in lower case, without "-" and "_".
# fmt: off
CREDENTIAL_PARAMETERS = {
    "token", "accesstoken", "authtoken", "idtoken", "refreshtoken", "securitytoken", "sessiontoken",
    "auth", "authorization", "jwt", "ticket", "apikey", "xapikey", "accesskey",
    "secret", "clientsecret",
    "user", "username", "password", "passwd", "pwd", "pass", "session", "sessionid",
    "sig", "sign", "signature", "hmac", "hashalgorithm", "policy", "keypairid",
    "expires", "expiry", "expiration", "exp",
    "awsaccesskeyid", "googleaccessid", "ossaccesskeyid",
    "hdnea", "hdnts",  # Akamai
}
CREDENTIAL_PREFIXES = (
    "xamz", "xgoog", "xoss",  # Amazon, Google, Alibaba
    "qsign", "qak", "qkeytime", "qheaderlist", "qurlparamlist",  # Tencent
)
# These are part of an Azure signature. Without "sig" they may select a file.
AZURE_PARAMETERS = {
    "sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "si", "sr", "sdd", "scid", "saoid", "suoid",
    "skoid", "sktid", "skt", "ske", "sks", "skv",
}
# fmt: on
SCHEMES_WITHOUT_USERS = ("hf", "hub")  # "@" separates a repository and its revision

# A scheme is short, so that a long word is searched in linear time. A URL ends at white space, at a
# quote, or before the punctuation of the sentence around it. JSON and repr() escape its slashes.
URL_IN_TEXT = re.compile(
    r"[a-z][a-z0-9+.-]{0,30}:(?:\\*/){2}[^\s\"<>]*[^\s\"<>.,:;!?'`)\]}]", re.IGNORECASE
)
# The user of a URL without a scheme, or of one within the path of another.
USER = re.compile(r"(?<!hf:)(?<!hub:)//[^\s/\"'<>]+@")
# The path and query of a request, as urllib3 and access logs show it: /file.csv?token=...
REQUEST_TARGET = re.compile(r"(?<![\w/:.])(/[^\s\"'<>?#]*)\?([^\s\"'<>()]*)")
HUGGING_FACE_TOKEN = re.compile(r"\bhf_[\w.-]{20,}")
AUTHORIZATION = re.compile(
    r"(authorization\W{1,4}b?\W{0,4}(?:basic|bearer|digest|token)\s+)[^\s'\"]+", re.IGNORECASE
)
HOST_AND_PORT = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@\[\]\\]*)(:\d*)?", re.IGNORECASE)
REDACTED_QUERY = re.compile(rf"{REDACTED}(=[0-9a-f]{{12}})?")
NOT_IN_URL = re.compile(r"[\s\"<>\\^`{|}\x00-\x20\x7f]")
# Control characters except newline and tab, and characters that reverse the order of letters.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def redact(text: str) -> str:
    """Redact URLs, Hugging Face tokens and Authorization headers, and escape control characters.

    A text without any of them is returned unchanged.
    """
    text = URL_IN_TEXT.sub(_redact_url_in_text, text)
    text = USER.sub(f"//{REDACTED}@", text)
    text = REQUEST_TARGET.sub(_redact_request_target, text)
    text = HUGGING_FACE_TOKEN.sub(REDACTED, text)
    text = AUTHORIZATION.sub(rf"\1{REDACTED}", text)
    return CONTROL.sub(_escape, text)


def one_line(message: object) -> str:
    """Return a message, such as an exception, redacted and in one line."""
    return re.sub(r"\s*[\n\t]\s*", " ", redact(str(message)).strip())


def redact_url(url: str) -> str:
    """Return a URL without user, password, query and fragment.

    "redacted" marks a user or query that was removed. A query that selects a file is replaced by 12
    hexadecimal digits of the SHA-256 of its parameters other than credentials. The result is
    therefore the same for a renewed signature and differs between files.
    """
    scheme, _, rest = url.partition("://")
    rest, _, _ = rest.partition("#")
    address, _, query = rest.partition("?")
    authority, slash, path = address.partition("/")
    user_mark = ""
    if scheme.lower() not in SCHEMES_WITHOUT_USERS and "@" in authority:
        _, _, authority = authority.rpartition("@")
        user_mark = f"{REDACTED}@"
    if not HOST_AND_PORT.fullmatch(authority):  # it is unclear where the password ends
        return f"{scheme}://{REDACTED}"
    return f"{scheme}://{user_mark}{authority}{slash}{path}{_redact_query(query)}"


def is_redacted(url: str) -> bool:
    """Return whether a URL is a result of ``redact_url`` that lacks a part of the original."""
    if url != redact_url(url):
        return False
    return re.search(rf"://{REDACTED}(@|$)|\?{REDACTED}(=|$)", url) is not None


def is_valid_url(url: str) -> bool:
    """Return whether all clients agree on the parts of a URL."""
    try:
        _ = urlsplit(url).port
    except ValueError:  # an incomplete IPv6 address, or a port that is not a number
        return False
    if NOT_IN_URL.search(url):
        return False
    return not redact_url(url).endswith(f"://{REDACTED}")


class RedactingFilter(logging.Filter):
    """Redact the message of each record of a handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the record's message; let every record pass."""
        try:
            message = record.getMessage()
        except Exception:  # the arguments do not fit the format, which must not end a run
            message = f"{record.msg} {record.args}"
        record.msg = redact(message)
        record.args = None
        return True


def _redact_url_in_text(match: re.Match[str]) -> str:
    url = re.sub(r"\\+/", "/", match[0])  # JSON and repr() escape the slashes
    return redact_url(url)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _redact_query(query: str) -> str:
    if not query:
        return ""
    if REDACTED_QUERY.fullmatch(query):
        return f"?{query}"
    file_parameters = sorted(_without_credentials(query))
    if not file_parameters:
        return f"?{REDACTED}"
    digest = hashlib.sha256("&".join(file_parameters).encode()).hexdigest()
    return f"?{REDACTED}={digest[:12]}"


def _redact_request_target(match: re.Match[str]) -> str:
    """Redact a query with a credential. Without one it may be ordinary text: /data/a?.txt."""
    path, query = match.groups()
    if len(_without_credentials(query)) == len(_parameters(query)):
        return match[0]
    return f"{path}{_redact_query(query)}"


def _without_credentials(query: str) -> list[str]:
    """Return the parameters of a query, each as NAME=VALUE, that are not credentials."""
    parameters = _parameters(query)
    has_azure_signature = any(_normalized_name(parameter) == "sig" for parameter in parameters)
    return [
        parameter for parameter in parameters if not _is_credential(parameter, has_azure_signature)
    ]


def _is_credential(parameter: str, has_azure_signature: bool) -> bool:
    name = _normalized_name(parameter)
    if has_azure_signature and name in AZURE_PARAMETERS:
        return True
    return name in CREDENTIAL_PARAMETERS or name.startswith(CREDENTIAL_PREFIXES)


def _parameters(query: str) -> list[str]:
    return [parameter for parameter in query.split("&") if parameter]


def _normalized_name(parameter: str) -> str:
    name, _, _ = parameter.partition("=")
    return re.sub("[-_]", "", unquote_plus(name)).lower()
