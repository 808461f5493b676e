"""Settings: one frozen dataclass, checked when it is made; one preset for each model and GPU.

Names and defaults follow TRL's `GRPOConfig` and `ModelConfig` and transformers' `TrainingArguments` wherever they have
one. Where the kit departs from TRL, the field says so.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo")
LINEAR_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""that vLLM's slot for an adapter can have"""
CHOICES: dict[str, tuple] = {
    "loss_type": LOSS_TYPES,
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "importance_sampling_level": ("token", "sequence"),
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "sdpa_backend": (None, "efficient"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "lr_scheduler_type": ("constant", "linear", "cosine", "constant_with_warmup"),
    "optim": ("auto", "adamw_torch", "adamw_8bit", "paged_adamw_8bit"),
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run. Change some with `settings.replace(max_steps=100)`."""

    # --- model -----------------------------------------------------------------------------------
    model_name_or_path: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """a folder, or a name on the Hugging Face hub"""
    load_in_4bit: bool = True
    """NF4 weights by bitsandbytes; False keeps the checkpoint's 16 bits"""
    dtype: str = "auto"
    """of activations: auto is bfloat16 where the GPU has it, float16 on a T4, float32 on a CPU"""
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] = LINEAR_MODULES
    # --- one step ---------------------------------------------------------------------------------
    num_generations: int = 8
    """completions a prompt, G; at least 2"""
    per_device_train_batch_size: int = 8
    """completions; times gradient_accumulation_steps: those of an optimizer step. How they are cut never changes it"""
    gradient_accumulation_steps: int = 1
    max_completion_length: int = 256
    """tokens"""
    max_prompt_length: int | None = None
    """tokens; longer prompts are left out before training and counted. None: what the window leaves"""
    vllm_max_model_length: int | None = None
    """prompt and completion, tokens. None: max_prompt_length (or 512) + max_completion_length"""
    max_tokens_per_micro_batch: int | None = None
    """tokens that one forward and backward holds; None: chosen from the free memory, and printed"""
    logprob_chunk_size: int = 256
    """tokens whose logits exist at one time"""
    gradient_checkpointing: bool | None = None
    """recompute the layers in the backward pass. None: as many as the card has no room to keep whole, and printed"""
    activation_offloading: bool | None = None
    """keep each layer's checkpoint in pinned host memory while training; None: where the card needs it, and printed"""
    mlp_tile_tokens: int | None = None
    """tokens that the MLP takes at a time while training; None: as many as the card has room for, and printed"""
    sdpa_backend: str | None = None
    """torch's attention kernel while training. None: its choice, flash from sm_80 on, efficient on a T4"""
    chat_template_kwargs: dict[str, Any] | None = None
    # --- sampling ---------------------------------------------------------------------------------
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off"""
    min_p: float | None = None
    repetition_penalty: float = 1.0
    # --- rewards and advantages -------------------------------------------------------------------
    scale_rewards: str = "group"
    reward_weights: tuple[float, ...] | None = None
    multi_objective_aggregation: str = "sum_then_normalize"
    # --- loss -------------------------------------------------------------------------------------
    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: epsilon"""
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    num_iterations: int = 1
    mask_truncated_completions: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "sequence_mask"
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    # --- optimizer --------------------------------------------------------------------------------
    learning_rate: float = 1e-4
    """TRL's 1e-6 is meant for full fine-tuning; LoRA needs about a hundred times as much"""
    lr_scheduler_type: str = "constant_with_warmup"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    optim: str = "auto"
    """auto: adamw_8bit on a GPU, adamw_torch on a CPU"""
    # --- run --------------------------------------------------------------------------------------
    max_steps: int = 100
    seed: int = 42
    shuffle_dataset: bool = True
    output_dir: str = "outputs"
    save_steps: int | None = None
    """None: no checkpoint by steps. A run that is stopped or fails saves its last whole step in any case."""
    save_minutes: float | None = 10.0
    """None: no checkpoint by time. An interrupt saves the last whole step in any case"""
    save_total_limit: int = 2
    """the newest checkpoints that stay, besides the one with the best reward"""
    report_to: tuple[str, ...] = ()
    log_completions: bool = True
    """shows the latest prompt with its completions"""
    # --- engine -----------------------------------------------------------------------------------
    vllm_gpu_memory_utilization: float | None = None
    """share of the GPU that vLLM may take while it generates. None: chosen by the plan, and printed"""
    vllm_max_num_seqs: int | None = None
    """completions generated at a time. None: those of one step, 64 at most"""
    vllm_attention_backend: str | None = None
    """None: vLLM's own choice for the card"""
    enforce_eager: bool | None = None
    """None: CUDA graphs on a GPU, eager on a CPU"""
    nf4_kernel: bool = True
    """decode with the kit's 4-bit product (nf4.py) where it is faster than bitsandbytes': measured and said at load"""

    def __post_init__(self) -> None:
        chosen = [(name, getattr(self, name), allowed) for name, allowed in CHOICES.items()]
        chosen += [("lora_target_modules", name, LINEAR_MODULES) for name in self.lora_target_modules]
        for name, value, allowed in chosen:
            if value not in allowed:
                near = get_close_matches(str(value), map(str, allowed), n=1, cutoff=0.4)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(str, allowed))}{hint}")
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations must be at least 2: with one completion the group's standard deviation is 0, "
                f"so no completion is better than another; got {self.num_generations}"
            )
        self._at_least(1, "per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length")
        self._at_least(1, "num_iterations", "max_steps", "lora_r", "lora_alpha", "logprob_chunk_size")
        self._check(lambda value: value > LORA_RANKS[-1], "at most", LORA_RANKS[-1], ("lora_r",))
        self._at_least(1, "max_prompt_length", "vllm_max_model_length", "max_tokens_per_micro_batch")
        self._at_least(1, "vllm_max_num_seqs", "save_total_limit", "save_steps", "mlp_tile_tokens")
        self._at_least(0, "top_k", "warmup_steps", "weight_decay", "beta", "min_p", "seed")
        self._above(0, "temperature", "learning_rate", "max_grad_norm", "repetition_penalty", "epsilon", "delta")
        self._above(0, "sapo_temperature_pos", "sapo_temperature_neg", "save_minutes", "adam_epsilon")
        self._above(0, "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min")
        self._below(1, "lora_dropout", "vllm_gpu_memory_utilization", "min_p", "adam_beta1", "adam_beta2")
        self._above(0, "vllm_gpu_memory_utilization", "top_p")
        self._at_least(0, "lora_dropout", "adam_beta1", "adam_beta2")
        self._check(lambda value: value > 1, "at most", 1, ("top_p",))
        if self.completions_per_step % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size x gradient_accumulation_steps = {self.completions_per_step} completions "
                f"a step must be a multiple of num_generations={self.num_generations}, so that every group is whole"
            )
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            raise ValueError(f"epsilon_high={self.epsilon_high} must not be below epsilon={self.epsilon}")
        if self.delta is not None and self.delta <= 1 + (self.epsilon_high or self.epsilon):
            raise ValueError(f"delta={self.delta} must be above 1 + epsilon_high; it caps ratios that clipping leaves")
        low, high = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            bound = "vllm_importance_sampling_clip_"
            raise ValueError(f"{bound}min={low} must be below {bound}max={high}")
        if self.vllm_max_model_length is not None and self.vllm_max_model_length <= self.max_completion_length:
            raise ValueError(
                f"vllm_max_model_length={self.vllm_max_model_length} leaves no room for a prompt beside "
                f"max_completion_length={self.max_completion_length}"
            )

    @property
    def completions_per_step(self) -> int:
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_step(self) -> int:
        return self.completions_per_step // self.num_generations

    @property
    def max_model_length(self) -> int:
        """Tokens of prompt and completion together."""
        return self.vllm_max_model_length or (self.max_prompt_length or 512) + self.max_completion_length

    def replace(self, **changes: Any) -> Settings:
        """A copy with some fields changed; an unknown name is an error that names the nearest field."""
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                near = get_close_matches(name, names, n=1, cutoff=0.5)
                raise TypeError(f"no setting is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return dataclasses.replace(self, **changes)

    def _check(self, bad, what: str, bound: float, names: tuple[str, ...]) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and (value != value or bad(value)):
                raise ValueError(f"{name} must be {what} {bound}; got {value}")

    def _at_least(self, bound: float, *names: str) -> None:
        self._check(lambda value: value < bound, "at least", bound, names)

    def _above(self, bound: float, *names: str) -> None:
        self._check(lambda value: value <= bound, "above", bound, names)

    def _below(self, bound: float, *names: str) -> None:
        self._check(lambda value: value >= bound, "below", bound, names)


QUICKSTART = Settings(
    num_generations=8,
    per_device_train_batch_size=16,
    max_prompt_length=64,
    max_completion_length=24,
    reward_weights=(0.5, 0.5),
    learning_rate=5e-4,
    max_steps=24,
)
"""SmolLM2-135M on two CPU cores, or on any GPU."""

LLAMA31_8B_T4 = Settings(
    model_name_or_path="unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
    dtype="float16",
    lora_r=32,
    lora_alpha=64,
    num_generations=8,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_prompt_length=512,
    max_completion_length=1024,
    learning_rate=5e-5,
    max_steps=40,
    vllm_attention_backend="TRITON_ATTN",
)
"""Llama-3.1 8B on a free Colab T4 (14.56 GiB, no bfloat16)."""

QWEN3_32B_A100 = Settings(
    model_name_or_path="unsloth/Qwen3-32B-bnb-4bit",
    dtype="bfloat16",
    lora_r=32,
    lora_alpha=64,
    num_generations=8,
    per_device_train_batch_size=8,
    max_prompt_length=1024,
    max_completion_length=3072,
    learning_rate=5e-5,
    max_steps=40,
)
"""Qwen3 32B on an A100 with 40 GB."""

QWEN3_32B_A100_80GB = QWEN3_32B_A100.replace(max_completion_length=7168)
"""Qwen3 32B on an A100 with 80 GB: room for twice the window."""


def by_memory(small: Settings, large: Settings, at_least: float = 70) -> Settings:
    """`large` where the card has `at_least` GiB, else `small`; says which."""
    from .preflight import read_gpu

    gpu = read_gpu()
    chosen = large if gpu is not None and gpu.total >= at_least else small
    card = f"{gpu.name} with {gpu.total:.0f} GiB" if gpu else "no GPU"
    print(f"{card}: {chosen.max_model_length:,} tokens a sequence")
    return chosen


def in_ci() -> bool:
    """Whether an automatic test runs this notebook (COLAB_KIT_CI=1): the same cells, with SmolLM2 and small numbers."""
    return os.environ.get("COLAB_KIT_CI") == "1"


def for_ci(settings: Settings) -> Settings:
    """The settings as they are; with COLAB_KIT_CI=1, as automatic tests set it, SmolLM2 and fewer, smaller steps."""
    if not in_ci():
        return settings
    print("COLAB_KIT_CI=1: SmolLM2 and small numbers in the place of the settings above")
    if settings.model_name_or_path == Settings.model_name_or_path:
        return settings.replace(max_steps=min(settings.max_steps, 10))
    return settings.replace(
        model_name_or_path=Settings.model_name_or_path, dtype="auto", lora_r=16, num_generations=4,
        per_device_train_batch_size=4, gradient_accumulation_steps=1, max_prompt_length=128, max_completion_length=24,
        vllm_max_model_length=None, vllm_attention_backend=None, chat_template_kwargs=None, max_steps=3, save_steps=2,
    )  # fmt: skip
