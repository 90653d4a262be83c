"""A replacement that cannot reach one of its peers brings its rows back by means of the others:
parity with r = 2 bears a loss and a cut beside each other."""

from __future__ import annotations

import pytest

from tests.faults.test_parity_partitions import Scene, scene

LOST = 0


def _check_whole(run: Scene) -> None:
    """They reach each other again, and all is whole: two others may be lost."""
    run.heal()
    run.push()
    for shard in (1, 2):
        run.hosts.kill(shard)
    run.check()


SIZES = [(3, 1, 1), (3, 1, 2), (4, 2, 1), (4, 2, 2), (4, 2, 3), (5, 3, 1), (5, 3, 4)]
BY_DAY = {(nth, "both ways") for nth in (0, 3, 6)} | {(2, "to"), (2, "from")}


@pytest.mark.parametrize(
    ("shards", "k", "peer", "way"),
    [
        # Every k, and peers that are hosts alone or members as well; one direction with one size.
        pytest.param(*size, way, marks=[] if (nth, way) in BY_DAY else pytest.mark.soak)
        for nth, size in enumerate(SIZES)
        for way in ("to", "from", "both ways")
    ],
)
def test_other_peers_bring_rows_back(shards: int, k: int, peer: int, way: str) -> None:
    """With k = 2 and more, a host of some rows is a member beside others: it is asked for values,
    and its parity is not used."""
    with scene(shards=shards, k=k, r=2) as run:
        run.push(2)
        cuts = {"to": [(LOST, peer)], "from": [(peer, LOST)]}
        run.network.cut(*cuts.get(way, [(LOST, peer), (peer, LOST)]))
        run.hosts.kill(LOST)
        run.push()
        run.check()
        _check_whole(run)


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_peer_that_is_cut_off_while_rows_come_back(background: bool) -> None:
    """Marks are back: from there on the replacement asks its peers itself."""
    with scene(shards=4, k=2, r=2, background=background, chunk_rows=2) as run:
        run.push(2)
        protection = run.cluster._protection
        assert protection is not None
        recover_marks = protection._recover_marks

        def then_cut() -> None:
            recover_marks()
            run.network.cut((LOST, 3), (3, LOST))

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(protection, "_recover_marks", then_cut)
            run.hosts.kill(LOST)
            run.push()
        run.check()
        _check_whole(run)


def test_a_peer_that_can_be_reached_again_is_asked_straight() -> None:
    with scene(shards=4, k=2, r=2) as run:
        run.push()
        (peer,) = [peer for peer in run.services()[LOST]._peers() if peer.index == 3]

        def asked() -> list[str]:
            before = len(run.network.events)
            peer.ask("standing")
            own = [e for e in run.network.events[before:] if e.sender == f"server-{LOST}"]
            return [event.server for event in own if event.kind == "member"]

        run.network.cut((LOST, 3))
        (relay,) = asked()
        for _ in range(3):  # tried again, and in vain
            assert asked() == [relay]
            run.pass_time(5)
        run.network.cut()
        run.pass_time(5)
        assert asked() == asked() == ["server-3"]


def test_a_host_that_no_server_reaches_is_not_needed() -> None:
    """Only the coordinator reaches it; a mirror of the rows is elsewhere."""
    with scene(shards=3, k=1, r=2) as run:
        run.push(2)
        run.network.cut((LOST, 2), (1, 2), (2, LOST), (2, 1))
        run.hosts.kill(LOST)
        run.push()
        run.check()
        _check_whole(run)


def test_of_two_hosts_in_trouble_neither_is_left_out_for_the_sake_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene(shards=3, k=1, r=2) as run:
        run.push()
        service = run.services()[LOST]
        streams, rows = service._streams, service._rows
        senders = list(streams._senders.values())
        monkeypatch.setattr(streams, "_silent", lambda: [s for s in senders if s.trouble])
        rows._missing_GK[0, 0] = 1
        for sender in senders:
            sender.trouble = "cut off"
        streams._leave_out_silent(asking=True)
        assert streams.status()["left_out_hosts"] == 0
        senders[1].trouble = ""
        streams._leave_out_silent(asking=True)
        assert streams.status()["left_out_hosts"] == 1
        rows._missing_GK[0, 0] = 0
