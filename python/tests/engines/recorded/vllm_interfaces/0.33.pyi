# Signatures of vLLM 0.33.0, as its wheel has them; written by vllm_interface.py.
# --- vllm.distributed.weight_transfer.base
TInitInfo = TypeVar('TInitInfo', bound='WeightTransferInitInfo')
TUpdateInfo = TypeVar('TUpdateInfo', bound='WeightTransferUpdateInfo')
TTrainerInitInfo = TypeVar('TTrainerInitInfo', bound='TrainerInitInfo')
WeightTransferUpdatePayload = dict[str, Any] | list[dict[str, Any]]
@dataclass(frozen=True)
class Replicate:
    ...
@dataclass(frozen=True)
class Shard:
    dim: int
Placement = Replicate | Shard
@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Placement, ...] | None = field(default=None, kw_only=True)
    def __post_init__(self) -> None: ...
class WeightSource(ABC):
    def __init_subclass__(cls, **kwargs: Any) -> None: ...
    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...
    def owned_names(self, rank: int) -> list[str]: ...
    def implements_iter_full(self) -> bool: ...
    def implements_iter_local(self) -> bool: ...
    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]: ...
class ModuleSource(WeightSource):
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
    @cached_property
    def metadata(self) -> list[ParamMeta]: ...
    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]: ...
@dataclass
class WeightTransferInitInfo(ABC):
    ...
@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)
    def __init_subclass__(cls, **kwargs: Any) -> None: ...
    @property
    def is_sender(self) -> bool: ...
@dataclass
class WeightTransferUpdateInfo(ABC):
    ...
class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]
    supports_draft_weight_update: bool = True
    defers_processing: bool = False
    def drain_pending(self) -> None: ...
    def __init__(self, config: WeightTransferConfig, vllm_config: 'VllmConfig', device: torch.device, model: torch.nn.Module) -> None:
        self.config = config
        self.vllm_config = vllm_config
        self.parallel_config: ParallelConfig = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model
        self._default_model_config = self.model_config
        self._default_model = model
    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None: ...
    def reset_weight_update_target(self) -> None: ...
    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo: ...
    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo: ...
    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None: ...
    @abstractmethod
    def start_weight_update(self) -> None: ...
    @abstractmethod
    def finish_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any]) -> None: ...
    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None: ...
    @abstractmethod
    def shutdown(self) -> None: ...
@runtime_checkable
class VLLMWeightSyncClient(Protocol):
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None: ...
    def finish_weight_update(self, weight_version: str | None=None) -> None: ...
class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    init_info_cls: type[TTrainerInitInfo]
    def __init__(self, *, client: 'VLLMWeightSyncClient', source: 'WeightSource | None'=None, is_sender: bool=True, rank: int=0) -> None:
        self.is_sender = is_sender
        self.rank = rank
        self.client = client
        self.source = source
    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: TTrainerInitInfo, *, client: 'VLLMWeightSyncClient', source: 'WeightSource | None'=None) -> Self: ...
    @abstractmethod
    def send_weights(self) -> None: ...
    def shutdown(self) -> None: ...

# --- vllm.distributed.weight_transfer.factory
class WeightTransferEngineFactory:
    _registry: dict[str, Callable[[], type[WeightTransferEngine]]] = {}
    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: str | type[WeightTransferEngine], class_name: str | None=None) -> None: ...
    @classmethod
    def create_engine(cls, config: 'WeightTransferConfig', vllm_config: 'VllmConfig', device: 'torch.device', model: 'torch.nn.Module') -> WeightTransferEngine: ...
class WeightTransferTrainerFactory:
    _registry: dict[str, Callable[[], type[TrainerWeightTransferEngine]]] = {}
    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: 'str | type[TrainerWeightTransferEngine]', class_name: str | None=None) -> None: ...
    @classmethod
    def trainer_init(cls, init_info: 'TrainerInitInfo', *, client: 'VLLMWeightSyncClient', source: 'WeightSource | None'=None) -> TrainerWeightTransferEngine: ...

