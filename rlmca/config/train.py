"""Keys of training that every stage shares, under Hugging Face's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlmca.config.fields import option

_SCHEDULERS = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)
MIN_LR_SCHEDULERS = ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "linear", "polynomial", "warmup_stable_decay")
_SCHEDULERS_LATER = {
    k: f"{k}: follows the loss, which is not in this version; write cosine, linear or constant" for k in ("reduce_lr_on_plateau", "greedy")
}
_LARGEST_SCALE = 2.0**126
"""So that the factor and one over it are numbers of float32."""
_STRATEGIES = ("no", "steps", "epoch")
_STRATEGIES_LATER = {"best": "best: not in this version; write steps or epoch with load_best_model_at_end: true"}


@dataclass(frozen=True)
class TrainConfig:
    """Optimiser, schedule, saving, evaluation and logging. A step is one optimiser step (stage grpo: one rollout)."""

    output_dir: str = option("", "Folder for logs, checkpoints and the trained model.")
    overwrite_output_dir: bool = option(False, "Start afresh in an output_dir that already holds a run.")
    do_train: bool = option(True, "Train; only true makes sense for the command train.")
    do_eval: bool = option(False, "Evaluate once at the end of training.")
    per_device_train_batch_size: int = option(1, "Sequences of one micro-batch on one data-parallel rank.", at_least=1)
    per_device_eval_batch_size: int = option(8, "Sequences of one evaluation micro-batch on one data-parallel rank.", at_least=1)
    max_tokens_per_microbatch: int | None = option(
        None,
        "Most tokens of a micro-batch, padding included. Rows are then grouped by length and dealt out so that ranks have "
        "equal work; which rows make a step does not change.",
        at_least=1,
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches of an optimiser step; stage grpo derives it.", at_least=1)
    learning_rate: float = option(5e-5, "Peak learning rate.", at_least=0)
    lr_scheduler_type: str = option("linear", "Shape of the learning rate over the run.", choices=_SCHEDULERS, refused=_SCHEDULERS_LATER)
    lr_scheduler_kwargs: dict[str, Any] = option({}, "Further arguments of the scheduler, under Transformers' names.")
    warmup_steps: int = option(0, "Steps over which the learning rate rises; below 1 it is a share of the run.", at_least=0)
    warmup_ratio: float = option(0.0, "Share of the run over which the learning rate rises.", at_least=0, below=1)
    min_lr: float = option(0.0, "Lowest learning rate after warm-up.", at_least=0)
    num_train_epochs: float = option(3.0, "Passes over the training rows when max_steps is not set.", above=0)
    max_steps: int = option(-1, "Number of steps; -1: num_train_epochs decides.", at_least=-1)
    weight_decay: float = option(0.0, "AdamW's decoupled weight decay.", at_least=0)
    adam_beta1: float = option(0.9, "AdamW's first decay rate.", at_least=0, below=1)
    adam_beta2: float = option(0.999, "AdamW's second decay rate.", at_least=0, below=1)
    adam_epsilon: float = option(1e-8, "AdamW's epsilon.", above=0)
    max_grad_norm: float = option(1.0, "Global gradient norm is clipped to this; 0: no clipping.", at_least=0)
    bf16: bool = option(False, "Compute in bfloat16 with float32 master weights; otherwise float32.")
    fp16: bool = option(False, "Compute in float16 with float32 master weights and a scaled loss; excludes bf16.")
    loss_scale: float | None = option(
        None, "fp16: constant factor of the loss; not set or 0: found by itself.", at_least=0, at_most=_LARGEST_SCALE
    )
    initial_loss_scale: float = option(
        65536.0, "fp16: factor that a run starts with (2^32 in Megatron-LM).", at_least=1 / _LARGEST_SCALE, at_most=_LARGEST_SCALE
    )
    min_loss_scale: float = option(1.0, "fp16: the factor never falls below this.", at_least=1 / _LARGEST_SCALE, at_most=_LARGEST_SCALE)
    loss_scale_window: int = option(1000, "fp16: the factor doubles after so many steps without an overflow.", at_least=1)
    hysteresis: int = option(2, "fp16: the factor is halved from so many overflows on, counted since it last doubled.", at_least=1)
    use_cpu: bool = option(False, "Hide CUDA devices and train on the CPU.")
    seed: int = option(42, "Seed of weights, dropout, data order and sampling.", at_least=0, at_most=2**32 - 1)
    logging_steps: int = option(1, "Log every so many steps.", at_least=1)
    save_strategy: str = option("steps", "When checkpoints are written.", choices=_STRATEGIES, refused=_STRATEGIES_LATER)
    save_steps: int = option(500, "Write a checkpoint every so many steps.", at_least=1)
    save_total_limit: int | None = option(None, "Keep at most this many checkpoints.", at_least=1)
    save_only_model: bool = option(False, "Checkpoints without optimiser state; such a run cannot be resumed.")
    save_hf_model: bool = option(True, "Write a Hugging Face folder to output_dir/hf at the end.")
    eval_strategy: str = option("no", "When evaluation runs.", choices=_STRATEGIES, refused=_STRATEGIES_LATER)
    eval_steps: int | None = option(None, "Evaluate every so many steps; logging_steps when not set.", at_least=1)
    metric_for_best_model: str | None = option(
        None,
        "Evaluation metric that names the best checkpoint: loss in stages pt and sft, accuracy in stage grpo.",
        choices=("loss", "eval_loss", "accuracy", "eval_accuracy"),
    )
    greater_is_better: bool | None = option(None, "Follows from metric_for_best_model; may only agree with it.")
    stop_value: float | None = option(None, "End the run once an evaluation reaches this value of stop_metric.")
    stop_metric: str = option(
        "", "Evaluation metric that stop_value speaks of; eval_loss in stages pt and sft, eval_accuracy in stage grpo."
    )
    load_best_model_at_end: bool = option(False, "End with the weights of the checkpoint that evaluated best.")
    report_to: list[str] = option(
        [],
        "Trackers besides the run's own log; none: no tracker.",
        choices=("tensorboard", "wandb", "swanlab", "trackio", "mlflow"),
    )
    run_name: str | None = option(None, "Name of the run in trackers.")
    plot_loss: bool = option(False, "Draw the curves to PNG files.")
    resume_from_checkpoint: str | None = option(
        None, "Not set or auto (or true): the newest whole checkpoint of output_dir, if any; or a checkpoint folder."
    )
    ddp_timeout: int = option(1800, "Seconds that ranks wait for each other.", at_least=1)

    @property
    def resume_newest(self) -> bool:
        """True when the newest checkpoint of output_dir is wanted."""
        return self.resume_from_checkpoint == "auto"
