# Source this on a GPU machine in the root of a checkout with carry/ (see carry.sh); it unpacks the images to build/cifar10. To use
# the kernels again that an earlier machine compiled, pack them there (tar cJf triton.tar.xz -C build/triton .) and put them in carry/.
export PYTHONPATH=$PWD/carry/py:$PWD PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$PWD/build/triton
if [ ! -d build/triton ]; then
  mkdir -p build/triton
  [ ! -f carry/triton.tar.xz ] || tar xJf carry/triton.tar.xz -C build/triton
fi
if [ ! -d build/cifar10 ]; then
  mkdir -p build/cifar10
  tar xJf carry/cifar10-jpeg.tar.xz -C build/cifar10
fi
