#!/usr/bin/env bash
# Everything that the README's tables hold for a GPU, each result written as it comes. From the repository's root:
#
#     bash docs/measure.sh PART FOLDER
#
# PART: standby-on, standby-off, fourteen, cycles (Standby); llama, window, qwen, sixteen, passes (long sequences);
# soak (20 minutes); t4; nf4; notebooks (needs nbclient; QWEN_COMPLETION=256 is shorter). Each of the first nine is meant
# to take under 9 minutes on an H200, the minute included for which the first engine on a machine compiles its kernels;
# none has been timed as a whole yet.
#
# Several cards: one part each, with CUDA_VISIBLE_DEVICES. A smaller card is emulated by a second process that holds the
# rest, and memory is counted as what the card has in use beyond what others had at the start: nothing else may use the
# card meanwhile.
set -u
part=$1 out=$2
mkdir -p "$out"
export COLAB_KIT_DASHBOARD=off PYTHONUNBUFFERED=1
rows() { name=$1; shift; python3 -m colab_kit.benchmark rows --name "$name" --out "$out/$name.json" "$@"; }

case $part in
standby-*)
  four="--model qwen3_4b --card 14.56 --dtype float16 --attention TRITON_ATTN --sdpa efficient --steps 2"
  ;;&
standby-on)
  rows qwen3-4b-0.7-on $four --row 2 --lengths 1024,4096,16384,32768 --kernels
  rows qwen3-4b-0.9-on $four --row 1 --lengths 1024,4096,40960
  rows qwen3-4b-0.95-on $four --row 0 --lengths 1024,4096
  ;;
standby-off)
  rows qwen3-4b-0.7-off $four --row 5 --lengths 1024,4096,16384,24576,32768
  rows qwen3-4b-0.9-off $four --row 3 --lengths 1024,4096,8192,16384
  rows qwen3-4b-0.8-off $four --row 4 --lengths 1024,4096,16384,24576
  ;;
fourteen) # with and without Standby; memory does not depend on how many sequences follow one another
  fourteen="--model qwen25_14b --16bit --card 79.2 --dtype bfloat16 --generations 8 --accumulation 1 --completion 64"
  rows qwen25-14b-16bit $fourteen --offload --row 2,5 --lengths 32768 --steps 1
  ;;
cycles)
  export UNSLOTH_VLLM_STANDBY=1
  python3 -m colab_kit.benchmark soak --model llama31_8b --dtype bfloat16 --lengths 1024 --completion 640 --cycles 200 \
    --steps 10 --utilization 0.25 | grep --line-buffered RESULT | tee "$out/cycles.txt"
  ;;
passes)
  export UNSLOTH_VLLM_STANDBY=1
  python3 -m colab_kit.benchmark passes --model llama31_8b --dtype bfloat16 --lengths 4096,16384,65536 --steps 2 \
    --utilization 0.3 | grep --line-buffered RESULT | tee "$out/passes.txt"
  ;;
llama | window | qwen | sixteen)
  step="--generations 2 --accumulation 1 --completion 64 --steps 1 --row 6"
  t4="--model llama31_8b --card 14.56 --dtype float16 --attention TRITON_ATTN --sdpa efficient"
  ;;&
llama)
  rows llama-8b-t4 $step $t4 --lengths 4096,16384,32768,49152
  rows llama-8b-40 $step --model llama31_8b --card 39.4 --dtype bfloat16 --lengths 16384,98304
  ;;
window)
  rows llama-8b-80 $step --model llama31_8b --card 79.2 --dtype bfloat16 --lengths 131072
  ;;
qwen)
  rows qwen3-32b-40 $step --model qwen3_32b --card 39.4 --dtype bfloat16 --lengths 8192,32768
  rows qwen3-32b-80 $step --model qwen3_32b --card 79.2 --dtype bfloat16 --lengths 40960
  ;;
sixteen)
  rows qwen3-32b-16bit-80 $step --model qwen3_32b --16bit --card 79.2 --dtype bfloat16 --lengths 12288
  ;;
soak)
  set -o pipefail # its exit code says whether something was lost
  t4="--model llama31_8b --card 14.56 --dtype float16 --attention TRITON_ATTN --sdpa efficient --rank 32"
  python3 -m colab_kit.soak --minutes 20 $t4 --prompt 512 --completion 256 | tee "$out/soak.txt"
  ;;
t4)
  python3 -m colab_kit.t4_audit record "$out/t4_kernels.json" | tee "$out/t4_triton.txt"
  python3 -m colab_kit.trial t4 | grep --line-buffered TRIAL | tee "$out/t4_trial.txt"
  python3 docs/float16.py "$out/float16" | grep --line-buffered -e cosine -e memory -e step_time | tee "$out/float16.txt"
  ;;
notebooks)
  # The notebooks' own cells in the memory of their cards, 5 steps at the presets' lengths, every completion full.
  unset COLAB_KIT_DASHBOARD
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  cells() { python3 docs/execute_notebook.py "$@" --out "$out" 2>&1 | tee "$out/$(basename "$1" .ipynb).txt"; }
  here='kit.install() machine.require()'
  cells notebooks/llama31_8b_qlora_t4.ipynb --shape llama31_8b --card 14.56 --prompt-tokens 500 --without $here \
    --set max_steps=4 more_steps=1 held_out_problems=6
  cells notebooks/qwen3_32b_qlora_a100.ipynb --shape qwen3_32b --card 39.4 --prompt-tokens 1000 --without $here \
    --set max_steps=4 more_steps=1 held_out_problems=8 max_completion_length=${QWEN_COMPLETION:-3072}
  ;;
nf4)
  python3 -m pytest -q -p no:cacheprovider tests/test_nf4.py -k "on_the_gpu or choice" 2>&1 | tail -15 | tee "$out/nf4-tests.txt"
  python3 -m colab_kit.nf4_benchmark kernel | tee "$out/nf4-kernel.md"
  for shape in llama31_8b:8,16,32,64 qwen3_32b:8,16; do
    python3 -m colab_kit.nf4_benchmark engine --model "${shape%:*}" --batches "${shape#*:}" | tee "$out/nf4-${shape%:*}.txt"
  done
  ;;
esac
