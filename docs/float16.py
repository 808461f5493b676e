"""Is float16, all that a T4 has, as good as bfloat16? One batch's gradients in each dtype against float32's.

    python docs/float16.py FOLDER [--model llama31_8b] [--dtypes float32,bfloat16,float16]

On a GPU that has both; one process for each dtype over the same random checkpoint and the same sampled batch (float32:
the trainer's pass alone, beside an engine in bfloat16, since vLLM's attention takes 16 bits). The last one also prints
what whole steps at the T4 preset's lengths took, in seconds and in system memory.
"""

import argparse
import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch

import colab_kit as kit
from colab_kit.measure import alternating
from colab_kit.shapes import write_checkpoint


def host_memory(what: str) -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    shown = [line.replace("\t", " ") for line in lines if line.startswith(("VmHWM", "RssAnon", "RssFile"))]
    print(f"system memory, {what}: {'; '.join(shown)}", flush=True)


def one(dtype: str, folder: Path, last: bool) -> None:
    kit.enable_standby()
    gpu = torch.cuda.is_available()
    preset = kit.presets.LLAMA31_8B_T4 if gpu else kit.presets.QUICKSTART.replace(reward_weights=None)
    settings = preset.replace(
        model_name_or_path=str(folder / "model"), sdpa_backend="efficient" if gpu else None, max_steps=1,
        dtype="bfloat16" if gpu and dtype == "float32" else dtype,
        output_dir=str(folder / dtype), save_minutes=None, log_completions=False,
    )  # fmt: skip
    policy = kit.load(settings)
    host_memory("loaded")
    from colab_kit.trainer import Trainer

    class Gradients(Trainer):
        def optimizer_step(self):
            grads = [p.grad for p in self.parameters]
            self.overflows = sum(int((~g.isfinite()).sum()) for g in grads)
            self.scaler.unscale_(self.optimizer)
            self.gradients = [g.float().cpu().flatten() for g in grads]
            return {}

    generator = torch.Generator().manual_seed(1)  # B is zero at first, which would leave A without gradients
    for p in policy.model.parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.02)
    policy.sync()
    if dtype != settings.dtype:
        widen(policy)
    length = settings.max_prompt_length - 2
    rows = [{"prompt": " ".join(f"w{10 + (i + j) * 7 % 400}" for i in range(length))} for j in range(8)]
    short = settings.replace(
        max_completion_length=min(settings.max_completion_length, 128), vllm_importance_sampling_correction=False
    )
    trainer, batch = Gradients(policy, rows, alternating, short), folder / "batch.pkl"
    trainer.dashboard = type("Silent", (), {"progress": lambda *args: None})()
    if not batch.exists():
        batch.write_bytes(pickle.dumps(trainer.generate(0)))
    rollout = pickle.loads(batch.read_bytes())
    trainer.optimize(rollout, torch.tensor([2.0 * (i % 2) - 1 for i in range(len(rollout.completions))]))
    torch.save({"gradients": trainer.gradients, "overflows": trainer.overflows}, folder / f"{dtype}.pt")
    compare(folder, dtype)
    if last:
        for step in kit.train(policy, rows, alternating, settings.replace(max_steps=3)).metrics:
            shown = "time/generating", "time/training", "step_time", "num_tokens", "completions/mean_length"
            print({name: round(step[name], 3) for name in shown}, flush=True)
        host_memory("after whole steps")


def widen(policy) -> None:
    """The trainer's pass in float32, over float32 copies of its 16-bit weights; the engine keeps its own."""
    for module in policy.model.modules():
        if state := getattr(module, "quant_state", None):
            state.dtype = module.compute_dtype = torch.float32
    for p in policy.model.parameters():
        if p.is_floating_point():
            p.data = p.data.float()
    policy.engine.dtype = torch.float32


def compare(folder: Path, dtype: str) -> None:
    exact, other = (torch.load(folder / f"{name}.pt") for name in ("float32", dtype))
    a, b = torch.cat(exact["gradients"]).double(), torch.cat(other["gradients"]).double()
    worst = min(
        torch.cosine_similarity(x, y, dim=0).item() for x, y in zip(exact["gradients"], other["gradients"], strict=True)
    )
    print(
        f"{dtype}: cosine {torch.cosine_similarity(a, b, dim=0):.6f} (worst tensor {worst:.5f}), relative norm of the "
        f"difference {(b - a).norm() / a.norm():.5f}, overflows {other['overflows']}", flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama31_8b")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="float32 first")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    dtypes = options.dtypes.split(",")
    if options.one:
        one(options.one, options.folder, last=options.one == dtypes[-1])
    else:
        write_checkpoint(options.model, options.folder / "model")
        for dtype in dtypes:
            subprocess.run([sys.executable, *sys.argv, "--one", dtype], env=os.environ, check=True)
