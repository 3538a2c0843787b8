"""HTTPS, and certificates that cannot be used, which are found before anything starts."""

import ssl
import subprocess

import httpx
import pytest

from inkcap.base.config import ServerConfig
from inkcap.base.errors import ConfigInvalid
from inkcap.server.run import check_tls, scheme


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    words += [
        "-subj",
        "/CN=demo",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-out",
        str(certificate),
        "-keyout",
        str(key),
    ]
    subprocess.run(words, check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def settings(pair):
    return {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1])}


def test_it_speaks_https(site, pair):
    trusted = ssl.create_default_context(cafile=str(pair[0]))
    url = site.url.replace("http:", "https:")
    assert httpx.get(url + "/version", verify=trusted).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/version")  # nobody vouches for it
    with pytest.raises(httpx.TransportError):
        httpx.get(site.url + "/version")
    assert scheme(site.service.config.server) == "https"


def test_what_cannot_be_used_is_named(pair, tmp_path):
    certificate, key = map(str, pair)
    check_tls(ServerConfig())
    check_tls(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=certificate))
    (tmp_path / "bad.pem").write_text("no key")
    locked = tmp_path / "locked.pem"
    words = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(words, check=True, capture_output=True)
    for fields, said in (
        ({"ssl_keyfile": key}, "give --ssl-certfile"),
        ({"ssl_certfile": certificate, "ssl_keyfile": str(tmp_path / "none.pem")}, "No such file"),
        ({"ssl_certfile": certificate, "ssl_keyfile": str(tmp_path / "bad.pem")}, "bad.pem"),
        ({"ssl_certfile": certificate, "ssl_keyfile": str(locked)}, "has a password"),
        ({"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": key}, "TLS cannot start"),
    ):
        with pytest.raises(ConfigInvalid, match=said):
            check_tls(ServerConfig(**fields))
