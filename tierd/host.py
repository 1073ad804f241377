"""The host: what the daemon does for the clients of its first door.

Invariants:
  a client has a token from `admit` to `depart`, an engine an epoch page too
  what a client has offered is closed when it departs
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from tierd.adoption import Offers
from tierd.bootstrap import BootstrapServer, Peer, Reply
from tierd.disk.ports import DiskPort
from tierd.errors import InvalidArgument, TierdError
from tierd.memory.epochs import EPOCH_PAGE_BYTES, QUIESCENT
from tierd.memory.memfd import Mapping, create_memfd
from tierd.mover import Mover
from tierd.rpc.handshake import ENGINE
from tierd.rpcserver import RpcServer
from tierd.store import Store
from tierd.types import SlabRecord, Tier


class House(Protocol):
    """The daemon, as its host sees it."""

    boot_id: str
    socket: str
    store: Store
    mover: Mover
    rpc: RpcServer
    log: Any

    @property
    def disk(self) -> DiskPort:
        """The cold tier's."""

    @property
    def leaves_engines(self) -> bool:
        """Whether it stops while engines live on."""


class Host:
    """What the daemon does for the clients of its first door."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._epoch_fds: dict[int, int] = {}
        self._offers: dict[int, Offers] = {}

    def admit(self, peer: Peer) -> Reply:
        """Register a client: its token, and for an engine its epoch page."""
        house = self._house
        fds: tuple[int, ...] = ()
        if peer.kind == ENGINE:
            fd = create_memfd("tierd-epoch", EPOCH_PAGE_BYTES)
            try:
                page = Mapping(fd, EPOCH_PAGE_BYTES, writable=True)
            except TierdError:
                os.close(fd)
                raise
            self._epoch_fds[peer.client_id] = fd
            page.buffer[:8] = QUIESCENT.to_bytes(8, "little")  # until the engine's first step
            house.store.register_engine(peer.client_id, peer.pid, page)
            fds = (fd,)
        house.rpc.tokens.issue(peer.token, peer.client_id, peer.kind)
        house.log.debug("client came", client=peer.client_id, kind=peer.kind, pid=peer.pid)
        fields = {
            "token": peer.token,
            "boot_id": house.boot_id,
            "rpc": rpc_target(house.socket),
            "client_id": peer.client_id,
            "store_uuid": house.store.placement.store_uuid,
            "claims_seconds": house.store.keeper.claims_seconds,
        }
        return Reply(fields, fds)

    def answer(self, peer: Peer, request: dict[str, Any], fds: Sequence[int]) -> Reply:
        """Pass the fds of a page table or a slab, or take those of a dead daemon's.

        Raises TierdError.
        """
        store = self._house.store
        match request:
            case {"op": "session_fds", "session": int(number)}:
                table = store.session(number, engine_id=peer.client_id).table
                assert table is not None, "an engine's session has a page table"
                return Reply({}, (table.fd,))
            case {"op": "slab", "slab": int(slab)}:
                return self._slab(peer.client_id, slab)
            case {"op": "offer_table", "session": int(number)} if len(fds) == 1:
                self.offers(peer.client_id).add_table(number, fds[0])
                return Reply({})
            case {"op": "offer_slab"} if len(fds) == 1:
                self.offers(peer.client_id).add_slab(_slab_record(request), fds[0])
                return Reply({})
        raise InvalidArgument(f"unknown request {request.get('op')!r}")

    def offers(self, client_id: int) -> Offers:
        """Return what a client has handed over after a restart."""
        return self._offers.setdefault(client_id, Offers())

    def _slab(self, engine_id: int, slab: int) -> Reply:
        info = self._house.store.slab_for(engine_id, slab)
        fields = {
            "slab": slab,
            "tier": int(info.tier),
            "slot_bytes": info.slot_bytes,
            "slots": info.slots,
            "direct": info.tier is Tier.COLD and self._house.disk.direct,
        }
        return Reply(fields, (info.fd,))

    def new_slab(self, bootstrap: BootstrapServer, namespace_digest: bytes, slab: int) -> None:
        """Send a new slab to the engines of its namespace, so that no step has to ask for it."""
        for engine_id in self._house.store.engines_of(namespace_digest):
            reply = self._slab(engine_id, slab)
            bootstrap.push(engine_id, Reply({"op": "slab", **reply.fields}, reply.fds))

    def depart(self, peer: Peer) -> None:
        """Free all that a client held."""
        house = self._house
        house.rpc.tokens.revoke(peer.client_id)
        if peer.client_id in self._offers:
            self._offers.pop(peer.client_id).close()
        if peer.kind == ENGINE:
            if not house.leaves_engines:
                house.store.drop_engine(peer.client_id)
            os.close(self._epoch_fds.pop(peer.client_id))
        house.store.drop_client(str(peer.client_id))
        house.mover.wake()
        house.log.debug("client left", client=peer.client_id, kind=peer.kind, pid=peer.pid)


def _slab_record(request: dict[str, Any]) -> SlabRecord:
    match request:
        case {"slab": int(slab), "namespace": bytes(digest), "slot_bytes": int(slot_bytes),
              "slots": int(slots)}:  # fmt: skip
            return SlabRecord(slab, digest, slot_bytes, slots)
    raise InvalidArgument("a slab is offered with its id, namespace, slot size and slots")


def rpc_target(socket: str) -> str:
    """Return the gRPC target that goes with a bootstrap socket ("@name" is an abstract one)."""
    if socket.startswith("@"):
        return f"unix-abstract:{socket[1:]}.rpc"
    return f"unix:{os.path.abspath(socket)}.rpc"
