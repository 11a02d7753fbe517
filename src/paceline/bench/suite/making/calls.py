"""The calls that show whether a standard-library function works: written for this suite, ``m`` being its module.

The functions come from wheels that carry modules of the standard library as files: the "standard-*" packages (modules
that left CPython in 3.13), "future" (modules of CPython 3.3), "statistics" and "backports.tarfile".
"""

from __future__ import annotations

_URL, _JAR = "future.backports.urllib.parse", "future.backports.http.cookiejar"
_QP, _ADDR = "future.backports.email.quoprimime", "future.backports.email._parseaddr"
_UTILS, _MISC = "future.backports.email.utils", "future.backports.misc"
_FUTURE = "future==1.0.0"

CALLS: tuple[tuple[str, str, str, str], ...] = (
    # requirement, module, function, call
    (_FUTURE, _URL, "urlunsplit", "str(m.urlunsplit(('https', 'example.com', '/docs/', 'page=2', 'top')))"),
    (_FUTURE, _URL, "urldefrag", "[str(part) for part in m.urldefrag('http://example.com/a?b=1#part')]"),
    (_FUTURE, _URL, "splitnport", "m.splitnport('127.0.0.1:8080')"),
    (_FUTURE, _URL, "splitport", "m.splitport('example.com:443')"),
    (_FUTURE, _URL, "unwrap", "str(m.unwrap('<URL:http://example.com/>'))"),
    (_FUTURE, _URL, "_splitparams", "m._splitparams('/a/b;type=i')"),
    (_FUTURE, _URL, "_splitnetloc", "m._splitnetloc('//example.com/path?q=1', 2)"),
    (_FUTURE, _URL, "parse_qs", "sorted(m.parse_qs('tag=a&tag=b&page=3').items())"),
    (_FUTURE, _URL, "unquote", "str(m.unquote('caf%C3%A9%20au%20lait'))"),
    (_FUTURE, _URL, "unquote_to_bytes", "bytes(m.unquote_to_bytes('a%20b%2Fc'))"),
    (_FUTURE, _JAR, "time2isoz", "m.time2isoz(951782400)"),
    (_FUTURE, _JAR, "time2netscape", "m.time2netscape(951782400)"),
    (_FUTURE, _JAR, "offset_from_tz_string", "m.offset_from_tz_string('-0130')"),
    (_FUTURE, _JAR, "iso2time", "m.iso2time('1994-02-03 14:15:29 -0100')"),
    (
        _FUTURE,
        _JAR,
        "join_header_words",
        "m.join_header_words([[('text/html', None), ('charset', 'utf-8')], [('a', 'b c')]])",
    ),
    (_FUTURE, _JAR, "is_HDN", "[m.is_HDN(host) for host in ('www.example.com', '10.0.0.1', '', '.com')]"),
    (
        _FUTURE,
        _JAR,
        "domain_match",
        "[m.domain_match('www.acme.com', d) for d in ('.acme.com', 'www.acme.com', 'acme')]",
    ),
    (_FUTURE, _JAR, "user_domain_match", "[m.user_domain_match(h, '.acme.com') for h in ('www.acme.com', 'acme.org')]"),
    (_FUTURE, _JAR, "reach", "[m.reach(h) for h in ('www.acme.com', 'acme.com', 'acme.local')]"),
    (_FUTURE, _JAR, "_timegm", "[m._timegm((2000, month, 29, 12, 0, 0)) for month in (2, 12, 13)]"),
    (_FUTURE, _JAR, "deepvalues", "list(m.deepvalues({'a': {'b': 1, 'c': {'d': 2}}, 'e': 3}))"),
    (_FUTURE, _QP, "header_encode", "m.header_encode(b'caf\\xc3\\xa9 no. 1', 'utf-8')"),
    (_FUTURE, _QP, "body_encode", "m.body_encode('one line with a tab\\t\\nand = signs ' + 'x' * 70)"),
    (_FUTURE, _QP, "decode", "m.decode('caf=E9 =3D coffee=\\n, black\\n')"),
    (_FUTURE, _ADDR, "parsedate_tz", "m.parsedate_tz('Mon, 16 Nov 2009 13:32:02 +0100')"),
    (_FUTURE, _ADDR, "mktime_tz", "m.mktime_tz((2009, 11, 16, 13, 32, 2, 0, 1, -1, 3600))"),
    (_FUTURE, _ADDR, "AddrlistClass.getaddrspec", "m.AddressList('ada@example.org, Bob <bob@x.y>').addresslist"),
    (_FUTURE, _ADDR, "AddrlistClass.getatom", "m.AddressList('Ada L. <ada@example.org>').addresslist"),
    (_FUTURE, _ADDR, "AddrlistClass.getdelimited", "m.AddressList('\"Ada, L.\" <ada@example.org>').addresslist"),
    (_FUTURE, _ADDR, "AddressList.__sub__", "(m.AddressList('a@x, b@x') - m.AddressList('b@x')).addresslist"),
    (_FUTURE, _UTILS, "formataddr", "m.formataddr(('Ada Lovelace', 'ada@example.org'))"),
    (_FUTURE, _UTILS, "unquote", 'm.unquote(\'"a \\\\"quoted\\\\" word"\')'),
    (_FUTURE, _MISC, "Counter.most_common", "m.Counter('abracadabra').most_common(2)"),
    (_FUTURE, _MISC, "Counter.__sub__", "sorted((m.Counter('abbb') - m.Counter('bcc')).items())"),
    (_FUTURE, _MISC, "Counter.__or__", "sorted((m.Counter('abbb') | m.Counter('bcc')).items())"),
    (_FUTURE, _MISC, "OrderedDict.popitem", "m.OrderedDict([('a', 1), ('b', 2)]).popitem(last=False)"),
    (
        _FUTURE,
        _MISC,
        "OrderedDict.move_to_end",
        "(lambda d: [d.move_to_end('a'), list(d)])(m.OrderedDict.fromkeys('abc'))",
    ),
    ("standard-cgi==3.13.0", "cgi", "parse_header", "m.parse_header('form-data; name=\"a;b\"; size=3')"),
    ("standard-cgi==3.13.0", "cgi", "_parseparam", "list(m._parseparam('; a=\"x;y\"; b=2'))"),
    ("standard-mailcap==3.13.0", "mailcap", "subst", "m.subst('view %s -t %t 100%%', 'text/plain', 'notes.txt')"),
    (
        "standard-mailcap==3.13.0",
        "mailcap",
        "parseline",
        "m.parseline('text/html; lynx %s; copiousoutput; priority=5')",
    ),
    ("standard-mailcap==3.13.0", "mailcap", "parsefield", "m.parsefield('lynx %s; next', 0, 14)"),
    ("standard-mailcap==3.13.0", "mailcap", "findparam", "m.findparam('charset', ['type=x', 'charset=utf-8'])"),
    (
        "standard-nntplib==3.13.0",
        "nntplib",
        "_parse_datetime",
        "[str(m._parse_datetime(d, '123456')) for d in ('700101', '20240229')]",
    ),
    (
        "standard-nntplib==3.13.0",
        "nntplib",
        "_unparse_datetime",
        "m._unparse_datetime(m.datetime.datetime(2024, 2, 29, 1, 2, 3), True)",
    ),
    (
        "standard-nntplib==3.13.0",
        "nntplib",
        "_parse_overview_fmt",
        (
            "m._parse_overview_fmt([f'{name}:' for name in 'Subject From Date Message-ID References'.split()] + "
            "[':bytes', ':lines', 'Xref:full'])"
        ),
    ),
    (
        "standard-nntplib==3.13.0",
        "nntplib",
        "_parse_overview",
        (
            "m._parse_overview(['7\\tHi\\tann\\tMon\\t<1>\\t\\t90\\t3\\tXref: x'], "
            "'subject from date message-id references :bytes :lines xref'.split())"
        ),
    ),
    (
        "standard-xdrlib==3.13.0",
        "xdrlib",
        "Packer.pack_fstring",
        "(lambda p: [p.pack_fstring(5, b'hello'), p.get_buffer()])(m.Packer())",
    ),
    ("standard-xdrlib==3.13.0", "xdrlib", "Unpacker.unpack_fstring", "m.Unpacker(b'hello\\0\\0\\0').unpack_fstring(5)"),
    (
        "standard-xdrlib==3.13.0",
        "xdrlib",
        "Unpacker.unpack_list",
        "(lambda u: u.unpack_list(u.unpack_int))(m.Unpacker(b'\\0\\0\\0\\1\\0\\0\\0\\7\\0\\0\\0\\0'))",
    ),
    ("statistics==3.4.0b3", "statistics", "median", "[m.median([3, 1, 2]), m.median([4, 1, 3, 2])]"),
    ("statistics==3.4.0b3", "statistics", "median_high", "m.median_high([1, 3, 5, 7])"),
    (
        "backports.tarfile==1.2.0",
        "backports.tarfile",
        "nti",
        "[m.nti(b'0000644\\0'), m.nti(b'\\x80\\0\\0\\0\\0\\0\\1\\0')]",
    ),
    (
        "backports.tarfile==1.2.0",
        "backports.tarfile",
        "itn",
        "[m.itn(0o644), m.itn(8 ** 7, 8, m.GNU_FORMAT), m.itn(-1, 8, m.GNU_FORMAT)]",
    ),
    ("backports.tarfile==1.2.0", "backports.tarfile", "nts", "m.nts(b'name\\0\\0\\0', 'utf-8', 'strict')"),
    (
        "backports.tarfile==1.2.0",
        "backports.tarfile",
        "TarInfo._posix_split_name",
        "m.TarInfo()._posix_split_name('d' * 60 + '/' + 'f' * 60, 'utf-8', 'strict')",
    ),
)
"""(requirement, module, function, call that shows a bug)."""
