// Preloaded as libcdsprpc.so: stands in for a device's driver and for ExecuTorch's allocator on top of it, which
// the x86_64 library has without an inside. Ordinary memory, which the QNN backend takes as any other.
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
