"""Words that others wrote, as a person may see them: text, messages of libraries and servers, names from the Hub.

Secrets are left out: a URL's user, password and query reach no file, no log and no other machine. Control characters
are written out, for a terminal obeys them. The redacted URL is also what a file behind a URL is known by, so that a
renewed signature leads to the same shards.
"""

import hashlib
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from typing import Any
from urllib.parse import unquote, unquote_plus, urlsplit

# Parameters that prove who may read, not what is read, without - and _ and in small letters. The last ones are Azure's,
# which mean that only beside a sig.
PROOFS = (
    "token accesstoken authtoken idtoken refreshtoken securitytoken sessiontoken auth authorization jwt apikey xapikey "
    "accesskey secret clientsecret password passwd pwd pass user username session sessionid ticket sig sign signature "
    "expires expiry expiration exp policy keypairid hashalgorithm awsaccesskeyid googleaccessid ossaccesskeyid hmac "
    "hdnea hdnts"
)
PROOF_PREFIXES = ("xamz", "xgoog", "xoss", "qsign", "qak", "qkeytime", "qheaderlist", "qurlparamlist")
BESIDE_SIG = "sv ss srt sp se st spr sip si sr skoid sktid skt ske sks skv sdd scid saoid suoid"
# Schemes are short: one long word is searched in no time. Up to white space or what ends a URL in a sentence or in quotes.
SCHEME, REST = r"[a-z][a-z0-9+.-]{0,30}", r"[^\s\"<>]*[^\s\"<>.,:;!?'`)\]}]"
URL = re.compile(rf"{SCHEME}:(?:\\*/){{2}}{REST}", re.IGNORECASE)  # JSON and repr escape its slashes
ENCODED = re.compile(rf"{SCHEME}%3a%2f%2f{REST}", re.IGNORECASE)
USER = re.compile(r"(?<!hf:)(?<!hub:)//[^\s/\"'<>]+@")  # of a URL without a scheme, or in another's path
# What a request asks a host for, which some clients name without the host.
TARGET = re.compile(r"(?<![\w/:.])(/[^\s\"'<>?#]*)\?([^\s\"'<>()]*)")
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@\[\]\\]*)(:\d*)?", re.IGNORECASE)
ILLEGAL = re.compile(r"[\s\"<>\\^`{|}\x00-\x20\x7f]")
HIDDEN = "redacted"
HIDDEN_QUERY = re.compile(rf"{HIDDEN}(=[0-9a-f]{{12}})?")
NO_USERS = ("hf", "hub")  # what stands before an @ there is a repository
LOGIN = re.compile(
    r"\bhf_[\w.-]{20,}|(?<=authorization)(\W{1,4}b?\W{0,4}(?:basic|bearer|digest|token)\s+)[^\s'\"]+"
    r"|(?<=cookie)(['\"]?\s*[:,]\s*b?['\"]?)[^\s'\"=;]+=[^'\"\n]*",
    re.IGNORECASE,
)
SECRET_NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|SERVER_URL)$")  # of variables of the environment
SHORTEST_SECRET = 8  # characters; a shorter value, such as true, stands in many a sentence
# Control characters and those that reverse the order of letters, but newline and tab.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def guard() -> None:
    """Make what other libraries log, warn of and raise safe to show, for the rest of this process."""
    logging.setLogRecordFactory(_safe_record)
    warnings.showwarning = _show_warning
    sys.excepthook = lambda kind, error, trace: _show(error)
    threading.excepthook = lambda about: _show(about.exc_value)
    sys.unraisablehook = lambda about: _show(about.exc_value)


def clean(text: str) -> str:
    """Return a text without secrets, and with control characters written out; one that is clean is not changed."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), redact(text))


def one_line(text: object) -> str:
    """Return a message, cleaned, in one line."""
    return re.sub(r"\s*[\n\t]\s*", " ", clean(str(text)).strip())


def redact(text: str) -> str:
    """Return a text with each URL in it redacted, and without a login and the secrets of the environment."""
    text = URL.sub(lambda match: redact_url(re.sub(r"\\+/", "/", match[0])), text)
    text = ENCODED.sub(lambda match: redact_url(unquote(match[0])), text)
    text = USER.sub(f"//{HIDDEN}@", text)
    text = TARGET.sub(lambda match: match[0] if _is_harmless(match[2]) else match[1] + _hidden(match[2]), text)
    text = LOGIN.sub(lambda match: f"{match[1] or match[2] or ''}{HIDDEN}", text)
    for name, value in sorted(os.environ.items(), key=lambda one: -len(one[1])):  # one may begin with another
        if len(value) >= SHORTEST_SECRET and SECRET_NAMES.search(name):
            text = text.replace(value, f"({name})")
    return text


def redact_url(url: str) -> str:
    """Return a URL without user, password, query and fragment; what was left out is marked.

    What is left of the query without the parameters of PROOFS still keeps files apart, as 12 digits of its SHA-256.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("#")[0].partition("?")
    authority, slash, path = address.partition("/")
    user, at, host = ("", "", authority) if scheme.lower() in NO_USERS else authority.rpartition("@")
    if not HOST.fullmatch(host):  # where a password ends cannot be known
        return f"{scheme}://{HIDDEN}"
    return f"{scheme}://{at and HIDDEN}{at}{host}{slash}{path}{_hidden(query)}"


def is_redacted(url: str) -> bool:
    """Return whether something was left out of a URL."""
    return url == redact_url(url) and bool(re.search(rf"://{HIDDEN}(@|$)|\?{HIDDEN}(=|$)", url))


def is_url(url: str) -> bool:
    """Return whether a text is a URL that every client reads alike."""
    try:
        _ = urlsplit(url).port
    except ValueError:  # half of an address, no port, letters that a host cannot have
        return False
    return not ILLEGAL.search(url) and not redact_url(url).endswith(f"://{HIDDEN}")


def _hidden(query: str) -> str:
    if not query or HIDDEN_QUERY.fullmatch(query):
        return query and f"?{query}"
    kept = sorted(_beside_proofs(query))
    digest = hashlib.sha256("&".join(kept).encode()).hexdigest()[:12]
    return f"?{HIDDEN}" + (f"={digest}" if kept else "")


def _beside_proofs(query: str) -> list[str]:
    words = [(re.sub("[-_]", "", unquote_plus(word.partition("=")[0])).lower(), word) for word in query.split("&")]
    proofs = {*PROOFS.split(), *(BESIDE_SIG.split() if "sig" in dict(words) else ())}
    return [word for name, word in words if word and name not in proofs and not name.startswith(PROOF_PREFIXES)]


def _is_harmless(query: str) -> bool:
    return len(_beside_proofs(query)) == len([word for word in query.split("&") if word])


_new_record = logging.LogRecord


def _safe_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """Return a log record whose message, traceback and stack are clean; of any logger, whichever handlers it has."""
    record = _new_record(*args, **kwargs)
    try:
        text = record.getMessage()
    except Exception:  # a call with arguments that do not fit its format
        text = f"{record.msg} {record.args}"
    if (safe := clean(text)) != text:  # else its handler may want the arguments
        record.msg, record.args = safe, ()
    if record.exc_info and record.exc_info[1]:
        record.exc_text = clean("".join(traceback.format_exception(*record.exc_info))).rstrip()
    record.stack_info = record.stack_info and clean(record.stack_info)
    return record


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    (file or sys.stderr).write(clean(warnings.formatwarning(message, category, filename, lineno, line)))


def _show(error: BaseException | None) -> None:
    sys.stderr.write(clean("".join(traceback.format_exception(error))))
