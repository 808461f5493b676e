#!/usr/bin/env bash
# Everything that the README's tables hold for a GPU, each result written as it comes. From the repository's root:
#
#     bash docs/measure.sh PART FOLDER                one part
#     bash docs/measure.sh all FOLDER [SECONDS]       every part that FOLDER has not got yet, one at a time on each card;
#                                                     none begins that would not end within SECONDS
#     bash docs/measure.sh list                       the parts, each with the seconds it takes on an H200
#
# The first engine on a machine compiles its kernels for a minute more. A smaller card is emulated by a second process
# that holds the rest, and memory is counted as what the card has in use beyond what others had at the start: nothing
# else may use the card meanwhile. The notebooks need nbclient; QWEN_COMPLETION=256 makes theirs shorter.
set -uo pipefail  # what a part prints is kept by tee: its own exit code is to count
export COLAB_KIT_DASHBOARD=off PYTHONUNBUFFERED=1

parts() { # "for how long" is measured where a part has run, otherwise (?) guessed
  cat <<'PARTS'
soak 1340
t4-kernels 85
t4-trial 60
t4-float16 200
t4-learning 260
t4-memory 120
keep 130 ?
four-keep 220
nf4-llama 210
nf4-steps 440
three 200 ?
passes 200
qwen-16bit 75
nf4-qwen 270
notebook-t4 150
notebook-a100 540
nf4-kernel 40
four-0.8-off 145
pairs 245
llama-40 165
llama-80 250
qwen-80 200
fourteen 380
cycles 230
qwen-40 200
four-0.7-off 180
four-0.7-on 180
llama-t4 165
four-0.9-on 150
four-0.9-off 65
four-0.95-on 60
PARTS
}

rows() { python3 -m colab_kit.benchmark rows --name "$part" --out "$out/$part.json" "$@"; }
result() { grep --line-buffered -e RESULT -e "of .* steps" | tee "$out/$part.txt"; }

measure() {
  part=$1 out=$2
  four="--model qwen3_4b --card 14.56 --dtype float16 --attention TRITON_ATTN --sdpa efficient --steps 2"
  step="--generations 2 --accumulation 1 --completion 64 --steps 1 --row 6"
  t4="--card 14.56 --dtype float16 --attention TRITON_ATTN --sdpa efficient"
  llama="--model llama31_8b --dtype bfloat16"
  case $part in
  # Standby: with and without, on a T4's memory; 14B in 16 bits; cycles; steps in turn
  four-0.7-on) rows $four --row 2 --lengths 1024,4096,16384,40960 --kernels ;;
  four-keep) rows $four --keep --steps 5 --row 2,5 --lengths 1024,4096 ;;
  four-0.9-on) rows $four --row 1 --lengths 1024,4096,40960 ;;
  four-0.95-on) rows $four --row 0 --lengths 1024,4096,16384 ;;
  four-0.7-off) rows $four --row 5 --lengths 1024,4096,16384,24576,28672,32768 ;;
  four-0.8-off) rows $four --row 4 --lengths 1024,4096,16384,18432 ;;
  four-0.9-off) rows $four --row 3 --lengths 1024,4096,7168,8192 ;;
  fourteen) # memory does not depend on how many sequences follow one another
    rows --model qwen25_14b --16bit --card 79.2 --dtype bfloat16 --generations 8 --accumulation 1 --completion 64 \
      --offload --row 2,5 --lengths 32768 --steps 1 ;;
  three)
    rows --model qwen25_3b --16bit --card 39.4 --dtype bfloat16 --generations 8 --accumulation 1 --completion 64 \
      --row 6 --lengths 10240,32768 --steps 1 ;;
  cycles)
    UNSLOTH_VLLM_STANDBY=1 python3 -m colab_kit.benchmark soak $llama --lengths 1024 --completion 640 --cycles 200 \
      --steps 0 --utilization 0.25 | result ;;
  pairs)
    UNSLOTH_VLLM_STANDBY=1 python3 -m colab_kit.benchmark soak $llama --lengths 1024 --completion 512 --cycles 20 \
      --steps 12 --generations 4 --accumulation 1 | result ;;
  # Long sequences: whole steps; the training pass by each set of memory devices
  llama-t4) rows $step --model llama31_8b $t4 --lengths 4096,16384,32768,45056,49152 ;;
  llama-40) rows $step $llama --card 39.4 --lengths 16384,98304 ;;
  llama-80) rows $step $llama --card 79.2 --lengths 131072 ;;
  qwen-40) rows $step --model qwen3_32b --card 39.4 --dtype bfloat16 --lengths 8192,32768 ;;
  qwen-80) rows $step --model qwen3_32b --card 79.2 --dtype bfloat16 --lengths 40960 ;;
  qwen-16bit) rows $step --model qwen3_32b --16bit --dummy --card 79.2 --dtype bfloat16 --lengths 12288 ;;
  keep) # at a T4's usual lengths: layers kept whole where the card has room, against all of them recomputed
    for how in --keep ""; do
      python3 -m colab_kit.benchmark rows --name "keep$how" --out "$out/keep$how.json" --model llama31_8b $t4 $how \
        --row 6 --lengths 1024,1536 --generations 6 --accumulation 1 --completion 128 --steps 5
    done ;;
  passes)
    UNSLOTH_VLLM_STANDBY=1 python3 -m colab_kit.benchmark passes $llama --lengths 4096,16384,65536 --steps 2 \
      --utilization 0.3 | result ;;
  # Twenty minutes of faults at a T4's memory; its exit code says whether something was lost
  soak)
    python3 -m colab_kit.soak --minutes 20 --model llama31_8b $t4 --rank 32 --prompt 512 --completion 256 |
      tee "$out/soak.txt" ;;
  # A T4: which kernels a step runs, the trial of preflight(deep=True), float16 against bfloat16
  t4-kernels) python3 -m colab_kit.t4_audit record "$out/t4_kernels.json" | tee "$out/t4_triton.txt" ;;
  t4-trial) python3 -m colab_kit.trial t4 | grep --line-buffered TRIAL | tee "$out/t4_trial.txt" ;;
  t4-float16)
    python3 docs/float16.py "$out/float16" | grep --line-buffered -e cosine -e memory -e step_time |
      tee "$out/float16.txt" ;;
  t4-memory) # loading and two steps at the preset's lengths in Colab's system memory
    python3 -c "from colab_kit.benchmark import random_model; random_model('llama31_8b')"
    in_system_memory 12700000000 rows --model llama31_8b $t4 --keep --row 6 --lengths 1536 --generations 16 \
      --accumulation 1 --completion 1024 --steps 2 ;;
  t4-learning) python3 docs/float16_learning.py "$out/learning" --at-once 4 | tee "$out/t4-learning.md" ;;
  # The notebooks' own cells in the memory of their cards, 5 steps at the presets' lengths, every completion full
  notebook-t4)
    notebook llama31_8b_qlora_t4 --shape llama31_8b --card 14.56 --prompt-tokens 500 \
      --set max_steps=4 more_steps=1 held_out_problems=6 ;;
  notebook-a100)
    notebook qwen3_32b_qlora_a100 --shape qwen3_32b --card 39.4 --prompt-tokens 1000 \
      --set max_steps=4 more_steps=1 held_out_problems=8 max_completion_length="${QWEN_COMPLETION:-3072}" ;;
  # The 4-bit product for decoding
  nf4-kernel)
    python3 -m pytest -q -p no:cacheprovider tests/test_nf4.py -k "on_the_gpu or choice" 2>&1 | tail -15 |
      tee "$out/nf4-tests.txt"
    python3 -m colab_kit.nf4_benchmark kernel | tee "$out/nf4-kernel.md" ;;
  nf4-llama) python3 -m colab_kit.nf4_benchmark engine --model llama31_8b --batches 8,16,32,64 | tee "$out/$part.txt" ;;
  nf4-qwen) python3 -m colab_kit.nf4_benchmark engine --model qwen3_32b --batches 8,16 | tee "$out/$part.txt" ;;
  nf4-steps) # whole steps at the presets' lengths, sampler against trainer: with the kit's product and without
    for preset in "llama31_8b --dtype float16 --card 14.56 --lengths 1536 --generations 16 --completion 1024" \
      "qwen3_32b --dtype bfloat16 --card 39.4 --lengths 4096 --generations 8 --completion 512"; do
      for how in "" --bitsandbytes; do
        python3 -m colab_kit.benchmark rows --keep --row 6 --accumulation 1 --steps 2 --model $preset $how \
          --name "steps$how" --out "$out/nf4-steps-${preset%% *}$how.json"
      done
    done ;;
  *)
    echo "no part $part: bash docs/measure.sh list" >&2
    return 1
    ;;
  esac
}

