// Preloaded stub of libcdsprpc.so: of a device's driver, and of ExecuTorch's allocator, whose functions are empty on
// x86_64. It allocates ordinary memory, which the QNN backend accepts.
#include <cstdio>
#include <cstdlib>

extern "C" {

void* QnnExecuTorchAllocCustomMem(size_t bytes, size_t alignment) {
  std::fprintf(stderr, "rpcmem stub: allocated %zu\n", bytes);
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void QnnExecuTorchFreeCustomMem(void* memory) {
  std::fprintf(stderr, "rpcmem stub: freed\n");
  std::free(memory);
}
}
