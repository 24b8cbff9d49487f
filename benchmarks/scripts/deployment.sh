#!/usr/bin/env bash
# Everything about deployment that should be measured on a machine that does nothing else, in one command:
#
#   benchmarks/scripts/deployment.sh IMAGES RUN OUT
#
# IMAGES is a folder of photographs, RUN a finished run (`greedynas demo --out RUN`), OUT the folder of the record. PYTHON
# is an environment with the extras openvino, executorch, ncnn and coreml, and PYTHON_LITERT one with litert (torch below
# 2.15) besides them. It takes about an hour on two cores.
set -euo pipefail
images=$1 run=$2 out=$3
python=${PYTHON:-python} litert=${PYTHON_LITERT:-$python}
export OMP_NUM_THREADS=1 PYTHONPATH=${PYTHONPATH:-$PWD}
mkdir -p "$out"
uptime | tee "$out/load.txt"
"$litert" -m benchmarks.scripts.deployment_formats --images "$images" --run "$run" --out "$out"
for backend in openvino ncnn; do
  "$python" benchmarks/scripts/latency_prediction.py fashion macro --backend "$backend" --repeats 40 --out "$out/latency-$backend.json"
done
uptime | tee -a "$out/load.txt"
