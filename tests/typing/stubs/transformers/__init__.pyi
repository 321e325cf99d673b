from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

class GPT2Config:
    def __init__(
        self,
        *,
        vocab_size: int,
        n_positions: int,
        n_embd: int,
        n_layer: int,
        n_head: int,
        bos_token_id: int,
        eos_token_id: int,
    ) -> None: ...

class GPT2LMHeadModel(nn.Module):
    def __init__(self, config: GPT2Config) -> None: ...
    def resize_token_embeddings(self, new_num_tokens: int) -> nn.Embedding: ...
    def get_input_embeddings(self) -> nn.Embedding: ...

class TrainingArguments:
    def __init__(
        self,
        *,
        output_dir: str,
        num_train_epochs: float,
        max_grad_norm: float,
        use_cpu: bool,
        report_to: Literal["none"],
        save_strategy: Literal["no"],
        disable_tqdm: bool,
        logging_steps: float,
    ) -> None: ...

class TrainerState:
    log_history: list[dict[str, float]]

class Trainer:
    state: TrainerState
    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        train_dataset: Dataset[dict[str, Tensor]],
        optimizers: tuple[Optimizer | None, LRScheduler | None],
    ) -> None: ...
    def train(self) -> object: ...
