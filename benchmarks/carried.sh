# Sourced on a GPU machine in the root of a checkout with carry/ (see carry.sh). Kernels that an earlier machine compiled are
# used again if they came back from there: tar cJf carry/triton.tar.xz -C /tmp/triton .
export PYTHONPATH=$PWD/carry/py:$PWD PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton
if [ ! -d /tmp/triton ]; then
  mkdir /tmp/triton
  [ ! -f carry/triton.tar.xz ] || tar xJf carry/triton.tar.xz -C /tmp/triton
fi
if [ ! -d /tmp/cifar10 ]; then
  mkdir /tmp/cifar10
  tar xJf carry/cifar10-jpeg.tar.xz -C /tmp/cifar10
fi
