"""URLs without what is secret in them: a user, a password and a query reach no file, no log and no other machine.

The redacted URL is also what a file behind a URL is known by, so that a renewed signature leads to the same shards.
"""

import hashlib
import re
from urllib.parse import unquote_plus, urlsplit

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
URL = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^\s\"<>]*[^\s\"<>.,:;!?'`)\]}]", re.IGNORECASE)
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:@\[\]\\]*)(:\d*)?", re.IGNORECASE)
ILLEGAL = re.compile(r"[\s\"<>\\^`{|}\x00-\x20\x7f]")
HIDDEN = "redacted"
HIDDEN_QUERY = re.compile(rf"{HIDDEN}(=[0-9a-f]{{12}})?")
NO_USERS = ("hf", "hub")  # what stands before an @ there is a repository


def redact(text: str) -> str:
    """Return a text with each URL in it redacted."""
    return URL.sub(lambda match: redact_url(match[0]), text)


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
    words = [(re.sub("[-_]", "", unquote_plus(word.partition("=")[0])).lower(), word) for word in query.split("&")]
    proofs = {*PROOFS.split(), *(BESIDE_SIG.split() if "sig" in dict(words) else ())}
    kept = sorted(word for name, word in words if word and name not in proofs and not name.startswith(PROOF_PREFIXES))
    digest = hashlib.sha256("&".join(kept).encode()).hexdigest()[:12]
    return f"?{HIDDEN}" + (f"={digest}" if kept else "")
