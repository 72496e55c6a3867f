"""The texts of each `format`, as patterns: never wider than the specification and the usual validators both allow."""

from __future__ import annotations

_DAY = r"(?:0[1-9]|1[0-9]|2[0-8])"
_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
# Years that 4 divides, without the centuries that 400 does not.
_FOURS = r"(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = rf"(?:[0-9]{{2}}{_FOURS}|{_FOURS}00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_OFFSET = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        rf"(?:{_GROUP}:){{7}}{_GROUP}",
        # One run of zeros is left out: some groups before it, some behind it, seven at most.
        *(
            rf"(?:{_GROUP}:){{{left}}}(?::{_GROUP}){{1,{7 - left}}}" if left else rf":(?::{_GROUP}){{1,7}}"
            for left in range(7)
        ),
        rf"(?:{_GROUP}:){{1,7}}:",
        "::",
        rf"(?:{_GROUP}:){{6}}{_IPV4}",
        rf"::(?:{_GROUP}:){{0,5}}{_IPV4}",
    ]
)
# Labels with one hyphen at most, the last one of letters: what every validator takes for a host's name.
_HOST = r"(?:[a-zA-Z0-9]{1,20}\.|[a-zA-Z0-9]{1,20}-[a-zA-Z0-9]{1,20}\.){0,4}[a-zA-Z]{2,12}"
_ATOM = "[a-zA-Z0-9_+-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}"
_PCHAR = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})"
_PATH = rf"(?:/{_PCHAR}*)*"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_AUTHORITY = rf"//{_HOST}(?::[1-9][0-9]{{0,3}})?{_PATH}"
_URI = rf"(?:[a-zA-Z][a-zA-Z0-9+.-]{{1,15}}:(?:{_AUTHORITY}|[a-zA-Z0-9]{_PCHAR}*{_PATH})){_TAIL}"
_SEGMENT = "(?:[a-zA-Z0-9._-]|%[0-9A-F]{2})+"
_URI_REFERENCE = rf"(?:{_URI}|(?:/?{_SEGMENT}(?:/{_SEGMENT})*/?|/)?{_TAIL})"
_TIME_PART = "T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S)"
_DATE_PART = "(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D)"
_TOKEN = "(?:[a-zA-Z0-9 _.$%&*+,;:=?@!()\\[\\]{}|<>#^-]|~[01])*"

FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _CLOCK + _OFFSET,
    "date-time": f"{_DATE}T{_CLOCK}{_OFFSET}",
    "duration": f"P(?:{_DATE_PART}(?:{_TIME_PART})?|{_TIME_PART}|[0-9]{{1,4}}W)",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": _URI_REFERENCE,
    "iri-reference": _URI_REFERENCE,
    "uri-template": rf"(?:{_PCHAR}|/|\{{[a-zA-Z0-9_]{{1,20}}\}})*",
    "json-pointer": f"(?:/{_TOKEN})*",
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,3}})(?:#|(?:/{_TOKEN})*)",
    # Every text of these characters is an expression.
    "regex": r"\^?[a-zA-Z0-9 _,:;@/-]*\$?",
}

# Formats by which OpenAPI and its like annotate: they say how a text or number is stored, and bind no validator.
ANNOTATIONS = frozenset((
    "binary", "byte", "char", "decimal", "double", "float", "float16", "float32", "float64", "html", "int8",
    "int16", "int32", "int64", "json", "markdown", "multi-line", "password", "single-line", "string", "text",
    "textarea", "uint", "uint8", "uint16", "uint32", "uint64",
))  # fmt: skip
