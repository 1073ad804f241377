from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_K8V4: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
    CODEC_FP8: _ClassVar[Codec]

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_FLOAT32: _ClassVar[DType]
    D_TYPE_BFLOAT16: _ClassVar[DType]
    D_TYPE_FLOAT16: _ClassVar[DType]

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_RUNNING: _ClassVar[SessionState]
    SESSION_STATE_IDLE: _ClassVar[SessionState]
    SESSION_STATE_SUSPENDED: _ClassVar[SessionState]

class HintOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HINT_OUTCOME_UNSPECIFIED: _ClassVar[HintOutcome]
    HINT_OUTCOME_USEFUL: _ClassVar[HintOutcome]
    HINT_OUTCOME_LATE: _ClassVar[HintOutcome]
    HINT_OUTCOME_WASTED: _ClassVar[HintOutcome]
    HINT_OUTCOME_CANCELLED: _ClassVar[HintOutcome]
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec
CODEC_INT8: Codec
CODEC_K8V4: Codec
CODEC_INT4: Codec
CODEC_FP8: Codec
D_TYPE_UNSPECIFIED: DType
D_TYPE_FLOAT32: DType
D_TYPE_BFLOAT16: DType
D_TYPE_FLOAT16: DType
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_RUNNING: SessionState
SESSION_STATE_IDLE: SessionState
SESSION_STATE_SUSPENDED: SessionState
HINT_OUTCOME_UNSPECIFIED: HintOutcome
HINT_OUTCOME_USEFUL: HintOutcome
HINT_OUTCOME_LATE: HintOutcome
HINT_OUTCOME_WASTED: HintOutcome
HINT_OUTCOME_CANCELLED: HintOutcome

