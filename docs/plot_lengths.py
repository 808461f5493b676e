"""Memory and seconds of a training pass against its length, from what `colab_kit.benchmark rows --out` wrote.

pip install matplotlib
python docs/plot_lengths.py docs/images/lengths.svg docs/measured/{llama,qwen,four-0.7}*.json
"""

import json
import sys

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

NAMES = {
    "llama-t4": "Llama-3.1 8B, 14.56 GiB, fp16", "llama-40": "Llama-3.1 8B, 39.4 GiB",
    "llama-80": "Llama-3.1 8B, 79.2 GiB",
    "qwen-40": "Qwen3 32B, 39.4 GiB", "qwen-80": "Qwen3 32B, 79.2 GiB", "qwen-16bit": "Qwen3 32B, 16 bits, 79.2 GiB",
    "four-0.7-on": "Qwen3 4B, 14.56 GiB, fp16", "four-0.7-off": "the same, no Standby",
}  # fmt: skip

target, *sources = sys.argv[1:]
series: dict[str, list[dict]] = {}
for source in sources:
    for row in json.load(open(source)):
        if row.get("asleep"):
            series.setdefault(NAMES[row["name"]], []).append(row)
figure, (memory, seconds) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, rows in sorted(series.items(), key=lambda item: list(NAMES.values()).index(item[0])):
    rows.sort(key=lambda row: row["length"])
    lengths = [row["length"] / 1024 for row in rows]
    memory.plot(lengths, [row["asleep"] for row in rows], "o-", label=name)
    seconds.plot(lengths, [row["training_s"] / row["sequences"] for row in rows], "o-", label=name)
memory.set(xlabel="tokens a sequence / 1,024", ylabel="GiB at the peak of training, by the driver", ylim=0)
seconds.set(xlabel="tokens a sequence / 1,024", ylabel="seconds a sequence, training pass", ylim=0)
figure.legend(*memory.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=3)
for axes in (memory, seconds):
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
figure.savefig(target, metadata={"Date": None})