in_system_memory() { # bytes, command: a second process holds the rest; where more is needed the command is to be ended
  coproc HOLD {
    exec python3 -c "import numpy, psutil, sys
kept = numpy.ones(int(psutil.virtual_memory().available - $1), 'uint8')
print('held', flush=True)
sys.stdin.read()"
  }
  echo -1000 >"/proc/$HOLD_PID/oom_score_adj"
  read -r _ <&"${HOLD[0]}"
  echo "system memory left: $(free -b | awk '/Mem/ {print $7}') bytes"
  "${@:2}"
  local status=$?
  kill "$HOLD_PID" || echo "the rest of the system memory was not held to the end"
  return $status
}

notebook() {
  name=$1
  shift
  unset COLAB_KIT_DASHBOARD
  PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} python3 docs/execute_notebook.py "notebooks/$name.ipynb" "$@" \
    --without 'kit.install()' 'machine.require()' --out "$out" 2>&1 | tee "$out/$name.txt"
}

next_part() { # the first that nobody has taken and that ends in time; taking it is making its folder, FOLDER/.PART
  while read -r name seconds _; do
    [ "$seconds" -le "$(($1 - $(date +%s)))" ] && mkdir "$out/.$name" 2>/dev/null && echo "$name" && return
  done < <(parts)
}

worker() { # card, end
  export CUDA_VISIBLE_DEVICES=$1
  while part=$(next_part "$2") && [ -n "$part" ]; do
    began=$(date +%s)
    echo "card $1: $part begins"
    bash "$0" "$part" "$out" >"$out/$part.log" 2>&1
    echo "card $1: $part ended with $? after $(($(date +%s) - began)) s"
  done
}

case ${1-} in
list) parts ;;
all)
  out=$2 end=$(($(date +%s) + ${3:-86400}))
  mkdir -p "$out"
  for card in $(seq 0 $(($(nvidia-smi -L | wc -l) - 1))); do worker "$card" "$end" & done
  wait
  ;;
'') sed -n '2,12s/^# \{0,1\}//p' "$0" ;;
*)
  mkdir -p "$2"
  measure "$1" "$2"
  ;;
esac
