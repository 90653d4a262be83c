"""Servers that a TOML file names, and how they are reached."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from emberkeep.cluster.remote.processes import Connect
from emberkeep.errors import ConfigError
from emberkeep.train import build
from emberkeep.train.run_config import ClusterSettings, load

TOKEN = "a token of some length"


def test_connect_names_a_token_file_and_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("trainer.example")
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "own.pem")
    (tmp_path / "token").write_text(TOKEN + "\n")
    written = tmp_path / "run.toml"
    written.write_text(
        '[data]\nsource = "synthetic"\nsamples = 1000\n[cluster]\nkind = "connect"\n'
        'addresses = ["grpc+tls://a.example:7070"]\n'
        f'token_file = "{tmp_path}/token"\nauthority = "{tmp_path}/authority.pem"\n'
        f'certificate = "{tmp_path}/own.pem"\nkey = "{tmp_path}/key.pem"\n'
    )
    cluster = build._cluster(load(written, []), 0, 0)
    assert isinstance(cluster, Connect)
    assert cluster.security.token == TOKEN
    assert cluster.security.authority == tmp_path / "authority.pem"
    assert (cluster.security.certificate, cluster.security.key) == (
        tmp_path / "own.pem",
        tmp_path / "key.pem",
    )


@pytest.mark.parametrize("key", ["token_file", "certificate", "key", "authority"])
def test_other_clusters_take_none(key: str) -> None:
    with pytest.raises(ConfigError, match=f'{key} is for kind = "connect"'):
        ClusterSettings(kind="servers", **{key: "x"})  # type: ignore[arg-type]


def test_how_long_a_cluster_waits_is_a_setting() -> None:
    timing = ClusterSettings(kind="servers", shards=2, lease="4s", patience="1h").timing()
    assert (timing.lease.total_seconds(), timing.patience.total_seconds()) == (4, 3600)
    assert timing.deadline <= timing.lease
    with pytest.raises(ConfigError, match="patience is a duration such as"):
        ClusterSettings(patience="long")