# --- vllm.distributed.weight_transfer.clients
class HTTPVLLMWeightSyncClient:
    def __init__(self, base_url: str, timeout: float=300) -> None:
        self.base_url = base_url.rstrip('/')
        self.timeout = timeout
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def shutdown_weight_transfer_engine(self) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None: ...
    def finish_weight_update(self, weight_version: str | None=None) -> None: ...
class RayVLLMWeightSyncClient:
    def __init__(self, handle: 'ActorHandle | list[ActorHandle]') -> None:
        self.handles = handle if isinstance(handle, list) else [handle]
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def shutdown_weight_transfer_engine(self) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None: ...
    def finish_weight_update(self, weight_version: str | None=None) -> None: ...

# --- vllm.distributed.weight_transfer
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

# --- vllm.config
from vllm.config.vllm import set_current_vllm_config

# --- vllm.config.vllm
@contextmanager
def set_current_vllm_config(vllm_config: VllmConfig, check_compile=False, prefix: str | None=None): ...

# --- vllm.config.parallel
@config
class ParallelConfig:
    data_parallel_size: int = Field(default=1, ge=1)
    world_size: int = Field(init=False)
    rank: int = 0
    data_parallel_index: int = Field(init=False)

# --- vllm.distributed.parallel_state
class GroupCoordinator:
    world_size: int
    rank_in_group: int
    cpu_group: ProcessGroup
def get_world_group() -> GroupCoordinator: ...

# --- vllm.model_executor.model_loader.reload.layerwise
def get_layerwise_info(layer: torch.nn.Module) -> LayerReloadingInfo: ...
def _get_original_loader(tensor: torch.Tensor) -> Callable: ...

# --- vllm.model_executor.model_loader.reload.meta
from .sanitize import restore_layer_refs
def to_meta_tensor(tensor: torch.Tensor) -> torch.Tensor: ...
def restore_layer_on_meta(layer: torch.nn.Module, info: LayerReloadingInfo): ...

# --- vllm.model_executor.model_loader.reload.sanitize
def restore_layer_refs(tensor: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor: ...

# --- vllm.model_executor.model_loader.reload.types
@dataclass
class LayerReloadingInfo:
    restore_metadata: LayerTensors

# --- vllm.model_executor.layers.attention
def is_deferred_attention_layer(layer: torch.nn.Module) -> bool: ...

# --- vllm.v1.worker.gpu_worker
class Worker:
    def load_model(self, *, load_dummy_weights: bool=False):
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(self.vllm_config.weight_transfer_config, self.vllm_config, self.device, self.model_runner.get_model())
    def _set_draft_weight_update_target(self):
        self.weight_transfer_engine.set_weight_update_target(draft_model, speculative_config.draft_model_config)
    def init_weight_transfer_engine(self, init_info: dict):
        typed_init_info = self.weight_transfer_engine.parse_init_info(init_info)
        self.weight_transfer_engine.init_transfer_engine(typed_init_info)
    def shutdown_weight_transfer_engine(self):
        self.weight_transfer_engine.shutdown()
    def _start_weight_update(self, is_draft: bool=False):
        self.weight_transfer_engine.start_weight_update()
    def update_weights(self, update_info: dict | list[dict]):
        self.weight_transfer_engine.update_weights(local_update_info)
    def finish_weight_update(self):
        self.weight_transfer_engine.finish_weight_update()
        self.weight_transfer_engine.reset_weight_update_target()
    def shutdown(self):
        weight_transfer_engine.shutdown()

# --- routes
router.get('/get_world_size')
router.get('/is_paused')
router.get('/weight_info')
router.post('/abort_requests')
router.post('/collective_rpc')
router.post('/finish_weight_update')
router.post('/init_weight_transfer_engine')
router.post('/pause')
router.post('/resume')
router.post('/shutdown_weight_transfer_engine')
router.post('/start_draft_weight_update')
router.post('/start_weight_update')
router.post('/update_weight_version')
router.post('/update_weights')
router.post('/weight_checker')