class Geometry(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "dtype", "block_tokens")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    dtype: DType
    block_tokens: int
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[DType, str]] = ..., block_tokens: _Optional[int] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("geometry", "weights_digest", "codec", "revision", "adapters", "rope", "rank_map", "tenant_salt", "format_version", "codec_layers")
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    RANK_MAP_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_LAYERS_FIELD_NUMBER: _ClassVar[int]
    geometry: Geometry
    weights_digest: str
    codec: Codec
    revision: str
    adapters: str
    rope: str
    rank_map: str
    tenant_salt: str
    format_version: int
    codec_layers: str
    def __init__(self, geometry: _Optional[_Union[Geometry, _Mapping]] = ..., weights_digest: _Optional[str] = ..., codec: _Optional[_Union[Codec, str]] = ..., revision: _Optional[str] = ..., adapters: _Optional[str] = ..., rope: _Optional[str] = ..., rank_map: _Optional[str] = ..., tenant_salt: _Optional[str] = ..., format_version: _Optional[int] = ..., codec_layers: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("namespace", "max_tokens")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    max_tokens: int
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: int
    def __init__(self, session: _Optional[int] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session", "state", "engine_id", "codec", "layers", "block_tokens", "tokens", "sealed_blocks", "warm_pages", "cold_pages", "unused_seconds", "namespace_digest", "codec_layers", "page_codecs", "kept", "ram_only_blocks", "removed_blocks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WARM_PAGES_FIELD_NUMBER: _ClassVar[int]
    COLD_PAGES_FIELD_NUMBER: _ClassVar[int]
    UNUSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODEC_LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_CODECS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    RAM_ONLY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session: int
    state: SessionState
    engine_id: int
    codec: Codec
    layers: int
    block_tokens: int
    tokens: int
    sealed_blocks: int
    warm_pages: int
    cold_pages: int
    unused_seconds: float
    namespace_digest: bytes
    codec_layers: str
    page_codecs: bytes
    kept: bool
    ram_only_blocks: int
    removed_blocks: int
    def __init__(self, session: _Optional[int] = ..., state: _Optional[_Union[SessionState, str]] = ..., engine_id: _Optional[int] = ..., codec: _Optional[_Union[Codec, str]] = ..., layers: _Optional[int] = ..., block_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., sealed_blocks: _Optional[int] = ..., warm_pages: _Optional[int] = ..., cold_pages: _Optional[int] = ..., unused_seconds: _Optional[float] = ..., namespace_digest: _Optional[bytes] = ..., codec_layers: _Optional[str] = ..., page_codecs: _Optional[bytes] = ..., kept: bool = ..., ram_only_blocks: _Optional[int] = ..., removed_blocks: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("session", "first_block", "damaged_layer")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_LAYER_FIELD_NUMBER: _ClassVar[int]
    session: int
    first_block: int
    damaged_layer: int
    def __init__(self, session: _Optional[int] = ..., first_block: _Optional[int] = ..., damaged_layer: _Optional[int] = ...) -> None: ...

class TruncateReply(_message.Message):
    __slots__ = ("dropped_pages",)
    DROPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    dropped_pages: int
    def __init__(self, dropped_pages: _Optional[int] = ...) -> None: ...

class SuspendRequest(_message.Message):
    __slots__ = ("session", "token_ids", "sealed_blocks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session: int
    token_ids: bytes
    sealed_blocks: int
    def __init__(self, session: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., sealed_blocks: _Optional[int] = ...) -> None: ...

class SuspendReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("session", "namespace", "max_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: int
    namespace: Namespace
    max_tokens: int
    def __init__(self, session: _Optional[int] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("token_ids", "sealed_blocks")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEALED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    sealed_blocks: int
    def __init__(self, token_ids: _Optional[bytes] = ..., sealed_blocks: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session", "owned", "discard")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    session: int
    owned: bool
    discard: bool
    def __init__(self, session: _Optional[int] = ..., owned: bool = ..., discard: bool = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("session", "namespace", "max_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: int
    namespace: Namespace
    max_tokens: int
    def __init__(self, session: _Optional[int] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class AdoptReply(_message.Message):
    __slots__ = ("warm_pages", "cold_pages", "wrong_pages")
    WARM_PAGES_FIELD_NUMBER: _ClassVar[int]
    COLD_PAGES_FIELD_NUMBER: _ClassVar[int]
    WRONG_PAGES_FIELD_NUMBER: _ClassVar[int]
    warm_pages: int
    cold_pages: int
    wrong_pages: int
    def __init__(self, warm_pages: _Optional[int] = ..., cold_pages: _Optional[int] = ..., wrong_pages: _Optional[int] = ...) -> None: ...

class PlanDemotionRequest(_message.Message):
    __slots__ = ("session", "hot_blocks", "need_blocks", "include_first", "codecs", "writes_cold")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HOT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_FIRST_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    WRITES_COLD_FIELD_NUMBER: _ClassVar[int]
    session: int
    hot_blocks: _containers.RepeatedScalarFieldContainer[int]
    need_blocks: int
    include_first: bool
    codecs: bytes
    writes_cold: bool
    def __init__(self, session: _Optional[int] = ..., hot_blocks: _Optional[_Iterable[int]] = ..., need_blocks: _Optional[int] = ..., include_first: bool = ..., codecs: _Optional[bytes] = ..., writes_cold: bool = ...) -> None: ...

class PlanDemotionReply(_message.Message):
    __slots__ = ("reservation", "blocks", "slabs", "slots", "generations", "codecs", "cold")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    COLD_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    slabs: bytes
    slots: bytes
    generations: bytes
    codecs: bytes
    cold: bool
    def __init__(self, reservation: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ..., slabs: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., codecs: _Optional[bytes] = ..., cold: bool = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation", "digests", "device_digests")
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    digests: bytes
    device_digests: bytes
    def __init__(self, reservation: _Optional[int] = ..., digests: _Optional[bytes] = ..., device_digests: _Optional[bytes] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: int
    def __init__(self, reservation: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("session", "blocks")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    session: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PromoteReply(_message.Message):
    __slots__ = ("warm_pages",)
    WARM_PAGES_FIELD_NUMBER: _ClassVar[int]
    warm_pages: int
    def __init__(self, warm_pages: _Optional[int] = ...) -> None: ...

class HintRequest(_message.Message):
    __slots__ = ("session", "first_token", "last_token", "deadline_seconds", "confidence", "priority")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    session: int
    first_token: int
    last_token: int
    deadline_seconds: float
    confidence: float
    priority: int
    def __init__(self, session: _Optional[int] = ..., first_token: _Optional[int] = ..., last_token: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., confidence: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class HintTicket(_message.Message):
    __slots__ = ("hint_id", "pages", "estimated_seconds", "left_cold", "why")
    HINT_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_COLD_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    hint_id: int
    pages: int
    estimated_seconds: float
    left_cold: int
    why: str
    def __init__(self, hint_id: _Optional[int] = ..., pages: _Optional[int] = ..., estimated_seconds: _Optional[float] = ..., left_cold: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class CancelHintRequest(_message.Message):
    __slots__ = ("hint_id",)
    HINT_ID_FIELD_NUMBER: _ClassVar[int]
    hint_id: int
    def __init__(self, hint_id: _Optional[int] = ...) -> None: ...

class CancelHintReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HintCommand(_message.Message):
    __slots__ = ("tag", "hint", "cancel")
    TAG_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    tag: int
    hint: HintRequest
    cancel: CancelHintRequest
    def __init__(self, tag: _Optional[int] = ..., hint: _Optional[_Union[HintRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelHintRequest, _Mapping]] = ...) -> None: ...

class HintRefusal(_message.Message):
    __slots__ = ("reason", "message", "retry_after_seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retry_after_seconds: float
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class HintSettled(_message.Message):
    __slots__ = ("hint_id", "outcome")
    HINT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    hint_id: int
    outcome: HintOutcome
    def __init__(self, hint_id: _Optional[int] = ..., outcome: _Optional[_Union[HintOutcome, str]] = ...) -> None: ...

class HintEvent(_message.Message):
    __slots__ = ("tag", "ticket", "refusal", "cancelled", "settled")
    TAG_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    tag: int
    ticket: HintTicket
    refusal: HintRefusal
    cancelled: CancelHintReply
    settled: HintSettled
    def __init__(self, tag: _Optional[int] = ..., ticket: _Optional[_Union[HintTicket, _Mapping]] = ..., refusal: _Optional[_Union[HintRefusal, _Mapping]] = ..., cancelled: _Optional[_Union[CancelHintReply, _Mapping]] = ..., settled: _Optional[_Union[HintSettled, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("interval_seconds",)
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    interval_seconds: float
    def __init__(self, interval_seconds: _Optional[float] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("pages", "bytes", "capacity_bytes", "used_bytes", "peak_bytes", "slabs", "reserved_slots", "retired_slots", "device", "backup_pages", "backup_bytes")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BACKUP_PAGES_FIELD_NUMBER: _ClassVar[int]
    BACKUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    bytes: int
    capacity_bytes: int
    used_bytes: int
    peak_bytes: int
    slabs: int
    reserved_slots: int
    retired_slots: int
    device: str
    backup_pages: int
    backup_bytes: int
    def __init__(self, pages: _Optional[int] = ..., bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., slabs: _Optional[int] = ..., reserved_slots: _Optional[int] = ..., retired_slots: _Optional[int] = ..., device: _Optional[str] = ..., backup_pages: _Optional[int] = ..., backup_bytes: _Optional[int] = ...) -> None: ...

class HintStats(_message.Message):
    __slots__ = ("counts", "clients")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ClientsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: HintCounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[HintCounts, _Mapping]] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    clients: _containers.MessageMap[str, HintCounts]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ..., clients: _Optional[_Mapping[str, HintCounts]] = ...) -> None: ...

class HintCounts(_message.Message):
    __slots__ = ("counts",)
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("tiers", "counts", "sessions", "hints", "uptime_seconds", "clients", "troubles")
    class TiersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TierStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TierStats, _Mapping]] = ...) -> None: ...
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SessionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TroublesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TIERS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.MessageMap[str, TierStats]
    counts: _containers.ScalarMap[str, int]
    sessions: _containers.ScalarMap[str, int]
    hints: HintStats
    uptime_seconds: float
    clients: int
    troubles: _containers.ScalarMap[str, str]
    def __init__(self, tiers: _Optional[_Mapping[str, TierStats]] = ..., counts: _Optional[_Mapping[str, int]] = ..., sessions: _Optional[_Mapping[str, int]] = ..., hints: _Optional[_Union[HintStats, _Mapping]] = ..., uptime_seconds: _Optional[float] = ..., clients: _Optional[int] = ..., troubles: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
